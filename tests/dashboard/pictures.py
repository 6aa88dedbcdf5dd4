"""The pictures in docs/pictures, made anew: `python -m tests.dashboard.pictures` starts real runs, one of them under
mpirun, and photographs every page. `--every FOLDER` photographs every page at 400, 900 and 1440 px, light and dark,
for somebody to look at. `--states` makes sheets of all pages of a run at work, and of the overview, the ranks and the
hosts of one that has ended, has crashed, or waits: two widths, light and dark. `--film` makes README's moving picture
alone: the overview while LunarLander is learned."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

import ddrl
from ddrl.core.config import Config, RunConfig, TelemetryConfig
from ddrl.core.roles import Evaluation as Judged
from ddrl.core.roles import Returns
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import Recorder
from tests.dashboard.webdriver import Browser, dashboard_of, free_port, missing_browser, serving
from tests.telemetry.fake_cluster import FakeCluster
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
PAGES = [path.stem.partition("_")[2] for path in sorted((ROOT / "ddrl" / "dashboard" / "subjects").glob("*.py"))]
IN_DOCS = ("overview", "distribution", "replay", "ranks", "runs")
NAME = "cartpole-4-hosts"
WIDTHS = (400, 900, 1440)
HEIGHT = 1300
FILM = (1100, 960)  # [px] width and height of the moving picture
LOOK = 4.0  # [s] between two frames of the moving picture
FRAME = 250  # [ms] that it shows each of them; the last one for LAST_FRAME
LAST_FRAME = 4000
COLOURS = 64


def make_runs() -> ddrl.notebook.StartedRun:
    """Four short runs to compare, and one that goes on, with four relays."""
    for lr in (5e-4, 2.3e-3):
        for seed in (1, 2):
            settings = {"learner.lr": lr, "run.seed": seed, "run.max_env_steps": 12_000, "telemetry.period": 0.25}
            ddrl.start("cartpole", {**settings, "run.dir": f"runs/lr-{lr:g}-seed-{seed}"}).wait()
    settings = {
        "run.dir": f"runs/{NAME}",
        "cluster.relays": 4,
        "run.max_env_steps": 10_000_000,
        "replay.samples_per_insert": 8.0,
        "run.max_seconds": 7200,
        "run.target_return": float("inf"),
        "telemetry.period": 0.5,
    }
    run = ddrl.start("cartpole", settings, ranks=16, wait=PATIENCE)
    for process in psutil.Process().children(recursive=True):
        process.nice(15)  # the browser draws meanwhile
    return run


def photograph(browser: Browser, url: str, page: str, path: Path) -> None:
    """One page of the run that goes on, when its charts stand."""
    chosen = (
        f"?run={NAME}"
        if page != "compared"
        else "?run=lr-0.0005-seed-1&run=lr-0.0005-seed-2" + ("&run=lr-0.0023-seed-1&run=lr-0.0023-seed-2&smoothing=0.5")
    )
    browser.open(f"{url}/{page if page != 'compared' else 'overview'}{chosen}")
    browser.wait_for("running" if page != "compared" else "ended")
    if page not in ("settings", "runs"):
        # Pages of pools, nodes and ads say in words that this run has none.
        shown = ".js-plotly-plot .main-svg, [data-testid=stDataFrame], [data-testid=stAlert]"
        wait_until(lambda: browser.find(shown), "charts")
    wait_until(lambda: not browser.find("[data-testid=stStatusWidget] img"), "the page at rest")
    time.sleep(3)  # a redraw may be under way
    browser.screenshot(path)
    print(f"{path.name}: {browser.console_errors()[-1:] or 'no console errors'}", flush=True)


STATES = ("ended", "crashed", "waiting")
WITH_CHARTS = ("overview", "distribution", "devices", "replay", "ranks")
ERROR = "rank 7 (rollout): ValueError: no such action\nTraceback (most recent call last):\n  File env.py, in step\n"


@contextlib.contextmanager
def runs_in_every_state(folder: Path) -> Generator[None]:
    """Recorded runs of pretend clusters: one at work, one that waits for its ranks, one that ended and one that
    crashed a minute after their start."""
    period = TelemetryConfig(period=0.01, live=False)
    configs = {"ended": period, "crashed": period, "waiting": TelemetryConfig(), "live": TelemetryConfig()}
    recorders: dict[str, Recorder] = {}
    clusters = {name: FakeCluster(24, 4, began=time.time() - 60 * (name != "live")) for name in configs}

    def tables_of(name: str) -> np.ndarray:
        cluster = clusters[name]
        if name == "waiting":
            return np.full_like(cluster.table(), np.nan)
        passed = max(time.time() - cluster.now, 1e-3)
        cluster.advance(passed if name == "live" else min(1.0, passed))  # else a minute's records at once
        return cluster.table()

    with contextlib.ExitStack() as stack:
        for name, telemetry in configs.items():
            config = Config(telemetry=telemetry, run=RunConfig(max_env_steps=10**7))
            (folder / name).mkdir(parents=True)
            (folder / name / "config.toml").write_text(config_to_toml(config))
            clock = partial(getattr, clusters[name], "now")
            times = {} if name in ("waiting", "live") else {"clock": clock, "monotonic": clock}
            recorders[name] = stack.enter_context(Recorder(folder / name, partial(tables_of, name), config, **times))
        for name in ("ended", "crashed", "live"):
            for number in range(6):
                returns = Returns(60.0 * number, 20.0, 20)
                recorders[name].record_evaluation(Judged(number, 4e5 * (number + 1), returns), updates=number)
        for name, kind, text in (("ended", "stop", "reached run.max_env_steps"), ("crashed", "error", ERROR)):
            wait_until(lambda name=name: clusters[name].now > time.time() - 2, "a minute of records")
            recorders[name].record_event(kind, text)
            recorders[name].close()
        yield


def states(driver: str) -> None:
    """Sheets of all pages: FOLDER/states-WIDTH.png and -dark."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name) / "runs"
        stack.enter_context(runs_in_every_state(folder))
        url = stack.enter_context(dashboard_of(Path(name)))
        wanted = [("live", page) for page in PAGES]
        wanted += [(state, page) for state in STATES for page in ("overview", "ranks", "distribution")]
        for width, height, columns, size in ((1440, 1100, 4, 480), (400, 1400, 8, 200)):
            for dark in (False, True):
                window = Browser(driver, width=width, height=height, dark=dark)
                taken = [_shot(window, url, state, page) for state, page in wanted]
                window.close()
                images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in taken]
                tall = size * images[0].height // images[0].width
                sheet = Image.new("RGB", (columns * size, -(-len(images) // columns) * tall), "gray")
                for place, image in enumerate(images):
                    small = image.resize((size, tall), Image.Resampling.LANCZOS)
                    sheet.paste(small, (place % columns * size, place // columns * tall))
                path = FOLDER / f"states-{width}{'-dark' if dark else ''}.png"
                sheet.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
                print(f"{path.name}: {len(taken)} pages, {path.stat().st_size} bytes", flush=True)


def _shot(window: Browser, url: str, state: str, page: str) -> bytes:
    """One page when all of its charts stand."""
    window.open(f"{url}/{page}?run={state}")
    window.wait_for(state)
    drawn = "const all = [...document.querySelectorAll('.ddrl-chart')]; return all.length > 0 && all.every(one => "
    drawn += "one.querySelector('.main-svg'))"
    if page in WITH_CHARTS and (state, page) != ("waiting", "distribution"):
        wait_until(lambda: window.run(drawn), "every chart")
    wait_until(lambda: not window.find("[data-testid=stStatusWidget] img"), "the page at rest")
    time.sleep(2)  # a redraw may be under way
    return window.picture()


def film(driver: str, url: str, path: Path) -> None:
    """The overview from a run's start until its target is reached, a frame for each change, as a GIF."""
    run = ddrl.start("lunarlander", {"run.dir": "runs/lunarlander"})
    window = Browser(driver, width=FILM[0], height=FILM[1])
    wait_until(lambda: (run.path / "status.json").exists(), "the run")
    window.open(f"{url}/overview?run=lunarlander")
    wait_until(lambda: window.find(".js-plotly-plot .main-svg"), "charts")
    pictures = [window.picture()]
    shown = ""
    while not (run.summary and "ended" in shown):
        time.sleep(LOOK)  # the film's own clock
        shown = window.text
        picture = window.picture()
        if picture != pictures[-1]:
            pictures.append(picture)
    window.close()
    frames = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    # One table of colours for all frames, so that what does not change costs nothing.
    colours = frames[-1].quantize(COLOURS)
    frames = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    times = [FRAME] * (len(frames) - 1) + [LAST_FRAME]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)
    print(f"{path.name}: {len(frames)} frames, {path.stat().st_size} bytes", flush=True)


def main() -> None:
    """Start, wait until there is something to see, photograph, stop."""
    if missing_browser():
        raise SystemExit(missing_browser())
    parser = argparse.ArgumentParser(prog="python -m tests.dashboard.pictures", description=__doc__)
    parser.add_argument("--every", type=Path, metavar="FOLDER")
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--film", action="store_true")
    arguments = parser.parse_args()
    every = arguments.every.absolute() if arguments.every else None
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        os.chdir(name)  # so that pages show runs/..., not this folder's name
        os.environ["PYTHONPATH"] = str(ROOT)
        port, driver_port = free_port(), free_port()
        command = [sys.executable, "-m", "streamlit", "run", str(ROOT / "dashboard" / "app.py"), "--server.port"]
        command += [str(port), "--server.address", "127.0.0.1", "--server.headless", "true"]
        command += ["--client.toolbarMode", "minimal", "--browser.gatherUsageStats", "false"]
        url, driver = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{driver_port}"
        stack.enter_context(serving(command, f"{url}/_stcore/health", stdout=subprocess.DEVNULL))
        stack.enter_context(
            serving(["chromedriver", f"--port={driver_port}"], f"{driver}/status", stdout=subprocess.DEVNULL)
        )

        if arguments.states:
            states(driver)
            return
        if arguments.film:
            film(driver, url, FOLDER / "dashboard.gif")
            return
        run = make_runs()
        stack.callback(run.stop)

        def evaluated() -> bool:
            with run.open() as tables:
                return len(tables.evaluations()) >= 4

        wait_until(evaluated, "four evaluations")
        ddrl.play(run, seed=3)
        for dark in (False, True):
            ending = "-dark" if dark else ""
            browser = Browser(driver, dark=dark, height=HEIGHT)
            stack.callback(browser.close)
            for page in (*IN_DOCS, "compared") if not dark else ("overview",):
                photograph(browser, url, page, FOLDER / f"dashboard-{page}{ending}.png")
            for width in WIDTHS if every else ():
                window = Browser(driver, dark=dark, width=width, height=3000 if width < 900 else 2000)
                for page in (*PAGES, "compared"):
                    photograph(window, url, page, every / f"{page}-{width}{ending}.png")
                window.close()


if __name__ == "__main__":
    main()

"""How the dashboard feels: page load on a run of 10^7 stored points, event to pixel, the server's processor time and
memory with one viewer.

Needs Debian's chromium and chromium-driver. One recorder writes a pretend cluster of 300 ranks in real time while one
page is open."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness import arguments, print_table, save
from benchmarks.telemetry.fake_cluster import FakeCluster
from benchmarks.telemetry.recorder import fill
from benchmarks.telemetry.viewer import Viewer
from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import Recorder
from tests.dashboard.webdriver import Browser, free_port, missing_browser, serving
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@contextmanager
def dashboard(runs: Path, period: float) -> Iterator[tuple[str, psutil.Process]]:
    """A dashboard on its own port: its URL and its process."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "streamlit",
        "run",
        "dashboard/app.py",
        "--server.port",
        str(port),
        "--server.headless",
        "true",
        "--",
        str(runs),
    ]
    environment = {**os.environ, "DDRL_DASHBOARD_PERIOD": str(period)}
    with serving(
        command,
        f"http://127.0.0.1:{port}/_stcore/health",
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)


@contextmanager
def live_run(path: Path, period: float, processes: int = 300) -> Iterator[Recorder]:
    """A pretend cluster that is recorded in real time."""
    path.mkdir(parents=True, exist_ok=True)
    config = Config(telemetry=TelemetryConfig(period=period))
    (path / "config.toml").write_text(config_to_toml(config))
    cluster = FakeCluster(processes, 8, began=time.time())

    def tables() -> np.ndarray:
        cluster.advance(max(time.time() - cluster.now, 1e-3))
        return cluster.table()

    with Recorder(path, tables, config) as recorder:
        yield recorder


def page_load(browser: Browser, folder: Path, points: int, loads: int) -> dict[str, float]:
    """Seconds from asking for the overview of a huge run until its charts are drawn. A run that stands in `folder`
    already is taken."""
    big = folder / "huge"
    if not big.exists():
        big.mkdir(parents=True)
        (big / "config.toml").write_text(config_to_toml(Config()))
        fill(big, points)
    seconds = []
    with dashboard(folder, 1.0) as (url, _):
        for _ in range(loads + 1):  # the first also starts Python's imports of the server
            browser.open("about:blank")
            begin = time.perf_counter()
            browser.open(url)
            wait_until(lambda: len(browser.find(".js-plotly-plot .main-svg .trace")) >= 7, "seven charts")
            seconds.append(time.perf_counter() - begin)
    return {
        "points": points,
        "loads": loads,
        "first_s": seconds[0],
        "median_s": statistics.median(seconds[1:]),
        "worst_s": max(seconds[1:]),
    }


def freshness(browser: Browser, folder: Path, events: int) -> dict[str, float]:
    """Seconds from record_event to the words on the page."""
    seconds: list[float] = []
    with live_run(folder / "fresh", 1.0) as recorder, dashboard(folder, 1.0) as (url, _):
        browser.open(url + "/ranks")
        browser.wait_for("ranks are alive")
        chance = np.random.default_rng(0)
        for number in range(events):
            time.sleep(float(chance.uniform(0, 1)))  # at any moment of the page's period
            begin = time.perf_counter()
            recorder.record_event("alarm", f"word number {number:04d}")
            wait_until(lambda number=number: f"word number {number:04d}" in browser.text, "the event")
            seconds.append(time.perf_counter() - begin)
    return {
        "p50_s": float(np.quantile(seconds, 0.5)),
        "p95_s": float(np.quantile(seconds, 0.95)),
        "worst_s": max(seconds),
    }


def server_load(browser: Browser, folder: Path, seconds: float) -> dict[str, float]:
    """Share of a core that the server takes with one viewer of the overview, refreshed each second."""
    with live_run(folder / "load", 1.0), dashboard(folder, 1.0) as (url, server):
        browser.open(url)
        browser.wait_for("Return", "Loss")
        time.sleep(5)
        begin = time.perf_counter()
        used = sum(server.cpu_times()[:2])
        time.sleep(seconds)
        return {"core_share": (sum(server.cpu_times()[:2]) - used) / (time.perf_counter() - begin)}


def server_memory(folder: Path, refreshes: int, most_seconds: float = 900.0) -> dict[str, float]:
    """The server's resident memory while an hour of updates, one a second, passes as fast as the server redraws:
    `refreshes` of all parts.

    Taken after a tenth of them, when caches are full, and at the end, or after `most_seconds` with as many as there
    were by then. The run grows ten records a second meanwhile."""
    with live_run(folder / "memory", 0.1, processes=64) as recorder, dashboard(folder, 1.0) as (url, server):
        wait_until(lambda: recorder.latest and recorder.latest.tick > 5, "records")
        viewer = Viewer(url)
        assert len(viewer.fragments) >= 3, viewer.fragments
        samples: list[float] = []
        begin = time.perf_counter()
        for _ in range(refreshes):
            viewer.refresh()
            samples.append(server.memory_info().rss / 2**20)
            if time.perf_counter() - begin > most_seconds:
                break
        seconds = time.perf_counter() - begin
        viewer.close()
    tenth = max(len(samples) // 10, 1)
    early = statistics.median(samples[tenth : 2 * tenth])
    late = statistics.median(samples[-tenth:])
    return {
        "early_mib": early,
        "late_mib": late,
        "growth": late / early - 1,
        "largest_mib": max(samples),
        "refreshes": len(samples),
        "seconds": seconds,
        "parts": len(viewer.fragments),
        "sent_mb": viewer.received / 1e6,
    }


PARTS = {
    "freshness": lambda browser, folder, short: freshness(browser, folder, 8 if short else 30),
    "server_load": lambda browser, folder, short: server_load(browser, folder, 10 if short else 40),
    "page_load": lambda browser, folder, short: page_load(
        browser, folder, 10**6 if short else 10**7, 3 if short else 7
    ),
    "server_memory": lambda browser, folder, short: server_memory(folder, 150 if short else 3600),
}
LIMITS = [
    ("event to pixel, p95 [s]", "freshness", "p95_s", 2.0),
    ("page load, median [s]", "page_load", "median_s", 3.0),
    ("page load, worst [s]", "page_load", "worst_s", 3.0),
    ("server, one viewer [share of a core]", "server_load", "core_share", 0.15),
    ("server's memory over accelerated updates [growth]", "server_memory", "growth", 0.05),
]


def main() -> None:
    """Measure and print."""
    parser = arguments("dashboard", __doc__ or "")
    parser.add_argument(
        "--huge",
        type=Path,
        metavar="FOLDER",
        help="where the huge run stands, or is made and left (default: made anew)",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="measure these alone; the JSON keeps the others"
    )
    options = parser.parse_args()
    if missing_browser():
        raise SystemExit(f"benchmarks.telemetry.dashboard {missing_browser()}")
    kept = json.loads(options.json.read_text()) if options.json.exists() and set(options.parts) != set(PARTS) else {}
    figures = {part: kept[part] for part in PARTS if part in kept}
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as name,
        serving(["chromedriver", f"--port={port}"], f"http://127.0.0.1:{port}/status", stdout=subprocess.DEVNULL),
    ):
        for part in options.parts:
            folder = options.huge if part == "page_load" and options.huge else Path(name) / part
            folder.mkdir(parents=True, exist_ok=True)
            browser = Browser(f"http://127.0.0.1:{port}")
            try:
                figures[part] = {**PARTS[part](browser, folder, options.short), "load_1min": os.getloadavg()[0]}
            finally:
                browser.close()
    print_table(
        ["what", "measured", "limit"],
        [[words, figures[part][figure], limit] for words, part, figure, limit in LIMITS if part in figures],
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()

"""How the dashboard feels: page load on a run of 10^7 stored points, event to pixel, the server's processor time and memory with one viewer.

Needs Debian's chromium and chromium-driver. One recorder writes a pretend cluster of 300 ranks in real time while one page is open.
"""

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

from benchmarks.fake_cluster import FakeCluster
from benchmarks.harness import arguments, print_table, save
from benchmarks.telemetry import fill
from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import Recorder
from tests.dashboard.webdriver import Browser, free_port, missing_browser, serving, until

ROOT = Path(__file__).parents[1]


@contextmanager
def dashboard(runs: Path, period: float) -> Iterator[tuple[str, psutil.Process]]:
    """A dashboard on its own port: its URL and its process."""
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", "dashboard/app.py", "--server.port", str(port), "--server.headless", "true", "--", str(runs)]
    environment = {**os.environ, "DDRL_DASHBOARD_PERIOD": str(period)}
    with serving(command, f"http://127.0.0.1:{port}/_stcore/health", cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
                 stderr=subprocess.DEVNULL) as process:
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
    """Seconds from asking for the overview of a huge run until its charts are drawn."""
    big = folder / "huge"
    big.mkdir()
    (big / "config.toml").write_text(config_to_toml(Config()))
    fill(big, points)
    seconds = []
    with dashboard(folder, 1.0) as (url, _):
        for _ in range(loads + 1):  # the first also starts Python's imports of the server
            browser.open("about:blank")
            begin = time.perf_counter()
            browser.open(url)
            until(lambda: len(browser.find(".js-plotly-plot .main-svg .trace")) >= 7, "seven charts")
            seconds.append(time.perf_counter() - begin)
    return {"first_s": seconds[0], "median_s": statistics.median(seconds[1:]), "worst_s": max(seconds[1:])}


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
            until(lambda number=number: f"word number {number:04d}" in browser.text, "the event")
            seconds.append(time.perf_counter() - begin)
    return {"p50_s": float(np.quantile(seconds, 0.5)), "p95_s": float(np.quantile(seconds, 0.95)), "worst_s": max(seconds)}


def server_load(browser: Browser, folder: Path, seconds: float) -> dict[str, float]:
    """Share of a core that the server takes with one viewer of the overview, refreshed each second."""
    with live_run(folder / "load", 1.0), dashboard(folder, 1.0) as (url, server):
        browser.open(url)
        browser.wait_for("Return", "Loss")
        time.sleep(5)
        begin, used = time.perf_counter(), sum(server.cpu_times()[:2])
        time.sleep(seconds)
        return {"core_share": (sum(server.cpu_times()[:2]) - used) / (time.perf_counter() - begin)}


def server_memory(browser: Browser, folder: Path, refreshes: int, period: float = 0.1) -> dict[str, float]:
    """The server's resident memory while an hour of updates passes as fast as pages are drawn: `refreshes` of them, seen in the browser.

    After a tenth of them, when caches are full, and at the end.
    """
    with live_run(folder / "memory", 0.1, processes=64), dashboard(folder, period) as (url, server):
        browser.open(url)
        browser.wait_for("Return", "Loss")
        until(lambda: browser.find(".js-plotly-plot .main-svg"), "a chart")
        browser.run("window.drawn = 0; document.querySelector('.js-plotly-plot').on('plotly_afterplot', () => { window.drawn += 1 })")
        samples: list[tuple[int, float]] = []
        begin = time.perf_counter()
        while not samples or samples[-1][0] < refreshes:
            time.sleep(0.5)
            samples.append((browser.run("return window.drawn"), server.memory_info().rss / 2**20))
            assert time.perf_counter() - begin < 30 + refreshes, "the page does not refresh"
        seconds = time.perf_counter() - begin

        def around(low: float, high: float) -> float:
            return statistics.median(memory for drawn, memory in samples if low * refreshes <= drawn <= high * refreshes + 2)

    early, late = around(0.1, 0.2), around(0.9, 1.0)
    return {"early_mib": early, "late_mib": late, "growth": late / early - 1, "refreshes": samples[-1][0], "seconds": seconds,
            "largest_mib": max(memory for _, memory in samples)}


PARTS = {"freshness": lambda browser, folder, short: freshness(browser, folder, 8 if short else 40),
         "server_load": lambda browser, folder, short: server_load(browser, folder, 10 if short else 60),
         "page_load": lambda browser, folder, short: page_load(browser, folder, 10**6 if short else 10**7, 3 if short else 7),
         "server_memory": lambda browser, folder, short: server_memory(browser, folder, 150 if short else 3600)}
LIMITS = [("event to pixel, p95 [s]", "freshness", "p95_s", 2.0), ("page load, median [s]", "page_load", "median_s", 3.0),
          ("page load, worst [s]", "page_load", "worst_s", 3.0), ("server, one viewer [share of a core]", "server_load", "core_share", 0.15),
          ("server's memory over the refreshes of an hour [growth]", "server_memory", "growth", 0.05)]


def main() -> None:
    """Measure and print."""
    parser = arguments("dashboard", __doc__ or "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="measure these alone; the JSON keeps the others")
    options = parser.parse_args()
    if missing_browser():
        raise SystemExit(f"benchmarks.dashboard {missing_browser()}")
    kept = json.loads(options.json.read_text()) if options.json.exists() and set(options.parts) != set(PARTS) else {}
    figures = {part: kept[part] for part in PARTS if part in kept}
    port = free_port()
    with tempfile.TemporaryDirectory() as name, serving(["chromedriver", f"--port={port}"], f"http://127.0.0.1:{port}/status",
                                                        stdout=subprocess.DEVNULL):
        for part in options.parts:
            folder = Path(name) / part
            folder.mkdir()
            browser = Browser(f"http://127.0.0.1:{port}")
            try:
                figures[part] = {**PARTS[part](browser, folder, options.short), "load_1min": os.getloadavg()[0]}
            finally:
                browser.close()
    print_table(["what", "measured", "limit"], [[words, figures[part][figure], limit] for words, part, figure, limit in LIMITS if part in figures])
    save(options.json, figures)


if __name__ == "__main__":
    main()

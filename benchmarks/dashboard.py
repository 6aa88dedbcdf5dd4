"""How the dashboard feels: page load on a run of 10^7 stored points, event to pixel, the server's processor time and memory with one viewer.

Needs Debian's chromium and chromium-driver. One recorder writes a pretend cluster of 300 ranks in real time while one page is open.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
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
    """The server's resident memory, refreshed ten times a second, after a tenth of the time and at the end."""
    with live_run(folder / "memory", 0.1, processes=64), dashboard(folder, period) as (url, server):
        browser.open(url)
        browser.wait_for("Return", "Loss")
        samples: list[float] = []
        ended = threading.Event()
        end = time.monotonic() + refreshes * period
        while time.monotonic() < end:
            ended.wait(1.0)
            samples.append(server.memory_info().rss / 2**20)
        tenth = max(len(samples) // 10, 1)
        early, late = statistics.median(samples[tenth : 2 * tenth + 1]), statistics.median(samples[-tenth:])
    return {"early_mib": early, "late_mib": late, "growth": late / early - 1, "refreshes": refreshes}


def main() -> None:
    """Measure and print."""
    options = arguments("dashboard", __doc__ or "").parse_args()
    if missing_browser():
        raise SystemExit(f"benchmarks.dashboard {missing_browser()}")
    short = options.short
    port = free_port()
    with tempfile.TemporaryDirectory() as name, serving(["chromedriver", f"--port={port}"], f"http://127.0.0.1:{port}/status",
                                                        stdout=subprocess.DEVNULL):
        browser = Browser(f"http://127.0.0.1:{port}")
        try:
            folders = [Path(name) / part for part in ("load", "fresh", "cpu", "memory")]
            for folder in folders:
                folder.mkdir()
            fresh = freshness(browser, folders[1], 8 if short else 40)
            load = server_load(browser, folders[2], 10 if short else 60)
            memory = server_memory(browser, folders[3], 150 if short else 3600)
            page = page_load(browser, folders[0], 10**6 if short else 10**7, 3 if short else 7)
        finally:
            browser.close()
    print_table(["what", "measured", "limit"], [
        ["event to pixel, p95 [s]", fresh["p95_s"], 2.0],
        ["page load, median [s]", page["median_s"], 3.0],
        ["page load, worst [s]", page["worst_s"], 3.0],
        ["server, one viewer [share of a core]", load["core_share"], 0.15],
        [f"server memory over {memory['refreshes']} refreshes [growth]", memory["growth"], 0.05],
    ])
    save(options.json, {"freshness": fresh, "page_load": page, "server_load": load, "server_memory": memory})


if __name__ == "__main__":
    main()

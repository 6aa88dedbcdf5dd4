"""How quick the dashboard is: page load on a run of 10^7 stored points, event to pixel, and the server's processor time
with one viewer.

Needs Debian's chromium and chromium-driver. One recorder writes a pretend cluster of 300 ranks in real time while one
page is open."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness import ROOT, arguments, run_parts
from benchmarks.telemetry.recorder import fill
from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import Recorder
from tests.dashboard.webdriver import Browser, free_port, missing_browser, serving
from tests.telemetry.fake_cluster import FakeCluster
from tests.waiting import wait_until


@contextmanager
def dashboard(runs: Path, period: float) -> Iterator[tuple[str, psutil.Process]]:
    """A dashboard on its own port: its URL and its process."""
    port = free_port()
    command = [sys.executable, "-m", "ddrl.dashboard", str(runs), "--server.port", str(port)]
    command += ["--server.headless", "true"]
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
    """Seconds from asking for the overview of a huge run until its charts are drawn. A run that `folder` holds already
    is used."""
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


PARTS = {
    "freshness": lambda browser, folder, options: freshness(browser, folder, 8 if options.short else 30),
    "server_load": lambda browser, folder, options: server_load(browser, folder, 10 if options.short else 40),
    "page_load": lambda browser, folder, options: page_load(
        browser, options.huge or folder, 10**6 if options.short else 10**7, 3 if options.short else 7
    ),
}


def main() -> None:
    parser = arguments("dashboard", __doc__ or "")
    parser.add_argument("--huge", type=Path, metavar="FOLDER", help="that holds the huge run, or keeps it once made")
    if missing_browser():
        raise SystemExit(f"benchmarks.telemetry.dashboard {missing_browser()}")
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def measured(name: str, options: argparse.Namespace) -> dict[str, float]:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(["chromedriver", f"--port={port}"], f"{url}/status", stdout=subprocess.DEVNULL),
        ):
            browser = Browser(url)
            try:
                found = {**PARTS[name](browser, Path(folder), options), "load_1min": os.getloadavg()[0]}
            finally:
                browser.close()
        print(name, *(f"{figure} {value:.4g}" for figure, value in found.items()), sep="  ", flush=True)
        return found

    run_parts(parser, {name: partial(measured, name) for name in PARTS})


if __name__ == "__main__":
    main()

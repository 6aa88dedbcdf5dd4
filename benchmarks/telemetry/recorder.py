"""What telemetry costs (a counter in the hot loop: benchmarks.run.channels): the recorder with 300 ranks at 10 Hz,
and a whole run with everything on."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Timing, arguments, in_turn, print_table, ratios, run_parts
from benchmarks.learning.loop import run_loop
from ddrl.core.config import Config, TelemetryConfig
from ddrl.telemetry import Record, Recorder
from ddrl.telemetry.series import SERIES, SeriesWindow
from ddrl.telemetry.store import Store
from tests.dashboard.webdriver import free_port
from tests.telemetry.fake_cluster import FakeCluster


def recorder_cost(seconds: float, processes: int = 300, rate: float = 10.0) -> dict[str, float]:
    """Share of a core that the recorder takes with so many ranks at so many records a second: everything on, one reader
    of the live stream."""
    cluster = FakeCluster(processes, 8)
    tables = []
    for _ in range(40):
        cluster.advance(1 / rate)
        tables.append(cluster.table())
    turn = iter(range(10**9))
    with tempfile.TemporaryDirectory() as folder:
        config = Config(telemetry=TelemetryConfig(period=1 / rate, tensorboard=True, prometheus_port=free_port()))
        reader = (
            "import pathlib, sys; from ddrl.telemetry import LiveReader\nwith LiveReader(pathlib.Path(sys.argv[1])) "
            "as live:\n"
            "    while live.receive(timeout=10): print(flush=True)"
        )
        with (
            Recorder(Path(folder), lambda: tables[next(turn) % len(tables)], config) as recorder,
            subprocess.Popen([sys.executable, "-c", reader, folder], stdout=subprocess.PIPE) as viewer,
        ):
            assert viewer.stdout is not None
            viewer.stdout.readline()  # it has its first record
            begin = time.perf_counter()
            used = time.process_time()
            time.sleep(seconds)
            share = (time.process_time() - used) / (time.perf_counter() - begin)
            records = recorder.latest.tick + 1 if recorder.latest else 0
            viewer.kill()
        nbytes = (Path(folder) / "telemetry.sqlite").stat().st_size
    return {"core_share": share, "records": records, "bytes_per_record": nbytes / max(records, 1)}


def fill(folder: Path, points: int, processes: int = 12) -> int:
    """Write a run of so many stored values; the number of records."""
    cluster = FakeCluster(processes, 3)
    window = SeriesWindow(Config())
    store = Store(folder)
    ticks = points // len(SERIES)
    for tick in range(ticks):
        if tick % 50 == 0 or tick < 200:  # a new table now and then: making them is not what is measured
            cluster.advance(1.0)
            values = window.measure(cluster.table(), cluster.now, cluster.elapsed)
            table = cluster.table()
        store.record(Record(tick, cluster.now + tick, float(tick), values, table))
    store.close()
    return ticks


CASES = {
    "least": ["telemetry.period=1e9", "telemetry.live=false"],
    "everything on": ["telemetry.tensorboard=true", "telemetry.prometheus_port={port}"],
    "everything on, ten records a second": [
        "telemetry.period=0.1",
        "telemetry.tensorboard=true",
        "telemetry.prometheus_port={port}",
    ],
}


def run_cost(rounds: int, env_steps: int) -> dict[str, object]:
    """Processor seconds of a serial run's loop, all threads, with telemetry at its least and with everything on, in
    turn in one process.

    The work is the same bit for bit (a serial run with one seed), so the ratio is that of throughputs on a processor of
    one's own."""

    def one(settings: list[str]) -> dict[str, float]:
        return run_loop("cartpole", env_steps, [setting.format(port=free_port()) for setting in settings])

    found = in_turn({name: partial(one, settings) for name, settings in CASES.items()}, 1 + rounds)
    # The first round warms up.
    seconds = {name: [run["processor_seconds"] for run in runs[1:]] for name, runs in found.items()}
    ratio = {name: ratios(taken, seconds["least"]) for name, taken in seconds.items() if name != "least"}
    for name, found in ratio.items():
        print(f"a run's loop, {name} / least: {found}")
    return {"cpu_seconds": {name: Timing.of(taken) for name, taken in seconds.items()}, "ratio": ratio}


def main() -> None:
    parser = arguments("telemetry", __doc__ or "")

    def run(options: argparse.Namespace) -> dict[str, Any]:
        return run_cost(1 if options.short else 7, 1_000 if options.short else 6_000)

    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "recorder": lambda options: recorder_cost(5 if options.short else 20),
        "whole_run": run,
    }

    def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
        found = parts[name](options)
        print_table([name, "measured"], list(found.items()))
        return found

    run_parts(parser, {name: partial(measured, name) for name in parts})


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()

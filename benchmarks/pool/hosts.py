"""Collectors of another host that start by prediction: a pool under mpirun on two hosts that this machine stands for.

Three tasks at once, each on a device of its own (a ninth of a core), with a collector on each host: cold, alive and
prewarm. Orders, parameters and rows of the second host go through relays and MPI. Idle and late seconds count from the
parameters' publication on the first. Cost: idle seconds + delay_cost x late seconds a collector."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.distribution.cluster import mpi_environment
from benchmarks.pool.collectors import MODES
from benchmarks.pool.real import traces, write_task
from ddrl.pool.prewarm import PrewarmSettings

HOSTS = 2
SHARE = 0.111


def compare(rounds: int, startup: float, collecting: float, updates: int) -> list[dict[str, Any]]:
    """A row for each way to start and host. collecting: seconds of a round, about two thirds of it; cold start gets
    fewer rounds, for they are longer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [
            write_task(
                folder,
                mode,
                seed=index + 1,
                rounds=HOSTS * (int(rounds / (1 + startup / (1.5 * collecting))) if mode == "cold" else rounds),
                updates=updates,  # many and short: an update more or less must not count
                width=128,
                startup=startup,
                step=collecting / 20,
                steps=20,
                variation=0.01,
                collectors=mode,
                limit=600,
            )
            for index, mode in enumerate(MODES)
        ]
        devices = ",".join([f"cpu:{max(os.sched_getaffinity(0))}@{SHARE}"] * len(MODES))
        settings = (f"run.dir={folder / 'pool'}", f"pool.devices={devices}", f"cluster.relays={HOSTS}")
        found = Path(sys.executable).with_name("mpirun")
        command = [str(found if found.exists() else "mpirun"), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        command += ["-n", str(1 + HOSTS * len(files)), sys.executable, "-m", "ddrl.run", "--tasks", *files]
        command += [word for text in settings for word in ("--set", text)]
        subprocess.run(command, check=True, env=mpi_environment(), stdout=subprocess.DEVNULL)
        _, own = traces(folder / "pool")
        lines = (folder / "pool" / "pool" / "instructions.jsonl").read_text().splitlines()
        orders = [json.loads(line) for line in lines]
        figures = {mode: json.loads((folder / "pool" / "summary.json").read_text())["tasks"][mode] for mode in MODES}
    return [
        _row(mode, host, own, {one["round"]: one for one in orders if one["task"] == mode}, figures[mode]["figures"])
        for mode in MODES
        for host in range(HOSTS)
    ]


def _row(
    mode: str, host: int, collectors: list[dict[str, Any]], orders: dict[int, dict[str, Any]], figures: dict[str, Any]
) -> dict[str, Any]:
    """Of the collectors of a task on one host: its worker `host`."""
    settings = PrewarmSettings()
    everyone = [one for one in collectors if one["task"] == mode]
    own = sorted((one for one in everyone if one["worker"] == host), key=lambda one: one["round"])
    lengths = [later["parameters"] - one["parameters"] for one, later in pairwise(own)]
    seconds = statistics.median(lengths)
    first_sent: dict[int, float] = {}
    for one in everyone:
        first_sent[one["round"]] = min(one["sent"], first_sent.get(one["round"], one["sent"]))
    before = [order["issued"] < first_sent[number - 1] for number, order in orders.items() if number - 1 in first_sent]
    counted = own[1:]
    told = {number for number, order in orders.items() if order["start"][host] is not None}
    predicted = [one for one in counted if one["round"] in told]
    shown = predicted or counted
    idle, late = (sum(max(0.0, sign * (one["parameters"] - one["ready"])) for one in shown) for sign in (1, -1))
    starts = [one["ready"] - one["start"] for place, one in enumerate(own[1:]) if one["start"] != own[place]["start"]]
    absent = [
        later["start"] - one["end"] for one, later in pairwise(own) if one["end"] is not None and one is not own[0]
    ]
    return {
        "start": mode,
        "host": host,
        "rounds": len(counted),
        "round_seconds": seconds,
        "round_variation": statistics.stdev(lengths[1:]) / seconds,
        "startup_seconds": statistics.median(starts) if starts else None,
        "predicted": len(predicted),
        "ready_in_time": sum(one["ready"] <= one["parameters"] for one in shown) / len(shown),
        "idle_share": idle / len(shown) / seconds,
        "late_share": late / len(shown) / seconds,
        "cost": (settings.idle_cost * idle + settings.delay_cost * late) / len(shown),
        "absent_share": sum(absent) / len(counted) / seconds,
        "orders_before_first_data": f"{sum(before)}/{len(before)}",
        "corrections_of_task": figures["corrections"],
        "late_corrections_of_task": figures["late_corrections"],
    }

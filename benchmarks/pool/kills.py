"""How soon a device is back after kill -9 of a task, or of a collector whose data its task waits for with the device.

A real pool of tasks with two collectors each, whose rounds differ in length, on two half-core slots. First collectors
are killed that have not sent while their task holds a device, then tasks that hold one; who is hit is random. Seconds
are from the kill to the lease's end, as the master wrote it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Timing
from benchmarks.pool.real import slots, traces, write_task
from ddrl.core.errors import DdrlError
from ddrl.pool.control import ask
from ddrl.pool.records import PoolSetup

PATIENCE = 60.0  # [s] for a victim


def measure(tasks: int, of_tasks: int, of_collectors: int) -> list[dict[str, Any]]:
    """A row for each kind of victim; `tasks` - `of_tasks` go on to the end."""
    generator = random.Random(tasks)
    shape = {"step": 0.02, "variation": 0.5, "processes": 2, "collectors": "cold", "limit": 400}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        files = [write_task(home, f"t{k}", seed=k + 1, rounds=1000, updates=24, **shape) for k in range(tasks)]
        words = [word for text in (f"run.dir={home / 'pool'}", f"pool.devices={slots()}") for word in ("--set", text)]
        process = subprocess.Popen(
            [sys.executable, "-m", "ddrl.run", "--tasks", *files, *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            killed: set[int] = set()
            kills = {
                "collector": [_kill(home / "pool", generator, killed, collectors=True) for _ in range(of_collectors)],
                "task": [_kill(home / "pool", generator, killed, collectors=False) for _ in range(of_tasks)],
            }
            _see_the_others_go_on(home / "pool")
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
        finally:
            process.kill()
        began = json.loads((home / "pool" / "pool" / "plan.json").read_text())["began"]
        leases, _ = traces(home / "pool")
        summary = json.loads((home / "pool" / "summary.json").read_text())
    rows: list[dict[str, Any]] = []
    for kind, victims in kills.items():
        seconds = [_until_back(leases, task, at - began) for task, at in victims]
        found = [one for one in seconds if one is not None]  # others had given the device back by then
        last = kills["task"][-1][1] - began
        rows.append(
            {
                "killed": kind,
                "kills": len(seconds),
                "held a device": len(found),
                "seconds": Timing.of(found),
                "leases of others after the last kill": sum(lease["granted"] > last for lease in leases),
                "tasks that went on": sum(task["ok"] for task in summary["tasks"].values()),
            }
        )
    return rows


def _until_back(leases: list[dict[str, Any]], task: str, at: float) -> float | None:
    """Seconds from `at` to the end of the lease that the task then had."""
    return next(
        (
            lease["released"] - at
            for lease in leases
            if lease["task"] == task and lease["granted"] <= at < lease["released"]
        ),
        None,
    )


def _tasks(pool: Path) -> list[dict[str, Any]]:
    """What the pool says of its tasks; nothing where it has not begun."""
    with contextlib.suppress(DdrlError):
        return (ask(PoolSetup.read(pool).run_id, {"command": "status"}) or {"tasks": []})["tasks"]
    return []


def _kill(pool: Path, generator: random.Random, killed: set[int], *, collectors: bool) -> tuple[str, float]:
    """Kill a task that holds a device, or a collector that such a task waits for, at a random moment and each process
    once; its task, and when."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(generator.uniform(0.01, 0.05))
        holders = [task for task in _tasks(pool) if task["device"] and task["pid"]]
        generator.shuffle(holders)
        for task in holders:
            found = _collectors_of(task["pid"]) if collectors else [task["pid"]]
            victims = [pid for pid in found if pid not in killed]  # one that is dead may still be named
            if victims and (collectors or task["rounds"] > 0):
                at = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victims[0], signal.SIGKILL)
                    killed.add(victims[0])
                    return task["task"], at
    raise TimeoutError(f"no victim in {PATIENCE:.0f} s")


def _see_the_others_go_on(pool: Path) -> None:
    """Return when every task that lives has ended a further round."""
    deadline = time.monotonic() + PATIENCE
    before = {task["task"]: task["rounds"] for task in _tasks(pool)}
    while any(task["pid"] and task["rounds"] == before[task["task"]] for task in _tasks(pool)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"a task that was not killed ended no round in {PATIENCE:.0f} s")
        time.sleep(0.1)


def _collectors_of(pid: int) -> list[int]:
    """Living collectors: the children of the task's children that are starters."""
    starters = [child for child in _children(pid) if "ddrl.pool.collectors" in _command(child)]
    return [child for starter in starters for child in _children(starter)]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""

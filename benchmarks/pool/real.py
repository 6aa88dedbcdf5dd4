"""Real pools on real processes: tasks on two half-core slots of one core, everything else on the other cores.

A slot's share is the kernel's quota with a period of 10 ms. Device work is a DQN's gradients and steps; collectors are
processes that end after sending (pool.collectors = prewarm), and wait in their environments as for simulators
elsewhere. Rounds of about 5 s: 4 s of collecting, 1 s on a slot.

Steady: from the time that every task has had two leases to the first task's last one. Busy: processor seconds in the
slot over its share. Duty: busy over a task's own round without waits. The bound of busy / wall is min(1, sum of duties
/ devices), with exponential rounds the machine-repairman value of the mean duty."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddrl.pool.queue import jain_index
from ddrl.pool.simulator import repairman_share

TASK = """
[run]
seed = {seed}
max_env_steps = {max_env_steps}
checkpoint_period = 0
processes = {processes}
max_seconds = {limit}
[env]
id = "benchmarks.pool.environments:paced"
num_envs = 1
kwargs = {{ startup = {startup}, step = {step}, variation = {variation}, exponential = {exponential} }}
[replay]
min_size = 1
samples_per_insert = {samples}
samples_tolerance = {tolerance}
[rollout]
warmup_steps = 0
[learner]
hidden = [{width}, {width}]
batch_size = 256
[evaluation]
period = 0
[telemetry]
live = false
[pool]
collectors = "{collectors}"
collect_steps = {steps}
"""


def write_task(folder: Path, name: str, *, seed: int, rounds: int, updates: int, **more: Any) -> str:
    """The settings of a task of `rounds` rounds, each of about `updates` updates of 256 transitions; its file."""
    values: dict[str, Any] = {
        "startup": 0.1,
        "step": 0.1,
        "variation": 0.05,
        "exponential": False,
        "steps": 40,
        "width": 512,
        "collectors": "prewarm",
        "processes": 1,
        "limit": 170,
    }
    values |= more
    steps = values["steps"]
    values["exponential"] = str(values["exponential"]).lower()
    path = folder / f"{name}.toml"
    samples = updates * 256 / steps
    values |= {"samples": samples, "tolerance": max(1.0, 256 / samples)}  # a draw ahead at most
    path.write_text(TASK.format(seed=seed, max_env_steps=rounds * steps, **values))
    return str(path)


def run_pool(files: Sequence[str], directory: Path, *settings: str) -> dict[str, Any]:
    """Run one pool; its summary."""
    words = [word for setting in (f"run.dir={directory}", *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "ddrl.run", "--tasks", *files, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((directory / "summary.json").read_text())


def traces(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Leases and collectors of a pool, all times from its start."""
    began = json.loads((directory / "pool" / "plan.json").read_text())["began"]
    leases, collectors = (
        [json.loads(line) for line in (directory / "pool" / name).read_text().splitlines()]
        for name in ("leases.jsonl", "collectors.jsonl")
    )
    for lease in leases:
        lease |= {name: lease[name] - began for name in ("asked", "granted", "released")}
    return leases, collectors


def row(directory: Path, summary: dict[str, Any], devices: int, *, exponential: bool = False) -> dict[str, Any]:
    """What is compared."""
    leases, collectors = traces(directory)
    by_task = {name: [lease for lease in leases if lease["task"] == name] for name in summary["tasks"]}
    begin = max(own[1]["granted"] for own in by_task.values())
    end = min(own[-1]["released"] for own in by_task.values())
    busy = sum(_within(lease, begin, end) for lease in leases)
    duties: list[float] = []
    for name, own in by_task.items():
        arrivals = {one["round"]: one["parameters"] for one in collectors if one["task"] == name}
        waits = defaultdict[int, float](float)
        works = defaultdict[int, float](float)
        for lease in own:  # one a round, or several where gradients release the device
            waits[lease["round"]] += lease["granted"] - lease["asked"]
            works[lease["round"]] += lease["busy"]
        cycles = [
            (arrivals[k + 1] - arrivals[k] - waits[k], works[k]) for k in works if k in arrivals and k + 1 in arrivals
        ]
        duties.append(sum(work for _, work in cycles) / sum(cycle for cycle, _ in cycles))
    tasks = list(summary["tasks"].values())
    rounds = len({(lease["task"], lease["round"]) for lease in leases})
    share = min(1.0, sum(duties) / devices)
    bound = repairman_share(len(tasks), devices, statistics.mean(duties)) if exponential else share
    first = min(one["parameters"] for one in collectors)
    figures = [task["figures"] for task in tasks]
    predicted = sum(one["predicted_collectors"] for one in figures)
    return {
        "policy": summary["policy"],
        "tasks": len(tasks),
        "rounds": rounds,
        "steady_seconds": max(0.0, end - begin),  # in which all tasks run
        "busy_per_wall": busy / devices / (end - begin) if end > begin else None,
        "bound": bound,
        "of_bound": busy / devices / (end - begin) / bound if end > begin else None,
        "duty": statistics.mean(duties),
        "busy_per_held": summary["busy_seconds"] / summary["held_seconds"],
        "makespan_from_first_round": max(lease["released"] for lease in leases) - first,
        "makespan_seconds": summary["makespan_seconds"],
        "device_seconds": summary["device_seconds"],
        "round_seconds": statistics.median(
            later["parameters"] - one["parameters"]
            for one in collectors
            for later in collectors
            if (later["task"], later["round"]) == (one["task"], one["round"] + 1)
        ),
        "wait_per_round": summary["wait_seconds"] / rounds,
        "longest_wait": summary["longest_wait"],
        "switch_per_round": sum(one["switch_seconds"] for one in figures) / rounds,
        "jain": jain_index(float(task["busy_seconds"]) for task in tasks),
        "predicted": predicted,
        "hit_rate": sum(one["predicted_hits"] for one in figures) / predicted if predicted else None,
    }


def _within(lease: dict[str, Any], begin: float, end: float) -> float:
    """Busy seconds of a lease between two times, in proportion."""
    held = lease["released"] - lease["granted"]
    part = min(end, lease["released"]) - max(begin, lease["granted"])
    return lease["busy"] * max(0.0, part) / held if held > 0 else 0.0


def ray(python: str, tasks: int, rounds: int, updates: int) -> dict[str, Any]:
    """The same tasks under Ray's fractional resources (benchmarks.pool.peer_ray)."""
    command = [python, "-m", "benchmarks.pool.peer_ray", str(tasks), str(rounds), str(updates)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def slots() -> str:
    """Two halves of the last core."""
    core = max(os.sched_getaffinity(0))
    return f"cpu:{core}@0.5,cpu:{core}@0.5"


def case(policy: str, tasks: int, rounds: int, updates: int, **more: Any) -> dict[str, Any]:
    """One pool of equal tasks on two half-core slots."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        files = [write_task(home, f"task{k}", seed=k + 1, rounds=rounds, updates=updates, **more) for k in range(tasks)]
        settings = [f"pool.devices={slots()}", f"pool.policy={policy}"]
        settings += ["pool.slices.seconds=1.2"] if policy == "slices" else []
        summary = run_pool(files, home / "pool", *settings)
        return row(home / "pool", summary, 2, exponential=bool(more.get("exponential")))

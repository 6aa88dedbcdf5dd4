"""Real pools on real processes: tasks on slots that are shares of one core, everything else on the other cores.

A slot's share is the kernel's quota with a period of 10 ms. Device work is a DQN's gradients and steps; collectors are
processes that end after sending, and wait in their environments as for simulators elsewhere.

Shares: equal tasks on two half-core slots, rounds of about 5 s: 4 s of collecting, 1 s on a slot. Steady: from the time
that every task has had two leases to the first task's last one. Busy: processor seconds in the slot over its share.
Duty: busy over a task's own round without waits. The bound of busy / wall is min(1, sum of duties / devices), with
exponential rounds the machine-repairman value of the mean duty.

Starts: tasks that start collectors cold, alive or by prediction, all at once, each on a device of its own (a ninth of a
core); two thirds of a round they wait in their environments, one third is real gradients. Cost: idle seconds +
delay_cost x late seconds a collector, all rounds but the first; hindsight: of the best fixed rule, chosen knowing all
rounds. On two hosts this machine is both: orders, parameters and rows of the second one go through relays and MPI."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, mpi_environment, mpirun
from benchmarks.pool.bounds import hindsight, repairman_share
from ddrl.pool.prewarm import Round, Warmth
from ddrl.pool.records import Collector, Lease, PoolRecord, busy_between, jain_index, read_pool

SLOTS = 2  # halves of the last core
MODES = ("cold", "alive", "prewarm")
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


def run_pool(files: Sequence[str], directory: Path, *settings: str, ranks: int = 0) -> PoolRecord:
    """Run one pool, on so many ranks (0: without mpirun); what its directory holds."""
    subprocess.run(
        _command(files, directory, *settings, ranks=ranks), check=True, stdout=subprocess.DEVNULL, env=mpi_environment()
    )
    return read_pool(directory)


def _command(files: Sequence[str], directory: Path, *settings: str, ranks: int = 0) -> list[str]:
    words = [word for setting in (f"run.dir={directory}", *settings) for word in ("--set", setting)]
    return [*(mpirun(ranks) if ranks else []), sys.executable, "-m", "ddrl.run", "--tasks", *files, *words]


def slots(count: int = SLOTS, share: float = 0.5) -> str:
    """Equal shares of the last core."""
    core = max(os.sched_getaffinity(0))
    return ",".join([f"cpu:{core}@{share}"] * count)


def shares(policy: str, tasks: int, rounds: int, updates: int, **more: Any) -> dict[str, Any]:
    """One pool of equal tasks on two half-core slots."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        files = [write_task(home, f"task{k}", seed=k + 1, rounds=rounds, updates=updates, **more) for k in range(tasks)]
        settings = [f"pool.devices={slots()}", f"pool.policy={policy}"]
        settings += ["pool.slices.seconds=1.2"] if policy == "slices" else []
        record = run_pool(files, home / "pool", *settings)
    by_task = {name: [lease for lease in record.leases if lease.task == name] for name in record.tasks}
    begin = max(own[1].granted for own in by_task.values())
    end = min(own[-1].released for own in by_task.values())
    busy = busy_between(record.leases, begin, end)
    duties = [_duty(own, record.collectors) for own in by_task.values()]
    rounds_done = len({(lease.task, lease.round) for lease in record.leases})
    bound = min(1.0, sum(duties) / SLOTS)
    if more.get("exponential"):
        bound = repairman_share(tasks, SLOTS, statistics.mean(duties))
    busy_per_wall = busy / SLOTS / (end - begin) if end > begin else None
    summary = record.summary
    figures = [task["figures"] for task in summary["tasks"].values()]
    predicted = sum(one["predicted_collectors"] for one in figures)
    first = min(one.parameters for one in record.collectors if one.parameters is not None)
    return {
        "policy": policy,
        "tasks": tasks,
        "rounds": rounds_done,
        "steady_seconds": max(0.0, end - begin),  # in which all tasks run
        "busy_per_wall": busy_per_wall,
        "bound": bound,
        "of_bound": None if busy_per_wall is None else busy_per_wall / bound,
        "duty": statistics.mean(duties),
        "busy_per_held": summary["busy_seconds"] / summary["held_seconds"],
        "makespan_from_first_round": max(lease.released for lease in record.leases) - first,
        "device_seconds": summary["device_seconds"],
        "wait_per_round": summary["wait_seconds"] / rounds_done,
        "longest_wait": summary["longest_wait"],
        "switch_per_round": sum(one["switch_seconds"] for one in figures) / rounds_done,
        "jain": jain_index(float(task["busy_seconds"]) for task in summary["tasks"].values()),
        "hit_rate": sum(one["predicted_hits"] for one in figures) / predicted if predicted else None,
    }


def under_ray(python: str, tasks: int, rounds: int, updates: int) -> dict[str, Any]:
    """The tasks of `shares` under Ray's fractional resources."""
    command = [python, "-m", "benchmarks.peers.ray_pool", str(tasks), str(rounds), str(updates)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


def _duty(leases: Sequence[Lease], collectors: Sequence[Collector]) -> float:
    """A task's busy seconds over those of its rounds without waits."""
    arrivals = {one.round: one.parameters for one in collectors if one.task == leases[0].task and one.parameters}
    waits = defaultdict[int, float](float)
    works = defaultdict[int, float](float)
    for lease in leases:  # one a round, or several where gradients release the device
        waits[lease.round] += lease.granted - lease.asked
        works[lease.round] += lease.busy
    counted = [number for number in works if number in arrivals and number + 1 in arrivals]
    seconds = sum(arrivals[number + 1] - arrivals[number] - waits[number] for number in counted)
    return sum(works[number] for number in counted) / seconds


def starts(
    startups: Sequence[float], rounds: int, collecting: float, updates: int, *, hosts: int = 1, **more: Any
) -> list[dict[str, Any]]:
    """A row for each start-up [s], way to start and host; cold start gets fewer rounds, for they are longer.

    collecting: seconds of a round, two thirds of it."""
    cases = [(startup, mode) for startup in startups for mode in MODES]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [
            write_task(
                folder,
                f"t{index}",
                seed=index + 1,
                rounds=hosts * (int(rounds / (1 + startup / (1.5 * collecting))) if mode == "cold" else rounds),
                updates=updates,
                startup=startup,
                step=collecting / 20,
                steps=20,
                variation=0.01,
                collectors=mode,
                limit=600,
                **more,
            )
            for index, (startup, mode) in enumerate(cases)
        ]
        settings = [f"pool.devices={slots(len(cases), int(1000 / max(9, len(cases))) / 1000)}"]
        settings += [f"cluster.relays={hosts}"] if hosts > 1 else []
        record = run_pool(files, folder / "pool", *settings, ranks=0 if hosts == 1 else 1 + hosts * len(files))
        lines = (folder / "pool" / "pool" / "instructions.jsonl").read_text().splitlines()
    orders: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for order in map(json.loads, lines):
        orders[order["task"]][order["round"]] = order
    return [
        {"startup": startup, "start": mode, "host": host} | _starts_row(record, orders[f"t{index}"], f"t{index}", host)
        for index, (startup, mode) in enumerate(cases)
        for host in range(hosts)
    ]


def _starts_row(record: PoolRecord, orders: dict[int, dict[str, Any]], task: str, worker: int) -> dict[str, Any]:
    """Figures of the collectors of a task's worker."""
    everyone = [one for one in record.collectors if one.task == task]
    own = sorted((one for one in everyone if one.worker == worker), key=lambda one: one.round)
    rounds: list[Round] = []
    startup = own[0].ready - own[0].start
    for index, (one, later) in enumerate(pairwise(own)):
        if index and one.start != own[index - 1].start:  # a new process
            startup = one.ready - one.start
        rounds.append(Round(one.round, _at(one), (one.sent,), _at(later), (startup,)))
    seconds = statistics.median(round.seconds for round in rounds)
    counted = own[1:]
    predicted = [one for one in counted if one.round in orders and orders[one.round]["start"][worker] is not None]
    shown = predicted or counted
    warmth = _warmth(shown)
    absent = [max(0.0, later.start - one.end) for one, later in pairwise(counted) if one.end is not None]
    first_sent: dict[int, float] = {}
    for one in everyone:
        first_sent[one.round] = min(one.sent, first_sent.get(one.round, one.sent))
    in_time = [order["issued"] < first_sent[number - 1] for number, order in orders.items() if number - 1 in first_sent]
    best = hindsight([rounds])
    later_best = hindsight([rounds], len(rounds) - len(shown))
    figures = record.summary["tasks"][task]["figures"]
    return {
        "rounds": len(counted),
        "round_seconds": seconds,
        "round_variation": statistics.stdev(round.seconds for round in rounds[1:]) / seconds,
        "startup_seconds": statistics.median(round.startup[0] for round in rounds[1:]),
        "predicted": len(predicted),
        "hit_rate": warmth.hit_rate,
        "idle_share": warmth.idle_seconds / len(shown) / seconds,
        "late_share": warmth.late_seconds / len(shown) / seconds,
        "cost": _warmth(counted).cost() / len(counted),
        "hindsight": best.cost,
        "hindsight_idle_share": later_best.idle / seconds,
        "least_idle_share": later_best.least_idle / seconds,
        "absent_share": sum(absent) / len(counted) / seconds,
        "cpu_seconds_per_round": figures["collector_cpu_seconds"] / figures["collectors"],
        "orders_before_first_data": f"{sum(in_time)}/{len(in_time)}",
        "corrections": figures["corrections"],
        "late_corrections": figures["late_corrections"],
    }


def _warmth(collectors: Sequence[Collector]) -> Warmth:
    """How well the starts of these were timed."""
    found = Warmth()
    for one in collectors:
        found.count(one.ready, _at(one))
    return found


def _at(one: Collector) -> float:
    assert one.parameters is not None
    return one.parameters

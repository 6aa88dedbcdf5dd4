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
rounds. On two hosts this machine is both: orders, parameters and rows of the second one go through relays and MPI.

Kills: seconds from kill -9 of a task, or of a collector whose data its task waits for with the device, to the lease's
end as the master wrote it. A pool of tasks with two collectors each, whose rounds differ in length; who is hit is
random."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Timing, mpi_environment, mpirun
from benchmarks.pool.simulated import hindsight, repairman_share
from ddrl.core.errors import DdrlError
from ddrl.pool.__main__ import ask_pool
from ddrl.pool.prewarm import DELAY_COST, Round
from ddrl.pool.queue import jain_index
from ddrl.pool.records import Collector, Lease, PoolRecord, read_pool

SLOTS = 2  # halves of the last core
MODES = ("cold", "alive", "prewarm")
PATIENCE = 60.0  # [s] for a victim
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


# -- busy / wall -------------------------------------------------------------------------------------------------------


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
    busy = sum(_busy_within(lease, begin, end) for lease in record.leases)
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


def _busy_within(lease: Lease, begin: float, end: float) -> float:
    """Busy seconds of a lease between two times, in proportion."""
    held = lease.released - lease.granted
    part = min(end, lease.released) - max(begin, lease.granted)
    return lease.busy * max(0.0, part) / held if held > 0 else 0.0


# -- starts of collectors ----------------------------------------------------------------------------------------------


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
        rounds.append(Round(one.round, (_at(one),), (one.sent,), (_at(later),), (startup,)))
    seconds = statistics.median(round.seconds for round in rounds)
    counted = own[1:]
    predicted = [one for one in counted if one.round in orders and orders[one.round]["start"][worker] is not None]
    shown = predicted or counted
    cost = sum(_idle(one) + DELAY_COST * _late(one) for one in counted) / len(counted)
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
        "hit_rate": sum(one.ready <= _at(one) for one in shown) / len(shown),
        "idle_share": sum(map(_idle, shown)) / len(shown) / seconds,
        "late_share": sum(map(_late, shown)) / len(shown) / seconds,
        "cost": cost,
        "hindsight": best.cost,
        "hindsight_idle_share": later_best.idle / seconds,
        "least_idle_share": later_best.least_idle / seconds,
        "absent_share": sum(absent) / len(counted) / seconds,
        "cpu_seconds_per_round": figures["collector_cpu_seconds"] / figures["collectors"],
        "orders_before_first_data": f"{sum(in_time)}/{len(in_time)}",
        "corrections": figures["corrections"],
        "late_corrections": figures["late_corrections"],
    }


def _at(one: Collector) -> float:
    assert one.parameters is not None
    return one.parameters


def _idle(one: Collector) -> float:
    return max(0.0, _at(one) - one.ready)


def _late(one: Collector) -> float:
    return max(0.0, one.ready - _at(one))


# -- kills -------------------------------------------------------------------------------------------------------------


def kills(tasks: int, of_tasks: int, of_collectors: int) -> list[dict[str, Any]]:
    """A row for each kind of victim; `tasks` - `of_tasks` run to the end."""
    generator = random.Random(tasks)
    shape = {"step": 0.02, "variation": 0.5, "processes": 2, "collectors": "cold", "limit": 400}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        pool = home / "pool"
        files = [write_task(home, f"t{k}", seed=k + 1, rounds=1000, updates=24, **shape) for k in range(tasks)]
        command = _command(files, pool, f"pool.devices={slots()}")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            killed: set[int] = set()
            hit = {
                "collector": [_kill(pool, generator, killed, collectors=True) for _ in range(of_collectors)],
                "task": [_kill(pool, generator, killed, collectors=False) for _ in range(of_tasks)],
            }
            _await_rounds(pool)
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
        finally:
            process.kill()
        began = json.loads((pool / "pool" / "plan.json").read_text())["began"]
        record = read_pool(pool)
    rows: list[dict[str, Any]] = []
    last = hit["task"][-1][1] - began
    for kind, victims in hit.items():
        seconds = [
            lease.released - (at - began)
            for task, at in victims
            for lease in record.leases
            if lease.task == task and lease.granted <= at - began < lease.released
        ]
        rows.append(
            {
                "killed": kind,
                "kills": len(victims),
                "held a device": len(seconds),  # others had given it back by then
                "seconds": Timing.of(seconds),
                "leases of others after the last kill": sum(lease.granted > last for lease in record.leases),
                "tasks that ended well": sum(task["ok"] for task in record.summary["tasks"].values()),
            }
        )
    return rows


def _tasks(pool: Path) -> list[dict[str, Any]]:
    """The tasks as the pool lists them; empty before it has begun."""
    with contextlib.suppress(DdrlError):
        return ask_pool(pool, "status")["tasks"]
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
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                keepers = psutil.Process(task["pid"]).children()
                found = [one.pid for keeper in keepers for one in keeper.children()] if collectors else [task["pid"]]
                victims = [pid for pid in found if pid not in killed]  # one that is dead may still be named
                if victims and (collectors or task["rounds"] > 0):
                    at = time.monotonic()
                    os.kill(victims[0], signal.SIGKILL)
                    killed.add(victims[0])
                    return task["task"], at
    raise TimeoutError(f"no victim in {PATIENCE:.0f} s")


def _await_rounds(pool: Path) -> None:
    """Return when every task that runs has ended a further round."""
    deadline = time.monotonic() + PATIENCE
    before = {task["task"]: task["rounds"] for task in _tasks(pool)}
    while any(task["pid"] and task["rounds"] == before[task["task"]] for task in _tasks(pool)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"a task that was not killed ended no round in {PATIENCE:.0f} s")
        time.sleep(0.1)

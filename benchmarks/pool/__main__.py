"""A pool of equal tasks on fewer devices, policies in turn, and the same tasks under Ray's fractional resources.

Tasks run on two slots, each half of the last core, everything else on the other cores; a slot's share is the kernel's
quota with a period of 10 ms. Rounds take about 5 s: 4 s of collecting in processes that end after sending and wait in
their environments as for simulators elsewhere, and 1 s of a DQN's gradients and steps on a slot. Steady: from the time
that every task has had two leases to the first task's last one. Busy: processor seconds in the slot over its share.
Duty: busy over a task's own round without waits. The bound of busy / wall is min(1, sum of duties / devices)."""

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

from benchmarks.harness import ROOT, arguments, mpi_environment, print_rows, save, setting_words
from ddrl.pool.records import Collector, Lease, busy_between, jain_index, read_pool

SLOTS = 2  # halves of the last core
TASKS = 8
ROUNDS = 6
UPDATES = 69  # a round, each of 256 transitions: a second of half a core
STEPS = 40  # a round
TASK = """
[run]
seed = {seed}
max_env_steps = {max_env_steps}
checkpoint_period = 0
processes = 1
max_seconds = 170
[env]
id = "benchmarks.pool.environments:paced"
num_envs = 1
kwargs = {{ startup = 0.1, step = 0.1, variation = 0.05 }}
[replay]
min_size = 1
samples_per_insert = {samples}
samples_tolerance = 1.0
[rollout]
warmup_steps = 0
[learner]
hidden = [512, 512]
batch_size = 256
[evaluation]
period = 0
[telemetry]
live = false
[pool]
collectors = "prewarm"
collect_steps = {steps}
"""


def slots() -> str:
    """Equal shares of the last core."""
    core = max(os.sched_getaffinity(0))
    return ",".join([f"cpu:{core}@0.5"] * SLOTS)


def shares(policy: str, tasks: int) -> dict[str, Any]:
    """One pool of equal tasks under a policy."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        files: list[str] = []
        for number in range(tasks):
            path = home / f"task{number}.toml"
            values = {"seed": number + 1, "max_env_steps": ROUNDS * STEPS, "steps": STEPS}
            path.write_text(TASK.format(**values, samples=UPDATES * 256 / STEPS))
            files.append(str(path))
        settings = [f"run.dir={home / 'pool'}", f"pool.devices={slots()}", f"pool.policy={policy}"]
        settings += ["pool.slices.seconds=1.2"] if policy == "slices" else []
        command = [sys.executable, "-m", "ddrl.run", "--tasks", *files, *setting_words(*settings)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=mpi_environment())
        record = read_pool(home / "pool")
    by_task = {name: [lease for lease in record.leases if lease.task == name] for name in record.tasks}
    begin = max(own[1].granted for own in by_task.values())
    end = min(own[-1].released for own in by_task.values())
    busy = busy_between(record.leases, begin, end)
    duties = [_duty(own, record.collectors) for own in by_task.values()]
    rounds_done = len({(lease.task, lease.round) for lease in record.leases})
    bound = min(1.0, sum(duties) / SLOTS)
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


def under_ray(python: str, tasks: int) -> dict[str, Any]:
    """The tasks of `shares` under Ray's fractional resources."""
    command = [python, "-m", "benchmarks.peers.ray_pool", str(tasks), str(ROUNDS), str(UPDATES)]
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


def main() -> None:
    parser = arguments("pool_policies", __doc__ or "")
    parser.add_argument("--part", choices=["policies"], default="policies")
    parser.add_argument("--policies", default="fair,exclusive", help="policies to compare (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of the policies, in turn; --short: 1 (%(default)s)")
    parser.add_argument("--tasks", type=int, default=TASKS, help="of each pool (%(default)s)")
    parser.add_argument("--ray-python", help="interpreter that has ray and ddrl's requirements: its row beside them")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for _ in range(1 if chosen.short else chosen.rounds):
        rows += [shares(name, chosen.tasks) for name in chosen.policies.split(",")]
        rows += [under_ray(chosen.ray_python, chosen.tasks)] if chosen.ray_python else []
    print_rows(rows)
    save(chosen.json, {"devices": slots(), "pools": rows})


if __name__ == "__main__":
    main()

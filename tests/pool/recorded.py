"""A pool's directory as a real pool writes it, made of a simulated one."""

import json

import numpy as np

from ddrl.pool.policies import Fair
from ddrl.pool.simulator import generate, simulate

BEGAN = 1000.0  # [s] of the leases' clock


def write_pool(path, *, tasks=3, devices=("cpu:0", "cpu:1"), rounds=20, duty=0.6, collectors=False, ended=True):
    """Write plan.json, leases.jsonl and, if asked, collectors.jsonl and summary.json; the simulated outcome."""
    names = [f"task{index}" for index in range(tasks)]
    generator = np.random.default_rng(1)
    traces = [generate(name, rounds, generator, round_seconds=1.0, duty=duty, variation=0.2) for name in names]
    outcome = simulate(traces, len(devices), Fair(), "alive")
    own = path / "pool"
    own.mkdir(parents=True)
    plan = {"directory": str(path), "devices": ",".join(devices), "policy": "fair", "began": BEGAN, "run_id": "abc"}
    plan["tasks"] = [{"name": name, "file": "", "directory": str(path / name)} for name in names]
    (own / "plan.json").write_text(json.dumps(plan))
    with (own / "leases.jsonl").open("w") as file:
        for lease in outcome.leases:
            times = {name: getattr(lease, name) + BEGAN for name in ("asked", "granted", "released")}
            rest = {"task": lease.task, "round": lease.round, "device": lease.device, "busy": lease.busy}
            file.write(json.dumps(rest | times) + "\n")
    if collectors:
        with (own / "collectors.jsonl").open("w") as file:
            for lease in outcome.leases:
                begin = max(0.0, lease.asked - 0.3)
                times = {"start": begin, "ready": begin + 0.1, "parameters": begin + 0.15, "sent": lease.asked}
                row = {"task": lease.task, "round": lease.round, "worker": 0, **times, "end": lease.asked + 0.01}
                file.write(json.dumps(row) + "\n")
    if ended:
        ends = {name: {"reason": "run.max_env_steps reached"} for name in names}
        (path / "summary.json").write_text(json.dumps({"makespan_seconds": outcome.makespan, "tasks": ends}))
    return outcome

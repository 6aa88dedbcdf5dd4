"""Real pools: tiny serial tasks on two half-core slots of one core, beside the same tasks with a slot each.

The tasks' other work (environments, replay, evaluation) runs on the other cores that the process may use. A slot's
share is the kernel's quota. Exclusive: the policy `exclusive`, two at a time, the next one when one has ended. Every
figure here was measured; busy seconds are processor seconds over the slot's capacity, and the drawing of a round's
further batches is in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TASK = """
[run]
seed = {seed}
max_env_steps = {steps}
checkpoint_period = 0
[env]
num_envs = 8
[replay]
min_size = 200
samples_per_insert = {samples}
[rollout]
warmup_steps = 200
[learner]
hidden = [{width}, {width}]
batch_size = 256
publish_period = 8
[evaluation]
period = 0
[telemetry]
live = false
"""


def pool(policy: str, tasks: int, steps: int, devices: str, folder: Path) -> dict[str, Any]:
    """Run one pool; its summary."""
    files: list[str] = []
    for index in range(tasks):
        path = folder / f"task{index}.toml"
        path.write_text(TASK.format(seed=index + 1, steps=steps, samples=16, width=256))
        files.append(str(path))
    directory = folder / policy
    settings = (f"pool.devices={devices}", f"pool.policy={policy}", f"run.dir={directory}", "run.max_seconds=300")
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "ddrl.run", "--serial", "--tasks", *files, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((directory / "summary.json").read_text())


def row(policy: str, summary: dict[str, Any]) -> dict[str, Any]:
    """What is compared."""
    tasks = summary["tasks"].values()
    rounds = sum(task["rounds"] for task in tasks)
    return {
        "policy": policy,
        "tasks": len(tasks),
        "makespan_seconds": summary["makespan_seconds"],
        "rounds": rounds,
        "device_seconds": summary["device_seconds"],
        "busy_seconds": summary["busy_seconds"],
        "busy_per_device_seconds": summary["busy_seconds"] / summary["device_seconds"],
        "busy_per_wall": summary["busy_per_wall"],
        "wait_per_round": summary["wait_seconds"] / rounds,
        "longest_wait": summary["longest_wait"],
        "switch_per_round": sum(task["figures"]["switch_seconds"] for task in tasks) / rounds,
    }


def real(short: bool) -> dict[str, Any]:
    """Pools of three tasks (or four) with ours and with exclusive devices, alternating."""
    core = max(os.sched_getaffinity(0))
    devices = f"cpu:{core}@0.5,cpu:{core}@0.5"
    tasks, steps, repeats = (3, 2_000, 1) if short else (4, 3_000, 2)
    rows: list[dict[str, Any]] = []
    for _ in range(repeats):
        for policy in ("fair", "exclusive"):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row(policy, pool(policy, tasks, steps, devices, Path(folder))))
    return {"simulated": False, "devices": devices, "load": os.getloadavg(), "pools": rows}

"""A small real pool for the notebook of pools, and sliders over its simulator. Tables out, figures by `ddrl.pool.page`.

Used by the notebook beside it alone. The sliders need ipywidgets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddrl.core.errors import MissingExtraError, PoolError
from ddrl.pool.page import busy_against_tasks
from ddrl.pool.records import PoolRecord, read_pool
from ddrl.pool.simulator import steady_shares, typical_task

TASK = """
[run]
seed = {seed}
max_env_steps = {steps}
checkpoint_period = 0
[env]
num_envs = 512
[replay]
samples_per_insert = {samples}
[learner]
hidden = [256, 256]
batch_size = 256
[evaluation]
period = 0
[telemetry]
live = false
period = 0.1
"""


def run_pool(
    folder: str | Path, *, samples: Sequence[float] = (1, 1, 2), steps: int = 100_000, devices: int = 1
) -> Path:
    """Run CartPole tasks, one for each number of samples per insert, on so many cores; the pool's directory."""
    place = Path(folder).absolute()
    place.mkdir(parents=True)
    files: list[str] = []
    for index, ratio in enumerate(samples):
        file = place / f"task{index}.toml"
        file.write_text(TASK.format(seed=index + 1, samples=ratio, steps=steps))
        files.append(str(file))
    slots = ",".join(f"cpu:{core}" for core in sorted(os.sched_getaffinity(0))[-devices:])
    settings = ("--set", f"pool.devices={slots}", "--set", f"run.dir={place / 'pool'}")
    command = [sys.executable, "-m", "ddrl.run", "--serial", "--tasks", *files, *settings]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise PoolError(f"the pool failed: {ended.stderr.strip()[-400:]}")
    return place / "pool"


def measured_point(record: PoolRecord) -> dict[str, tuple[float, float]]:
    """The pool itself, as a point of `busy_against_tasks`."""
    return {"this pool, measured": (float(len(record.tasks)), typical_task(record).busy_per_wall)}


def pool_sliders(record: PoolRecord) -> Any:
    """Sliders for tasks, duty cycle, devices and variation over the simulated busy share; the pool as measured."""
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        raise MissingExtraError("ipywidgets", "notebook", "pool_of_tasks.pool_sliders") from None
    typical = typical_task(record)

    def draw(most: int, duty: float, devices: int, variation: float) -> None:
        tasks = range(1, most + 1)
        shares, bound = steady_shares(tasks, duty=duty, devices=devices, variation=variation)
        display(busy_against_tasks(tasks, {"simulated, fair": shares}, bound, measured_point(record)))

    def slider(kind: Any, words: str, low: float, high: float, value: float, step: float) -> Any:
        return kind(
            value=value,
            min=low,
            max=high,
            step=step,
            continuous_update=False,
            description=words,
            style={"description_width": "160px"},
            layout={"width": "480px"},
        )

    duty = min(max(round(typical.duty, 2), 0.05), 0.95)
    return ipywidgets.interactive(
        draw,
        most=slider(ipywidgets.IntSlider, "tasks, up to", 2, 16, 10, 1),
        duty=slider(ipywidgets.FloatSlider, "duty cycle", 0.05, 0.95, duty, 0.01),
        devices=slider(ipywidgets.IntSlider, "devices", 1, 8, len(record.devices), 1),
        variation=slider(
            ipywidgets.FloatSlider, "variation (std / mean)", 0.0, 1.0, min(round(typical.variation, 2), 1.0), 0.01
        ),
    )

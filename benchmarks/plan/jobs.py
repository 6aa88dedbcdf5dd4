"""The runs that predictions are compared with: recordings to fit on, and cases that nothing is fitted to.

Two tasks: `cartpole`, light environments, and `lander`, heavy ones. A job is one run or one pool in a folder of its
own; a job whose folder holds a summary is done, so that a measurement may be cut and gone on with."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddrl.core.config import Config
from ddrl.core.settings import apply_overrides, config_from_toml

SECONDS = 6.4  # of a run; processor time is sampled every 2 s
POOL_STEPS = {"cartpole": 80_000, "lander": 25_000}  # of a task in a pool: some 2 s alone
TASK = """
[run]
checkpoint_period = 0
[env]
id = "{env}"
num_envs = {num_envs}
[replay]
min_size = 2_000
[rollout]
warmup_steps = 2_000
[learner]
hidden = {hidden}
batch_size = 256
[evaluation]
period = 0
[telemetry]
live = false
period = 0.1
"""
TASKS = {
    "cartpole": TASK.format(env="CartPole-v1", num_envs=512, hidden=[128, 128]),
    "lander": TASK.format(env="LunarLander-v3", num_envs=256, hidden=[256, 256]),
}
Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Job:
    """One run, or with `devices` one pool. tasks: names of TASKS, one in a run."""

    tasks: tuple[str, ...]
    settings: Settings = ()
    rollouts: int = 0  # 0: serial
    devices: str = ""

    @property
    def name(self) -> str:
        """A folder's name."""
        kinds = "+".join(f"{len(list(group))}{kind}" for kind, group in itertools.groupby(self.tasks))
        parts = [kinds, f"r{self.rollouts}" if self.rollouts else "serial", self.devices.replace(",", "+")]
        return "_".join(part.replace(":", "") for part in (*parts, *(value for _, value in self.settings)) if part)

    def overrides(self) -> list[str]:
        """As --set takes them."""
        return [f"{name}={value}" for name, value in self.settings]

    def config(self, task: str) -> Config:
        """The settings of one of its tasks, for a prediction."""
        steps = [f"run.max_env_steps={POOL_STEPS[task]}"] if self.devices else []
        return apply_overrides(config_from_toml(TASKS[task], task), [*steps, *self.overrides()])


def ratio(value: float) -> Settings:
    return (("replay.samples_per_insert", f"{value:g}"),)


def batch(value: int, samples: float) -> Settings:
    return (("learner.batch_size", f"{value}"), *ratio(samples))


def recordings() -> list[Job]:
    """What costs are fitted on."""
    return [
        *(Job((task,), ratio(samples)) for task in TASKS for samples in (1, 8)),
        Job(("cartpole",), batch(1024, 8)),
        *(Job((task,), ratio(samples), rollouts) for task in TASKS for samples, rollouts in ((0.5, 1), (2, 3))),
        *(Job((task,), ratio(4), devices="cpu:1") for task in TASKS),
    ]


def runs() -> list[Job]:
    """Runs to predict."""
    return [
        *(Job((task,), ratio(samples)) for task in TASKS for samples in (2, 4)),
        *(Job(("cartpole",), batch(size, samples)) for size, samples in ((512, 2), (512, 8), (1024, 4))),
        *(Job((task,), ratio(samples), rollouts) for task in TASKS for samples, rollouts in ((2, 2), (4, 3))),
        *(Job(("lander",), ratio(0.5), rollouts) for rollouts in (2, 4)),
    ]


def pools() -> list[Job]:
    """Pools to predict."""
    one = "cpu:1"
    two = "cpu:1@0.5,cpu:1@0.5"
    all_cores = "cpu:0,cpu:1"
    return [
        *(Job(("cartpole",) * count, ratio(4), devices=one) for count in (2, 3, 4, 5)),
        *(Job(("lander",) * count, ratio(4), devices=one) for count in (2, 3, 4, 5)),
        *(Job(("lander",) * count, ratio(1), devices=one) for count in (2, 3, 5)),
        *(Job(("lander",) * count, ratio(4), devices=two) for count in (2, 3, 4, 5)),
        *(Job(("cartpole",) * count, ratio(1), devices=all_cores) for count in (3, 5)),
        *(Job(("cartpole", "lander") * pairs, ratio(2), devices=devices) for pairs in (1, 2) for devices in (one, two)),
    ]


def is_measured(job: Job, folder: Path) -> bool:
    """Whether folder/NAME is whole."""
    return (folder / job.name / "summary.json").exists()


def measure(job: Job, folder: Path) -> None:
    """Run it into folder/NAME, if it is not there yet."""
    place = folder / job.name
    if is_measured(job, folder):
        return
    files: list[str] = []
    for index, task in enumerate(job.tasks):
        path = folder / f"{task}{index}.toml"
        steps = POOL_STEPS[task] if job.devices else 1_000_000_000
        path.write_text(TASKS[task].replace("[run]", f"[run]\nmax_env_steps = {steps}\nseed = {index + 1}"))
        files.append(str(path))
    settings = [*job.overrides(), f"run.dir={place}"]
    if job.devices:
        settings.append(f"pool.devices={job.devices}")
    else:
        settings.append(f"run.max_seconds={SECONDS}")
        settings += [f"run.processes={job.rollouts}"] if job.rollouts else []
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "ddrl.run", *(["--tasks"] if job.devices else []), *files, *words]
    subprocess.run(
        [*command, *([] if job.rollouts else ["--serial"])],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def measure_all(jobs: Sequence[Job], folder: Path, seconds: float) -> bool:
    """Run what is not done until `seconds` are spent; whether all is done."""
    begin = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        if not is_measured(job, folder):
            if time.monotonic() - begin > seconds:
                return False
            print(f"{time.monotonic() - begin:5.0f} s  {folder.name}/{job.name}", flush=True)
            measure(job, folder)
    return True


def summary(job: Job, folder: Path) -> dict[str, object]:
    """What the job wrote."""
    return json.loads((folder / job.name / "summary.json").read_text())

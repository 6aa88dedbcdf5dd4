"""Run directories of runs that never were: counters that grow as those of a task with known costs would."""

from __future__ import annotations

import numpy as np

from ddrl.core.config import Config
from ddrl.core.metrics import COLUMNS
from ddrl.core.settings import apply_overrides, config_to_toml
from ddrl.telemetry.record import Record
from ddrl.telemetry.store import Store

COLUMN = {name: index for index, name in enumerate(COLUMNS)}
STEP, LEARN, SAMPLE, RECORD, PUBLISH, START = 2e-3, 3e-3, 2e-4, 1e-4, 5e-5, 1.5  # processor seconds
PERIOD, SAMPLED = 0.1, 2.0  # [s] between records, and between samples of processor time


def task(*overrides):
    """Settings of the task that is recorded; its 4 samples per insert are two updates for each vector step."""
    settings = ("run.max_env_steps=64000", "env.num_envs=64", "learner.batch_size=128", "replay.min_size=200")
    return apply_overrides(Config(), [*settings, "replay.samples_per_insert=4", "evaluation.period=0", *overrides])


def write_run(path, config=None, *, rollouts=0, seconds=12.0, slowed=1.0, learn=LEARN, start=START, stands=False):
    """Write a run; slowed: seconds of the clock for each processor second, as on a busy machine.

    stands: the environments have stopped, and the learner goes on."""
    config = config or task()
    path.mkdir(parents=True)
    (path / "config.toml").write_text(config_to_toml(config))
    envs = config.env.num_envs
    updates = config.replay.samples_per_insert * envs / config.learner.batch_size  # for a vector step
    published = updates / config.learner.publish_period
    trainer = updates * (learn + SAMPLE) + RECORD + published * PUBLISH
    speed = 1 / ((trainer + STEP) * slowed) if not rollouts else min(rollouts / STEP, 1 / (trainer * slowed))
    members = 1 + max(1, rollouts)
    store = Store(path)
    for tick in range(int(seconds / PERIOD)):
        now = tick * PERIOD
        steps, sampled = now * speed, now // SAMPLED * SAMPLED * speed
        table = np.full((members, len(COLUMNS)), np.nan)
        table[:, COLUMN["role"]] = [0] + [3] * (members - 1)
        table[:, COLUMN["pid"]] = 1000 if not rollouts else np.arange(members) + 1000
        table[:, COLUMN["host"]] = 0
        work = {"learn": updates * learn, "sample": updates * SAMPLE, "record": RECORD, "publish": published * PUBLISH}
        values = {f"{name}_seconds": each * slowed * steps for name, each in work.items()}
        values |= {"env_steps": envs * steps, "updates": updates * steps, "publishes": published * steps}
        values |= {"model_nbytes": 4e5, "replay_size": 1e3, "checkpoint_seconds": 0.0}
        values["wait_seconds"] = max(0.0, now - trainer * slowed * steps) if rollouts else np.nan
        values["cpu_seconds"] = start + (trainer + (0.0 if rollouts else STEP)) * sampled
        for name, value in values.items():
            table[0, COLUMN[name]] = value
        share = 1 / max(1, rollouts)
        table[1:, COLUMN["env_steps"]] = envs * steps * share
        table[1:, COLUMN["env_seconds"]] = 0.7 * STEP * slowed * steps * share
        table[1:, COLUMN["act_seconds"]] = 0.3 * STEP * slowed * steps * share
        table[1:, COLUMN["cpu_seconds"]] = 0.2 + STEP * sampled * share
        if stands:
            table[:, COLUMN["env_steps"]] = 3_000
        store.record(Record(tick, now, now, {}, table))
    store.close()
    return path

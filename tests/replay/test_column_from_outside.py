"""A column added from outside the library, the whole way: environment, step writer, lane, relay, replay, batch.

Files that change to add one column: 1, this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ddrl.channels import Lane, StepWriter
from ddrl.core.rows import row_schema
from ddrl.core.specs import ArraySpec, Column, EnvSpec, EnvStep
from ddrl.envs.vectors import OwnVectorEnv
from ddrl.replay import ExperienceReplay

OBSERVATION = ArraySpec.record({"place": ArraySpec((2,), "float32"), "goal": ArraySpec((), "uint8")})


class Walk:
    """Two walks of 7 and 11 steps; each step brings its cost, which is 100 * walk + step."""

    num_envs = 2
    spec = EnvSpec("walk", OBSERVATION, 3, columns=(Column("cost", (2,), "float64"),))
    ends = (7, 11)

    def reset(self, seed: int) -> np.ndarray:
        self.at = [0, 0]
        self.over = [False, False]
        return self.observe()

    def observe(self) -> np.ndarray:
        observation = np.zeros(2, OBSERVATION.numpy)
        observation["place"] = [(walk, at) for walk, at in enumerate(self.at)]
        observation["goal"] = self.ends
        return observation

    def step(self, action: np.ndarray) -> EnvStep:
        cost = np.array([[100 * walk + at, -1] for walk, at in enumerate(self.at)], np.float64)
        for walk in range(2):
            self.at[walk] = 0 if self.over[walk] else self.at[walk] + 1
            self.over[walk] = self.at[walk] == self.ends[walk]
        reward = np.array(self.at, np.float32)
        return EnvStep(
            self.observe(), reward, np.array(self.over), np.zeros(2, bool), reward.astype(np.float64), {"cost": cost}
        )

    def close(self) -> None:
        pass


def play(env: OwnVectorEnv, lane: Lane, steps: int, chosen: Mapping[str, Any]) -> None:
    writer = StepWriter(lane, row_schema(env.spec, EXTRA), 0)
    observation = env.reset(1)
    for _ in range(steps):
        step = env.step(np.zeros(2, np.int64))
        columns = {**step.columns, **chosen}
        writer.write(
            observation,
            np.zeros(2, np.int64),
            step.reward,
            step.terminated,
            step.truncated,
            step.observation,
            5,
            columns,
        )
        observation = step.observation


EXTRA = (Column("logp"),)  # of a chooser


def test_a_column_of_the_environment_and_one_of_the_chooser_reach_the_batch() -> None:
    env = OwnVectorEnv(Walk(), "walk")
    schema = row_schema(env.spec, EXTRA)
    lane, beyond = (Lane.create(None, schema.dtype, 1000) for _ in range(2))
    play(env, lane, 60, {"logp": np.array([-1, -2], np.float32)})
    rows = np.zeros(1000, schema.dtype)
    rows = rows[: lane.pop(rows)]
    assert not rows["cost"][rows["kind"] != 0].any()
    beyond.push(rows.copy())  # a relay moves rows as bytes
    received = np.zeros(1000, schema.dtype)
    replay = ExperienceReplay.of(schema, 1000, n_step=2)
    assert replay.record_rows(received[: beyond.pop(received)]) == (rows["kind"] == 0).sum()
    replay.check()
    batch = replay.sample(200, replay.new_pick_selector("uniform"), 0.5)
    walk, at = batch.s_tm1["place"].T
    np.testing.assert_array_equal(batch.columns["cost"], np.stack([100 * walk + at, np.full(200, -1)], 1))
    np.testing.assert_array_equal(batch.columns["logp"], -1 - walk)
    np.testing.assert_array_equal(batch.s_t["goal"], np.where(walk == 0, 7, 11))
    assert set(walk.tolist()) == {0, 1}

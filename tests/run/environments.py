"""User environments for the tests."""

import os

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """A corridor of five cells; the last pays 1. May fail at a given step."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fail_at: int = -1, die_at: int = -1) -> None:
        self.fail_at, self.die_at, self.steps, self.cell = fail_at, die_at, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the corridor collapsed")
        if self.steps == self.die_at:
            os.kill(os.getpid(), 9)
        self.cell = max(0, self.cell + (1 if action else -1))
        return self._observe(), float(self.cell == 4), self.cell == 4, False, {}

    def _observe(self):
        return np.eye(5, dtype=np.float32)[self.cell]


def walk(fail_at: int = -1, die_at: int = -1) -> Walk:
    return Walk(fail_at, die_at)

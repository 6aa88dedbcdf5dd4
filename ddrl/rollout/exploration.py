"""Exploration: how often actions are random, and which. Pure schedules, and a source of choices with its numbers drawn
ahead."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import RolloutConfig

BLOCK = 256  # vector steps whose random numbers are drawn at once: a draw costs ten times what its use does


def epsilon_at(config: RolloutConfig, env_steps: float) -> float:
    """Share of random actions after `env_steps` of all rollouts: linear from epsilon_start to epsilon_end, then
    constant."""
    progress = min(env_steps / config.epsilon_decay_steps, 1.0)
    return config.epsilon_start + progress * (config.epsilon_end - config.epsilon_start)


def epsilon_of(config: RolloutConfig, epsilon: float, index: int, count: int) -> float:
    """Rollout `index` of `count`: epsilon ** (1 + alpha i / (n - 1)) with alpha = epsilon_spread (Horgan et al. 2018,
    eq. 1)."""
    if count <= 1:
        return epsilon
    return float(epsilon ** (1.0 + config.epsilon_spread * index / (count - 1)))


class EpsilonGreedy:
    """Choices for `num_envs` environments: one row of numbers for each vector step, whatever is asked, so a seed gives
    one stream."""

    def __init__(self, num_actions: int, num_envs: int, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._num_actions, self._shape = num_actions, (BLOCK, num_envs)
        self._place = BLOCK

    def random(self) -> NDArray[np.int64]:
        """A random action for each environment [N]."""
        place = self._next()  # may draw a new block
        return self._actions[place].copy()

    def choose(self, greedy: NDArray[np.int64], epsilon: float) -> NDArray[np.int64]:
        """`greedy` [N], with each action replaced by a random one with probability `epsilon`; in place."""
        place = self._next()
        if self._lowest[place] < epsilon:
            np.copyto(greedy, self._actions[place], where=self._uniform[place] < epsilon)
        return greedy

    def _next(self) -> int:
        place = self._place
        if place == BLOCK:
            self._uniform = self._generator.random(self._shape)
            self._actions = self._generator.integers(self._num_actions, size=self._shape)
            self._lowest: list[float] = self._uniform.min(axis=1).tolist()
            place = 0
        self._place = place + 1
        return place

"""Epsilon-greedy: the action of the highest value, or with probability epsilon a random one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.chooser import Columns
from ddrl.core.errors import ConfigError
from ddrl.core.specs import Column, EnvSpec

BLOCK = 256  # vector steps whose random numbers are drawn at once: a draw costs ten times what its use does
NO_COLUMNS: Columns = {}


class EpsilonGreedy:
    """Reads action values "q" [N, num_actions]; `exploration` is epsilon."""

    name = "epsilon_greedy"
    reads = ("q",)
    settings: tuple[str, ...] = ()

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        """None of its own."""
        return ()

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        if not spec.discrete:
            raise ConfigError(
                f"env.id = {spec.env_id} has continuous actions, and {self.name} chooses among discrete ones; use an "
                "environment with a Discrete action space"
            )
        self._generator = np.random.default_rng(seed)
        self._num_actions = spec.num_actions
        self._shape = (BLOCK, num_envs)
        self._place = BLOCK

    def random(self, observation: NDArray[Any]) -> tuple[NDArray[np.int64], Columns]:
        """See `Chooser`."""
        place = self._next()  # may draw a new block
        return self._actions[place].copy(), NO_COLUMNS

    def choose(self, outputs: Columns, observation: NDArray[Any], exploration: float) -> tuple[NDArray[Any], Columns]:
        """See `Chooser`."""
        action = outputs["q"].argmax(1)
        place = self._next()
        if self._lowest[place] < exploration:
            np.copyto(action, self._actions[place], where=self._uniform[place] < exploration)
        return action, NO_COLUMNS

    def greedy(self, outputs: Columns) -> NDArray[np.int64]:
        """The action of the highest value; of equal ones the first."""
        return outputs["q"].argmax(1)

    def _next(self) -> int:
        place = self._place
        if place == BLOCK:
            self._uniform = self._generator.random(self._shape)
            self._actions = self._generator.integers(self._num_actions, size=self._shape)
            self._lowest: list[float] = self._uniform.min(axis=1).tolist()
            place = 0
        self._place = place + 1
        return place

"""Temporally extended epsilon-greedy (Dabney, Ostrovski & Barreto 2021, "ez-greedy"): with probability epsilon a random
action begins that is repeated for a random number of steps; between them, the action of the highest value.

For environments that a random walk does not cross, such as MountainCar-v0. The end of an episode ends no repetition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.chooser import Columns
from ddrl.acting.choosers.epsilon_greedy import BLOCK, NO_COLUMNS, EpsilonGreedy
from ddrl.core.errors import ConfigError
from ddrl.core.specs import EnvSpec


class EzGreedy(EpsilonGreedy):
    """Reads action values "q" [N, num_actions]; `exploration` is epsilon, the probability that a repetition begins, so
    the share of random actions is larger. A repetition of n steps has a probability proportional to n ** -power
    (`power`, 2.0, above 1), at most `longest` steps (100)."""

    name = "ez_greedy"
    settings = ("power", "longest")

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        super().__init__(spec, num_envs, seed, settings)
        self._power = float(settings.get("power", 2.0))
        self._longest = float(settings.get("longest", 100))
        if not self._power > 1.0 or not self._longest >= 1.0:
            raise ConfigError(
                f"ez_greedy's power is {self._power:g} and its longest {self._longest:g}: they must be above 1 and at "
                "least 1"
            )
        self._lengths = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        self._left = np.zeros(num_envs, np.int64)  # steps that the present repetition still has
        self._repeated = np.zeros(num_envs, np.int64)

    def random(self, observation: NDArray[Any]) -> tuple[NDArray[np.int64], Columns]:
        """See `Chooser`: one repetition after the other."""
        self._begin(1.0)
        self._left -= 1
        return self._repeated.copy(), NO_COLUMNS

    def choose(self, outputs: Columns, observation: NDArray[Any], exploration: float) -> tuple[NDArray[Any], Columns]:
        """See `Chooser`."""
        self._begin(exploration)
        action = outputs["q"].argmax(1)
        busy = self._left > 0
        np.copyto(action, self._repeated, where=busy)
        self._left -= busy
        return action, NO_COLUMNS

    def _begin(self, probability: float) -> None:
        """Begin repetitions where none goes on."""
        place = self._next()
        begin = (self._left == 0) & (self._uniform[place] < probability)
        np.copyto(self._repeated, self._actions[place], where=begin)
        np.copyto(self._left, self._steps[place], where=begin)

    def _next(self) -> int:
        if self._place == BLOCK:
            lengths = self._lengths.zipf(self._power, self._shape)
            self._steps = np.minimum(lengths, self._longest).astype(np.int64)
        return super()._next()

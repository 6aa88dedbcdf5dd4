"""Boltzmann: actions drawn from the softmax of their values, or with probability epsilon from all alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.chooser import Columns
from ddrl.acting.choosers.epsilon_greedy import EpsilonGreedy
from ddrl.core.errors import ConfigError
from ddrl.core.specs import EnvSpec


class Boltzmann(EpsilonGreedy):
    """Reads action values "q" [N, num_actions]; `exploration` is epsilon. Its setting `temperature` (1.0, above 0) is
    in units of the return: actions whose values differ by less are chosen almost alike."""

    name = "boltzmann"
    settings = ("temperature",)

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        super().__init__(spec, num_envs, seed, settings)
        self._temperature = float(settings.get("temperature", 1.0))
        if not 0.0 < self._temperature < math.inf:
            raise ConfigError(f"boltzmann's temperature is {self._temperature}: it must be above 0 and finite")
        seed_of_noise = np.random.SeedSequence([seed, 1])
        self._noise = np.random.default_rng(seed_of_noise)

    def choose(self, outputs: Columns, observation: NDArray[Any], exploration: float) -> tuple[NDArray[Any], Columns]:
        """See `Chooser`. The argmax of q / temperature + Gumbel noise is a draw from the softmax (Gumbel 1954)."""
        noise = self._temperature * self._noise.gumbel(size=outputs["q"].shape)
        return super().choose({"q": outputs["q"] + noise}, observation, exploration)

    def random(self, observation: NDArray[Any]) -> tuple[NDArray[np.int64], Columns]:
        """See `Chooser`."""
        self._noise.gumbel(size=(len(observation), self._num_actions))  # one row of numbers for each vector step
        return super().random(observation)

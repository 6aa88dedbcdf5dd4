"""Categorical: actions drawn from the policy's own probabilities, with their log-probabilities recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.chooser import Columns
from ddrl.core.errors import ConfigError
from ddrl.core.specs import Column, EnvSpec


class Categorical:
    """Reads "logits" [N, num_actions] of softmax; records "log_prob". `exploration` is not used: the policy explores by
    its own probabilities."""

    name = "categorical"
    reads = ("logits",)
    settings: tuple[str, ...] = ()

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        """log pi(a | s) of the policy that acted."""
        return (Column("log_prob"),)

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        if not spec.discrete:
            raise ConfigError(
                f"env.id = {spec.env_id} has continuous actions, and categorical chooses among discrete ones; use "
                "gaussian, or an environment with a Discrete action space"
            )
        self._generator = np.random.default_rng(seed)
        self._num_actions = spec.num_actions
        self._num_envs = num_envs
        self._log_uniform = np.full(num_envs, -math.log(spec.num_actions), np.float32)

    def random(self, observation: NDArray[Any]) -> tuple[NDArray[np.int64], Columns]:
        """See `Chooser`; the uniform policy."""
        numbers = self._numbers()
        return numbers.argmax(1), {"log_prob": self._log_uniform.copy()}

    def choose(self, outputs: Columns, observation: NDArray[Any], exploration: float) -> tuple[NDArray[Any], Columns]:
        """See `Chooser`. The argmax of logits + Gumbel noise is a draw from their softmax (Gumbel 1954)."""
        logits = outputs["logits"]
        action = (logits + self._numbers()).argmax(1)
        shifted = logits - logits.max(axis=1, keepdims=True)
        taken = np.take_along_axis(shifted, action[:, None], 1)[:, 0]
        return action, {"log_prob": (taken - np.log(np.exp(shifted).sum(axis=1))).astype(np.float32)}

    def greedy(self, outputs: Columns) -> NDArray[np.int64]:
        """The most probable action; of equal ones the first."""
        return outputs["logits"].argmax(1)

    def _numbers(self) -> NDArray[np.float64]:
        return self._generator.gumbel(size=(self._num_envs, self._num_actions))

"""Gaussian: continuous actions around the policy's mean, with their log-probabilities recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.chooser import Columns
from ddrl.core.errors import ConfigError
from ddrl.core.specs import Column, EnvSpec

LOG_TWO_PI = math.log(2.0 * math.pi)


class Gaussian:
    """Reads "mean" [N, *action.shape] and "log_std" (the same shape); records "log_prob".

    A model of a deterministic policy has no "log_std": the standard deviation is then `exploration`, in units of the
    action. Actions are clipped to the action's bounds where there are any; the log-probability is the density of the
    clipped action, so that a learner computes the same from the row."""

    name = "gaussian"
    reads = ("mean", "log_std")
    settings: tuple[str, ...] = ()
    optional = ("log_std",)

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        """log pi(a | s) of the policy that acted."""
        return (Column("log_prob"),)

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        if spec.discrete:
            raise ConfigError(
                f"env.id = {spec.env_id} has discrete actions, and gaussian chooses continuous ones; use "
                "epsilon_greedy or categorical, or an environment with a Box of actions"
            )
        self._generator = np.random.default_rng(seed)
        self._shape = (num_envs, *spec.action.shape)
        self._dtype = np.dtype(spec.action.dtype)
        size = spec.action.size
        self._low = np.reshape(spec.action_low or [-np.inf] * size, spec.action.shape)
        self._high = np.reshape(spec.action_high or [np.inf] * size, spec.action.shape)
        self._bounds = self._low.astype(self._dtype), self._high.astype(self._dtype)
        self._bounded = bool(np.isfinite(self._low).all() and np.isfinite(self._high).all())

    def random(self, observation: NDArray[Any]) -> tuple[NDArray[Any], Columns]:
        """See `Chooser`; uniform within the bounds, or standard normal where there are none."""
        normal = self._generator.standard_normal(self._shape)
        if not self._bounded:
            return normal.astype(self._dtype), {"log_prob": _log_density(normal, 0.0, np.zeros(()))}
        share = 0.5 * (1.0 + np.vectorize(math.erf)(normal / math.sqrt(2.0)))  # uniform; one draw, as `choose`
        width = self._high - self._low
        log_prob = np.full(self._shape[0], -np.log(width).sum(), np.float32)
        return (self._low + share * width).astype(self._dtype), {"log_prob": log_prob}

    def choose(self, outputs: Columns, observation: NDArray[Any], exploration: float) -> tuple[NDArray[Any], Columns]:
        """See `Chooser`."""
        mean = outputs["mean"]
        log_std = outputs.get("log_std")
        if log_std is None:
            log_std = np.asarray(math.log(max(exploration, 1e-6)))
        drawn = mean + np.exp(log_std) * self._generator.standard_normal(self._shape)
        action = np.clip(drawn, self._low, self._high).astype(self._dtype)
        return action, {"log_prob": _log_density(action, mean, log_std)}

    def greedy(self, outputs: Columns) -> NDArray[Any]:
        """The mean, within the bounds."""
        return np.minimum(np.maximum(outputs["mean"], self._bounds[0]), self._bounds[1])


def _log_density(action: NDArray[Any], mean: Any, log_std: NDArray[Any]) -> NDArray[np.float32]:
    """log N(action; mean, std) summed over the action's elements [N]."""
    each = -0.5 * np.square((action - mean) / np.exp(log_std)) - log_std - 0.5 * LOG_TWO_PI
    return np.asarray(each, np.float32).reshape(len(action), -1).sum(axis=1)

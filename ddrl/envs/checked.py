"""A user's own VectorEnv, checked at every step: what breaks its spec is refused before it reaches a lane or a
network."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError
from ddrl.core.specs import EnvStep, VectorEnv
from ddrl.envs.spaces import is_array


class CheckedVectorEnv:
    """Passes everything on to `env`, and checks shapes and dtypes of what it gives."""

    def __init__(self, env: VectorEnv, env_id: str) -> None:
        self.num_envs = env.num_envs
        self.spec = env.spec
        self._env = env
        self._id = env_id
        n = (env.num_envs,)
        self._expected: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...] = (
            ("observation", (*n, *env.spec.observation.shape), env.spec.observation.numpy),
            ("reward", (*n, *env.spec.reward_shape), np.dtype(np.float32)),
            ("terminated", n, np.dtype(np.bool_)),
            ("truncated", n, np.dtype(np.bool_)),
            ("raw_reward", n, np.dtype(np.float64)),
        )
        self._columns = {column.name: ((*n, *column.shape), np.dtype(column.dtype)) for column in env.spec.columns}

    def reset(self, seed: int) -> NDArray[Any]:
        """Begin new episodes everywhere. Returns [N, *observation.shape]."""
        observation = self._env.reset(seed)
        self._check(observation, *self._expected[0])
        return observation

    def step(self, action: NDArray[Any]) -> EnvStep:
        """Take `action` [N, *action.shape]."""
        step = self._env.step(action)
        try:
            step = EnvStep(*step)
        except TypeError:
            raise EnvError(
                f"env.id = {self._id}: step must return an EnvStep (ddrl.core.specs), not {type(step).__name__}"
            ) from None
        for value, expected in zip(step[:-1], self._expected, strict=True):
            self._check(value, *expected)
        if step.columns.keys() != self._columns.keys():
            raise EnvError(
                f"env.id = {self._id}: EnvStep.columns must hold {', '.join(self._columns) or 'nothing'} by its spec, "
                f"not {', '.join(step.columns) or 'nothing'}"
            )
        for name, (shape, dtype) in self._columns.items():
            self._check(step.columns[name], name, shape, dtype)
        return step

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _check(self, value: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if not is_array(value) or value.shape != shape or value.dtype != dtype or not value.flags.c_contiguous:
            given = f"{value.dtype} {value.shape}" if is_array(value) else f"a {type(value).__name__}"
            raise EnvError(
                f"env.id = {self._id}: {name} must be a C-contiguous {dtype} array {shape} by its spec, not {given}"
            )

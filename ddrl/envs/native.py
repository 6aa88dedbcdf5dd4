"""Environments that bring their own vector form (Gymnasium's vector entry point, e.g. CartPole-v1): one call steps all
of them.

Such a vector computes all environments at once, several times faster than any loop. Only the next-step reset that
ddrl's protocol has is taken; `making` turns to the loop where an entry point cannot do that."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ddrl.core.specs import EnvSpec, EnvStep
from ddrl.envs.seeds import environment_seeds
from ddrl.envs.spaces import broken_observation, describe, first_action, is_array, is_box


def speaks_our_protocol(vector: Any) -> bool:
    """Whether a vector resets on the next step and gives arrays (a Box), so that NativeVectorEnv can adapt it."""
    return vector.metadata.get("autoreset_mode") == gymnasium.vector.AutoresetMode.NEXT_STEP and isinstance(
        vector.single_observation_space, spaces.Box
    )


class NativeVectorEnv:
    """A Gymnasium vector environment in ddrl's protocol."""

    def __init__(
        self,
        env_id: str,
        vector: Any,
        reward_clip: bool = False,
        *,
        trusted: bool = False,
    ) -> None:
        """Take over `vector`, a gymnasium.vector.VectorEnv for which `speaks_our_protocol` holds; `trusted`: one of
        Gymnasium's own, with actions that ddrl chose."""
        space = vector.single_observation_space
        actions = vector.single_action_space
        assert is_box(space)
        self.num_envs = vector.num_envs
        self.spec: EnvSpec = describe(env_id, space, actions)
        self._vector = vector
        self._shape = (self.num_envs, *space.shape)
        self._dtype = space.dtype
        self._out_shape = (self.num_envs, *self.spec.observation.shape)
        self._out_dtype = np.dtype(self.spec.observation.dtype)
        self._first_action = first_action(actions)
        self._reward_clip = reward_clip
        self._same_shape = self._shape == self._out_shape
        if trusted:
            vector.action_space = _without_check(vector.action_space)

    def reset(self, seed: int) -> NDArray[Any]:
        """Begin new episodes everywhere. Returns [N, *observation.shape]."""
        return self._own(self._vector.reset(seed=environment_seeds(seed, 1)[0])[0])

    def step(self, action: NDArray[Any]) -> EnvStep:
        """Take `action` [N, *action.shape]; an environment whose episode has ended begins the next one instead."""
        if self._first_action:
            action = action + self._first_action
        observation, reward, terminated, truncated, _ = self._vector.step(action)
        raw = reward.astype(np.float64)
        learned = np.clip(raw, -1.0, 1.0).astype(np.float32) if self._reward_clip else reward.astype(np.float32)
        return EnvStep(self._own(observation), learned, terminated.copy(), truncated.copy(), raw)

    def render(self) -> Any:
        """A picture of the first environment, uint8 [height, width, 3]; None where it draws none."""
        pictures = self._vector.render()
        return pictures[0] if pictures else None

    def close(self) -> None:
        """Close the vector."""
        self._vector.close()

    def _own(self, observation: Any) -> NDArray[Any]:
        """A C-contiguous copy: vectors may reuse their buffers, and CartPole's array is transposed."""
        if not is_array(observation) or observation.shape != self._shape or observation.dtype != self._dtype:
            raise broken_observation(self.spec.env_id, observation, self._shape, self._dtype)
        own = observation.astype(self._out_dtype, "C")
        return own if self._same_shape else own.reshape(self._out_shape)


def _without_check(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """`space`, which contains every action: CartPole checks each action in each step, a sixth of the step's time."""
    trusting = copy.copy(space)
    trusting.contains = lambda x: True  # type: ignore[method-assign]
    return trusting

"""What an environment gives and takes, and the protocol every environment of ddrl speaks.

Written by `envs`, read by every stage: lanes, replay and networks take their shapes from an `EnvSpec`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array; the dtype is numpy's name, e.g. "float32"."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(extent) for extent in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one array, without padding."""
        return self.size * np.dtype(self.dtype).itemsize


class ColumnRole(StrEnum):
    """When a column is given back with a draw from replay."""

    STATE = "state"  # also in end rows; given at both ends of a transition
    STEP = "step"  # one a record
    MEMORY = "memory"  # given at the first record of a window
    REWARD = "reward"  # of any shape; summed over n steps


@dataclass(frozen=True)
class Column:
    """One named column of a row: an array of a shape and dtype."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    role: ColumnRole = ColumnRole.STEP

    @property
    def array(self) -> ArraySpec:
        """Its shape and dtype."""
        return ArraySpec(self.shape, self.dtype)


@dataclass(frozen=True)
class EnvSpec:
    """What one environment gives and takes.

    `observation` is what a network sees. Where `frame_stack` > 1 it is the last `frame_stack` frames along axis 0, and
    only the newest frame, `frame`, travels through lanes and is stored. The stack of an episode's first frames repeats
    the first frame."""

    env_id: str
    observation: ArraySpec
    num_actions: int  # discrete actions 0 .. num_actions - 1; 0: the action is the continuous array `action`
    action: ArraySpec = ArraySpec((), "int64")
    frame_stack: int = 1

    def __post_init__(self) -> None:
        if self.frame_stack < 1:
            raise ValueError(f"frame_stack ({self.frame_stack}) must be at least 1")
        if self.frame_stack > 1 and (not self.observation.shape or self.observation.shape[0] != self.frame_stack):
            raise ValueError(
                f"axis 0 of the observation {self.observation.shape} must hold the {self.frame_stack} stacked frames"
            )

    @property
    def frame(self) -> ArraySpec:
        """What is recorded a step: the observation itself, or its newest frame where frames are stacked."""
        if self.frame_stack == 1:
            return self.observation
        return ArraySpec(self.observation.shape[1:], self.observation.dtype)

    @property
    def discrete(self) -> bool:
        """Whether actions are integers."""
        return self.num_actions > 0


class EnvStep(NamedTuple):
    """Result of one vector step; the arrays belong to the caller."""

    observation: NDArray[Any]  # [N, *observation.shape]
    reward: NDArray[np.float32]  # [N], as the learner sees it (clipped where env.reward_clip)
    terminated: NDArray[np.bool_]  # [N], the episode reached a terminal state: no bootstrap
    truncated: NDArray[np.bool_]  # [N], the episode was cut (time limit): bootstrap from the observation
    raw_reward: NDArray[np.float64]  # [N], as the environment gave it; episode returns are sums of these


class VectorEnv(Protocol):
    """N environments that step together, with next-step reset.

    After a step that ends an episode, the observation is the episode's final one. The next step ignores that
    environment's action, gives reward 0, and returns the first observation of its next episode. So each observation is
    seen once, and nothing hides in an info dict."""

    num_envs: int
    spec: EnvSpec

    def reset(self, seed: int) -> NDArray[Any]:
        """Begin new episodes everywhere; the same seed gives the same run for the same actions. Returns [N,
        *observation.shape]."""
        ...

    def step(self, action: NDArray[Any]) -> EnvStep:
        """Take `action` [N, *action.shape]."""
        ...

    def close(self) -> None:
        """Release what the environments hold."""
        ...

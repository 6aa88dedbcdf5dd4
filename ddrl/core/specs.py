"""What an environment gives and takes, the protocol every environment of ddrl speaks, and what an algorithm
declares.

Written by `envs`, read by every stage: lanes, replay and networks take their shapes from an `EnvSpec`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.core.metrics import Metric

# By the name of an axis: the module with the networks (make_actor, make_critics) for arrays that have it, as settings
# name modules. The learner imports it when it is asked for.
NETWORKS = {"queue": "ddrl.admix.networks"}
ACTION_MASK = "action_mask"  # the array of an observation that says which discrete actions are allowed
FORBIDDEN = -1e9  # value of an action that is not
MAX_ELEMENTS = 1 << 28  # of one array
SMALLEST_SCREEN = 36  # pixels; below it nothing is left after the three convolutions of the Nature network
# numpy arrays by dtype, as annotations name them; a comment or docstring gives the shape.
Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int64]

_DTYPE = re.compile(r"[<>=|]?[A-Za-z_]+[0-9]{0,4}_?")


class Image(NamedTuple):
    """An array as an image network takes it."""

    channels: int
    height: int
    width: int
    channels_last: bool = False
    add_channel: bool = False
    stacked: bool = False  # [frames, H, W, C]


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array; the dtype is numpy's name, e.g. "float32".

    With `fields` it is a record of named arrays: one structured numpy value of shape () and dtype "void"
    (`ArraySpec.record`).
    `axes` gives an array of a record names for its axes, "" for none. A named axis has a varying number of entries, at
    most shape[i]: the array is padded with zeros, and the record has a further array `<axis>_mask`, bool, that is true
    where there is an entry.

    `ranges` gives (low, high) of each element, in order, or once for all: networks of the library see them as 0 and 1,
    those of an action as -1 and 1. (): bytes are seen as [0, 1], everything else as it is."""

    shape: tuple[int, ...]
    dtype: str
    fields: tuple[tuple[str, ArraySpec], ...] = ()
    axes: tuple[str, ...] = ()
    ranges: tuple[tuple[float, float], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(extent) for extent in self.shape))
        if min(self.shape, default=0) < 0 or math.prod(self.shape) > MAX_ELEMENTS:
            raise ValueError(f"an array of shape {str(self.shape)[:80]} cannot be held")
        # numpy evaluates text before a comma or in brackets, and this may come from a damaged file.
        dtype: Any = self.dtype  # numpy's own types are taken too
        if isinstance(dtype, str) and not _DTYPE.fullmatch(dtype):
            raise ValueError(f"{dtype[:40]!r} is no name of a dtype, such as 'float32'")
        object.__setattr__(self, "dtype", np.dtype(dtype).name)
        if len(self.ranges) > 1 and len(self.ranges) != math.prod(self.shape):
            raise ValueError(f"{len(self.ranges)} ranges are for another shape than {self.shape}: one, or one each")
        if any(low >= high for low, high in self.ranges):
            raise ValueError("each of the ranges must be (low, high) with low below high")
        if self.axes and len(self.axes) != len(self.shape):
            raise ValueError(f'axes {self.axes} must name each axis of the shape {self.shape}, "" for none')
        if self.fields:
            if self.shape or self.dtype != "void":
                raise ValueError("a record of named arrays has shape () and dtype 'void': use ArraySpec.record")
            object.__setattr__(self, "fields", _with_masks(self.fields))
        elif self.dtype == "void":
            raise ValueError("a record of named arrays needs fields")

    @classmethod
    def record(cls, arrays: Mapping[str, ArraySpec]) -> ArraySpec:
        """A record of named arrays; the masks of their named axes are added."""
        return cls((), "void", tuple(arrays.items()))

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype of one value without its shape; structured, without padding, where there are fields."""
        if not self.fields:
            return np.dtype(self.dtype)
        return np.dtype([(name, array.dtype, array.shape) for name, array in self.fields])

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The named arrays; {"observation": self} where there are no fields."""
        return dict(self.fields) or {"observation": self}

    @property
    def image(self) -> Image | None:
        """[C, H, W], [H, W, C], [H, W] or [frames, H, W, C] as an image: of three axes the smallest holds the
        channels."""
        shape = self.shape
        if len(shape) == 2:
            return Image(1, *shape, add_channel=True)
        if len(shape) == 3 and shape[2] < min(shape[:2]):
            return Image(shape[2], *shape[:2], channels_last=True)
        if len(shape) == 3:
            return Image(*shape)
        if len(shape) == 4 and shape[3] < min(shape[1:3]):
            return Image(shape[0] * shape[3], *shape[1:3], stacked=True)
        return None

    @property
    def is_picture(self) -> bool:
        """Whether it is an image that the Nature network can take."""
        image = self.image
        return image is not None and min(image.height, image.width) >= SMALLEST_SCREEN

    @property
    def size(self) -> int:
        """Number of elements, of all arrays together."""
        return sum(array.size for _, array in self.fields) if self.fields else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one array (of all arrays together), without padding."""
        return math.prod(self.shape) * self.numpy.itemsize


def _with_masks(fields: tuple[tuple[str, ArraySpec], ...]) -> tuple[tuple[str, ArraySpec], ...]:
    """The fields of a record, and behind them the masks of named axes that are not among them yet."""
    arrays = dict(fields)
    if len(arrays) != len(fields):
        raise ValueError(f"two arrays of a record have one name: {', '.join(name for name, _ in fields)}")
    for name, array in fields:
        if array.fields:
            raise ValueError(f"{name}: a record holds arrays, not further records")
        for axis, extent in zip(array.axes, array.shape, strict=False):
            if not axis:
                continue
            mask = arrays.setdefault(f"{axis}_mask", ArraySpec((extent,), "bool"))
            if mask != ArraySpec((extent,), "bool"):
                raise ValueError(f"{name}: the axis {axis} has at most {extent} entries, but {axis}_mask is {mask}")
    return tuple(arrays.items())


def allowed_actions(mask: Flags) -> Flags:
    """Which actions [N, num_actions] may be taken: those of the mask, or all where it allows none (a final state's)."""
    return mask | ~mask.any(axis=1, keepdims=True)


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
    columns: tuple[Column, ...] = ()  # what EnvStep.columns brings, recorded beside the reward
    reward_shape: tuple[int, ...] = ()  # of EnvStep.reward without N; (k,): k objectives
    action_low: tuple[float, ...] = ()  # bounds of a continuous action [action.size]; (): not bounded
    action_high: tuple[float, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)  # what the user is told at the start
    entries: tuple[tuple[str, int], ...] = field(
        default=(), compare=False
    )  # of a flat vector: (name, numbers), in order
    state_nbytes: int = field(default=0, compare=False)  # of what an environment keeps between episodes; 0: nothing

    def __post_init__(self) -> None:
        if self.frame_stack < 1:
            raise ValueError(f"frame_stack ({self.frame_stack}) must be at least 1")
        if not 0 <= self.num_actions <= MAX_ELEMENTS:
            raise ValueError(f"there cannot be {self.num_actions} actions")
        for column in self.columns:
            if column.role is ColumnRole.STATE:
                raise ValueError(
                    f"column {column.name}: what belongs to a state is an array of the observation (ArraySpec.record)"
                )
        if len(self.action_low) != len(self.action_high) or len(self.action_low) not in (0, self.action.size):
            raise ValueError(
                f"action_low and action_high ({len(self.action_low)} and {len(self.action_high)}) must hold a bound "
                f"for each of the {self.action.size} numbers of an action"
            )
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
    def networks(self) -> str:
        """The module whose networks this observation needs (`NETWORKS`); "": those of the library for one vector."""
        axes = (axis for array in self.observation.arrays.values() for axis in array.axes)
        return next((NETWORKS[axis] for axis in axes if axis in NETWORKS), "")

    def scaled(self, how: str) -> EnvSpec:
        """The spec with env.scale = `how`, of one that has the ranges of its spaces (auto)."""
        if how == "auto":
            return self
        identity = ((0.0, 1.0),) if how == "none" else ()
        fields = tuple((name, replace(array, ranges=identity)) for name, array in self.observation.fields)
        observation = replace(self.observation, fields=fields, ranges=() if fields else identity)
        return replace(self, observation=observation, action=replace(self.action, ranges=()), notes=())

    def nonfinite_entry(self, *given: Array) -> str:
        """The first entry with a number that is NaN or infinite in observations [N, *observation.shape], in words for
        the end of a message; "" where there is none, or only one array."""
        observations = np.concatenate(given)
        if self.observation.fields:
            parts = {name: observations[name] for name, _ in self.observation.fields}
        else:
            ends = itertools.accumulate((count for _, count in self.entries), initial=0)
            parts = {
                name: observations[:, begin : begin + count]
                for (name, count), begin in zip(self.entries, ends, strict=False)
            }
        bad = (name for name, part in parts.items() if not np.isfinite(part).all())
        return next((f" (entry {name} of the observation)" for name in bad), "")

    @property
    def masked(self) -> bool:
        """Whether observations say by ACTION_MASK which of the discrete actions are allowed; where none is, all are."""
        mask = dict(self.observation.fields).get(ACTION_MASK)
        return mask == ArraySpec((self.num_actions,), "bool")

    @property
    def unmasked(self) -> EnvSpec:
        """The spec of what networks see: observations without the mask."""
        if not self.masked:
            return self
        fields = tuple((name, array) for name, array in self.observation.fields if name != ACTION_MASK)
        alone = len(fields) == 1 and fields[0][0] == "observation"
        return replace(self, observation=fields[0][1] if alone else replace(self.observation, fields=fields))

    def with_mask(self) -> EnvSpec:
        """The spec with the array ACTION_MASK in its observations."""
        arrays = {**self.observation.arrays, ACTION_MASK: ArraySpec((self.num_actions,), "bool")}
        return replace(self, observation=ArraySpec.record(arrays))

    @property
    def discrete(self) -> bool:
        """Whether actions are integers."""
        return self.num_actions > 0


class EnvStep(NamedTuple):
    """Result of one vector step; the arrays belong to the caller."""

    observation: Array  # [N, *observation.shape]
    reward: Floats32  # [N, *reward_shape], as the learner sees it (clipped where env.reward_clip)
    terminated: Flags  # [N], the episode reached a terminal state: no bootstrap
    truncated: Flags  # [N], the episode was cut (time limit): bootstrap from the observation
    raw_reward: Floats  # [N], as the environment gave it; episode returns are sums of these
    columns: Mapping[str, Array] = MappingProxyType({})  # [N, *shape], those of EnvSpec.columns by name


class VectorEnv(Protocol):
    """N environments that step together, with next-step reset.

    After a step that ends an episode, the observation is the episode's final one. The next step ignores that
    environment's action, gives reward 0, and returns the first observation of its next episode. So each observation is
    seen once, and nothing hides in an info dict."""

    num_envs: int
    spec: EnvSpec

    def reset(self, seed: int) -> Array:
        """Begin new episodes everywhere; the same seed gives the same run for the same actions. Returns [N,
        *observation.shape]."""
        ...

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N, *action.shape]."""
        ...

    def close(self) -> None:
        """Release what the environments hold."""
        ...


# -- algorithm ---------------------------------------------------------------------------------------------------------
# What every process must know of a learning algorithm, without torch.
#
# Made by an algorithm's `describe(config, spec)` on rank 0 before any channel is created, and part of the topology.
# Lanes and counters are made from it, rollouts act by it, and none of them loads the algorithm's module.


@dataclass(frozen=True)
class ActingInput:
    """An input of an acting model beside the observation.

    `state`: recurrent state [*shape], `initial` at an episode's start; the model's output `output` is the next one.
    `noise`: drawn from `distribution` by the policy's own generator, once a step or once an episode.
    """

    name: str
    kind: Literal["state", "noise"]
    shape: tuple[int, ...]
    dtype: str = "float32"
    initial: float = 0.0
    output: str = ""
    distribution: Literal["uniform", "normal"] = "uniform"
    per: Literal["step", "episode"] = "step"


@dataclass(frozen=True)
class Experience:
    """The source of an algorithm's batches, and what one draw is."""

    source: Literal["replay", "trajectories"] = "replay"
    pick_len: int = 1  # [records] of a draw; above 1: sequences
    burn_in: int = 0  # [records] before a sequence
    n_step: int | None = None  # rewards summed before the bootstrap; None: replay.n_step
    length: int = 0  # [records] of a trajectory
    max_policy_lag: int | None = None  # [versions] older trajectories are dropped and counted; None: none are


@dataclass(frozen=True)
class Declaration:
    """What an algorithm needs of the processes that never load it."""

    algorithm: str
    chooser: str
    columns: tuple[Column, ...] = ()  # beside those that every row has
    figures: tuple[Metric, ...] = ()  # gauges that its updates report
    experience: Experience = field(default_factory=Experience)
    inputs: tuple[ActingInput, ...] = ()  # of the acting model, beside the observation
    settings: dict[str, Any] = field(default_factory=dict[str, Any])  # of the chooser; opaque to everybody else
    unread: tuple[str, ...] = ()  # settings that are not at their defaults though nothing reads them; by the library

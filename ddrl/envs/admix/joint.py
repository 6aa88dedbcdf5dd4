"""Where ad mixing meets the house's joints: the one file that knows how observations, columns and steps are declared.

An observation batch is one numpy structured array [N] with named fields. The axis "queue" is padded with zeros;
`queue_mask` says which of its places hold an ad. The rest of the package uses the four functions below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddrl.core.specs import ArraySpec, Column, EnvSpec

ENV_ID = "ddrl/AdMixing-v0"
COLUMNS = (
    Column("chosen", (), "int32"),  # place in the queue of the ad shown; -1: none
    Column("score", (), "float32"),  # the score it was chosen by
    Column("revenue", (), "float32"),  # what showing it is worth: the bid, or the click's value [currency / 1000]
    Column("logged", (), "int32"),  # place in the queue of the ad that the log shows; -1: unknown
)


@dataclass(frozen=True)
class Field:
    """One named array of an observation; `axes` names the axes that vary in length, "" for the others."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]


def make_spec(
    fields: tuple[Field, ...], queue: int, highest: Sequence[float], rewards: tuple[int, ...] = ()
) -> EnvSpec:
    """The spec of environments with these named arrays, `queue` places an action between 0 and `highest`, and rewards
    of this shape."""
    arrays = {"queue_mask": ArraySpec((queue,), "bool")}
    arrays |= {each.name: ArraySpec(each.shape, each.dtype, axes=each.axes) for each in fields}
    return EnvSpec(
        ENV_ID, ArraySpec.record(arrays), 0, ArraySpec((len(highest),), "float32"),
        columns=COLUMNS, reward_shape=rewards, action_low=(0.0,) * len(highest), action_high=tuple(highest),
    )  # fmt: skip


def arrays_of(spec: EnvSpec) -> dict[str, ArraySpec]:
    """The named arrays of an observation."""
    return spec.observation.arrays


def dtype_of(spec: EnvSpec) -> np.dtype[Any]:
    """The structured dtype of an observation."""
    return spec.observation.numpy

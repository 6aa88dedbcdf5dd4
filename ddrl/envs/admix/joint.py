"""Where ad mixing meets the house's joints: the one file that knows how observations, columns and steps are declared.

An observation batch is one numpy structured array [N] with named fields. The axis "queue" is padded with zeros;
`queue_mask` says which of its places hold an ad. The rest of the package uses the four functions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.specs import ArraySpec, Column, EnvStep

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


@dataclass(frozen=True)
class QueueSpec:
    """What one ad-mixing environment gives and takes; scores lie in [action_low, action_high], eCPM units."""

    env_id: str
    fields: tuple[tuple[str, ArraySpec], ...]
    action: ArraySpec
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    columns: tuple[Column, ...] = COLUMNS
    num_actions: int = 0


class AdmixStep(EnvStep):
    """An EnvStep that also brings columns by name [N]."""

    columns: Mapping[str, NDArray[Any]]


def make_spec(fields: tuple[Field, ...], queue: int, actions: int, highest_score: float) -> QueueSpec:
    """The spec of environments with these named arrays, `queue` places and `actions` scores."""
    arrays = {each.name: ArraySpec(each.shape, each.dtype) for each in fields}
    arrays["queue_mask"] = ArraySpec((queue,), "bool")
    action = ArraySpec((actions,), "float32")
    return QueueSpec(ENV_ID, tuple(arrays.items()), action, (0.0,) * actions, (highest_score,) * actions)


def arrays_of(spec: QueueSpec) -> dict[str, ArraySpec]:
    """The named arrays of an observation."""
    return dict(spec.fields)


def dtype_of(spec: QueueSpec) -> np.dtype[Any]:
    """The structured dtype of an observation."""
    return np.dtype([(name, array.dtype, array.shape) for name, array in spec.fields])


def make_step(columns: Mapping[str, NDArray[Any]], *step: Any) -> AdmixStep:
    """A step (observation, reward, terminated, truncated, raw reward) with its columns."""
    whole = AdmixStep(*step)
    whole.columns = columns
    return whole

"""Where ad mixing meets the house's joints: the one file that knows how observations, columns and steps are declared.

An observation batch is one numpy structured array [N] with named fields; `queue_mask` is the mask of the axis "queue".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.specs import ArraySpec, Column, EnvStep

COLUMNS = (
    Column("chosen", (), "int32"),  # queue slot of the ad shown; -1: none
    Column("score", (), "float32"),  # the score it was chosen by
    Column("revenue", (), "float32"),  # what showing it is worth: the bid, or the click's value [currency / 1000]
    Column("logged", (), "int32"),  # queue slot that the log shows; -1: unknown
)


@dataclass(frozen=True)
class QueueSpec:
    """What one ad-mixing environment gives and takes."""

    env_id: str
    fields: tuple[tuple[str, ArraySpec], ...]
    action: ArraySpec
    action_high: float  # scores lie in [0, action_high], eCPM units
    columns: tuple[Column, ...] = COLUMNS
    num_actions: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The structured dtype of one observation."""
        return np.dtype([(name, array.dtype, array.shape) for name, array in self.fields], align=True)


class AdmixStep(EnvStep):
    """An EnvStep that also brings columns by name [N]."""

    columns: Mapping[str, NDArray[Any]]

    @staticmethod
    def of(columns: Mapping[str, NDArray[Any]], *step: Any) -> AdmixStep:
        """A step with its columns."""
        whole = AdmixStep(*step)
        whole.columns = columns
        return whole

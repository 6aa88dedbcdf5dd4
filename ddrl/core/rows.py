"""Rows of experience: named columns, and where each of them stands.

A row is one step of one episode (written by rollouts, moved by lanes and relays as bytes, read by replay). Its columns
are data: from a `RowSchema` follow the numpy dtype, the byte offsets, and the table that the C++ kernel takes. A new
column is one `Column` in the environment's spec, in the algorithm's declaration or in a chooser, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ddrl.core.errors import ConfigError
from ddrl.core.specs import Column, ColumnRole, EnvSpec

HEADER = (
    Column("policy_version", (), "uint64"),  # of the policy that acted
    Column("stream", (), "uint32"),  # one environment of one rollout, for the whole run
    Column("step", (), "uint32"),  # from 0 within an episode
    Column("kind", (), "uint32"),  # RowKind
)


@dataclass(frozen=True)
class RowSchema:
    """The columns of a row, in their order in memory; states come last."""

    columns: tuple[Column, ...]
    frame_stack: int = 1

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"a row cannot have two columns {name!r}: rename the one of the environment or algorithm"
                )

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Structured dtype of one row, 8-byte aligned."""
        columns = [(column.name, np.dtype(column.dtype), column.shape) for column in self.columns]
        packed = np.dtype(columns)
        padding = -packed.itemsize % 8
        return np.dtype([*columns, ("padding", np.uint8, (padding,))]) if padding else packed

    def of(self, role: ColumnRole) -> tuple[Column, ...]:
        """The columns of one role, in order."""
        return tuple(column for column in self.columns if column.role is role)


def row_schema(spec: EnvSpec, extra: Sequence[Column] = ()) -> RowSchema:
    """The rows of an environment, with the further columns of an algorithm or chooser."""
    own = (
        *HEADER,
        Column("reward", (), "float32", ColumnRole.REWARD),
        Column("action", spec.action.shape, spec.action.dtype),
        *extra,
        Column("state", spec.frame.shape, spec.frame.dtype, ColumnRole.STATE),
    )
    return RowSchema(own, spec.frame_stack)

"""Rows become n-step transitions: what a batch of `replay.batches.Transitions` is made of, one array a column.

r_t = sum over j < k of discount^j r_{t+j}, discount_t = discount^k, or 0 where s_t is terminal; k = n_step, less where
the episode ends sooner. A gap in `step` and `cut` lose the transitions that are not complete. Used where there is no
replay between rollout and learner: sample areas, and the pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import ConfigError
from ddrl.core.rows import RowKind, RowSchema
from ddrl.core.specs import Column, ColumnRole

Arrays = dict[str, NDArray[Any]]  # by the name of a column [m, *shape]


def transition_columns(schema: RowSchema) -> tuple[Column, ...]:
    """The columns of a transition: those that replay stores, `discount_t`, and the state after it as `<name>_next`."""
    if schema.frame_stack > 1:
        raise ConfigError(
            f"stacked frames (frame_stack {schema.frame_stack}) need replay.source = replay: it alone puts stacks "
            "together from frames"
        )
    after = [Column(f"{one.name}_next", one.shape, one.dtype) for one in schema.of(ColumnRole.STATE)]
    return (*schema.stored, Column("discount_t"), *after)


class TransitionBuilder:
    """Takes the rows of any number of streams, in order, and gives each transition once, when it is complete."""

    def __init__(self, schema: RowSchema, n_step: int, discount: float) -> None:
        self.columns = transition_columns(schema)
        self._schema = schema
        self._n_step = n_step
        self._discount = discount
        self._powers = discount ** np.arange(n_step + 1)
        self.cut()

    def cut(self) -> None:
        """The running episodes are over; their last states are unknown."""
        self._rest = np.zeros(0, self._schema.dtype)

    def add(self, rows: NDArray[Any]) -> Arrays:
        """The transitions that `rows` of the schema's dtype complete. O(rows)."""
        rows = np.concatenate([self._rest, rows])
        rows = rows[np.argsort(rows["stream"], kind="stable")]
        count = len(rows)
        stream = rows["stream"]
        step = rows["step"]
        goes_on = rows["kind"] == RowKind.STEP
        same = stream[1:] == stream[:-1]
        joined = same & (step[1:] == step[:-1] + 1) & goes_on[:-1]
        breaks = np.append(np.flatnonzero(~joined), count - 1)
        place = np.arange(count)
        last = breaks[np.searchsorted(breaks, place)]  # of the unbroken run that a row stands in
        reach = last - place
        ended = ~goes_on[last]
        complete = (reach >= self._n_step) | (ended & (reach > 0))
        newest = np.append(~same, True)[last]  # the run is its stream's newest
        self._rest = rows[~ended & newest & (reach < self._n_step)]
        return self._transitions(rows, np.flatnonzero(complete), np.minimum(reach, self._n_step)[complete])

    def _transitions(self, rows: NDArray[Any], start: NDArray[np.int64], length: NDArray[np.int64]) -> Arrays:
        final = start + length
        sums = {column.name for column in self._schema.of(ColumnRole.REWARD)}
        given = {name: rows[name][start] for name in (one.name for one in self._schema.stored) if name not in sums}
        for name in sums:
            total = np.zeros((len(start), *rows[name].shape[1:]), np.float64)
            for ahead in range(self._n_step):
                inside = length > ahead
                total[inside] += self._powers[ahead] * rows[name][start[inside] + ahead]
            given[name] = total.astype(rows[name].dtype)
        terminal = rows["kind"][final] == RowKind.TERMINATED
        given["discount_t"] = np.where(terminal, 0.0, self._powers[length]).astype(np.float32)
        for column in self._schema.of(ColumnRole.STATE):
            given[f"{column.name}_next"] = rows[column.name][final]
        return given

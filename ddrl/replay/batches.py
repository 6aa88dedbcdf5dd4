"""What replay hands out: the batches as named tuples of arrays, and the fresh arrays behind them.

Written by the kernel, read by learners. A batch owns its memory; once nothing refers to the tuple or any of its arrays
(views included), the arrays are used again for a later batch. Observations are one array, or a dict of named arrays
where the row schema has several. `columns` holds every further column by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.core.rows import STATE, RowSchema
from ddrl.core.specs import Array, ArraySpec, Column, ColumnRole, Floats32

Handles = NDArray[np.uint64]  # of episodes; versions of policies too
Places = NDArray[np.uint32]
Outputs = tuple[Array | None, ...]  # a batch's arrays in the kernel's order


def array_of(given: Any, name: str) -> ArraySpec:
    """What a state or an action is made of, from an ArraySpec, a dict of them, or a space of Gymnasium (known by its
    attributes: this module must not import it); TypeError for anything else."""
    if isinstance(given, ArraySpec):
        return given
    arrays: Any = getattr(given, "spaces", given)  # of a Dict
    if isinstance(arrays, Mapping):
        named = cast(Mapping[str, Any], arrays)
        return ArraySpec.record({key: array_of(value, f"{name}.{key}") for key, value in named.items()})
    shape: Any = getattr(given, "shape", None)
    dtype: Any = getattr(given, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        raise TypeError(
            f"{name} is a {type(given).__name__}: give an ArraySpec, a dict of them, or a space of fixed shape (Box, "
            "Discrete, MultiDiscrete, MultiBinary, Dict)"
        )
    return ArraySpec(cast(tuple[int, ...], shape), np.dtype(dtype).name)


class Windows(NamedTuple):
    """Windows of L = pick_len records; data past a length is zero.

    `seq_len_next` is `seq_len` where the state after the last record is known, else one less.
    """

    batch_state: Any  # [B, L, *observation]
    batch_action: Array  # [B, L, *action]
    batch_reward: Floats32  # [B, L, *reward]
    batch_state_next: Any  # [B, L, *observation]
    seq_len: Places  # [B], records
    seq_len_next: Places  # [B], next states
    batch_pick_epi: Handles  # [B]
    batch_pick_pos: Places  # [B]


class Transitions(NamedTuple):
    """n-step transitions: r_t = sum of discount^j r_{t+j} over k steps, discount_t = discount^k, or 0 where s_t is
    terminal.

    k = n_step, less where the episode ends sooner.
    """

    s_tm1: Any  # [B, *observation]
    a_tm1: Array  # [B, *action]
    r_t: Floats32  # [B, *reward]
    discount_t: Floats32  # [B]
    s_t: Any  # [B, *observation]
    pick_epi: Handles  # [B]
    pick_pos: Places  # [B]
    weight: Floats32  # [B], importance weights, largest 1
    policy_version: Handles  # [B], of the policy that acted
    columns: dict[str, Array]  # [B, ...], of the pick; REWARD: n-step sums; STATE also as name_next, k steps on


class Sequences(NamedTuple):
    """Sequences for recurrent learners: up to burn_in records before the pick, its L = pick_len records, and n_step
    states after.

    Row b uses states 0 .. burn_len + length + (states after) - 1 of its axis; position t of the pick (t < length)
    has index burn_len + t, its bootstrap state index burn_len + t + ahead[t]. What lies past is zero."""

    state: Any  # [B, burn_in + L + n_step, *observation]
    action: Array  # [B, burn_in + L, *action]
    r_t: Floats32  # [B, L, *reward], n-step sums
    discount_t: Floats32  # [B, L]
    ahead: Places  # [B, L], steps to the bootstrap state
    burn_len: Places  # [B], records of burn-in in use
    length: Places  # [B], positions in use
    pick_epi: Handles  # [B]
    pick_pos: Places  # [B]
    weight: Floats32  # [B]
    policy_version: Handles  # [B], of the pick's first record
    columns: dict[str, Array]  # STEP [B, burn_in + L, ...]; STATE [B, burn_in + L + n_step, ...]; REWARD
    # [B, L, ...], n-step sums; MEMORY [B, ...], recorded with the first state (before burn-in)


def as_observation(schema: RowSchema, arrays: Mapping[str, Any], end: str = "") -> Any:
    """The observation among arrays by column: one array, or the named ones by name. `end`: of the columns' names."""
    if f"{STATE}{end}" in arrays:
        return arrays[f"{STATE}{end}"]
    return {schema.array_name(column): arrays[f"{column.name}{end}"] for column in schema.observation}


def as_transitions(schema: RowSchema, columns: Mapping[str, Array]) -> Transitions:
    """Arrays [B, ...] by the columns of `core.rows.transition_columns` as a batch; all weights 1."""
    size = len(columns["discount_t"])
    further = [name for one in schema.further for name in (one.name, f"{one.name}_next") if name in columns]
    return Transitions(
        as_observation(schema, columns),
        columns["action"],
        columns["reward"],
        columns["discount_t"],
        as_observation(schema, columns, "_next"),
        np.zeros(size, np.uint64),
        np.zeros(size, np.uint32),
        np.ones(size, np.float32),
        columns["policy_version"],
        {name: columns[name] for name in further},
    )


def _picks(size: int) -> tuple[Handles, Places, Floats32]:
    """Fresh arrays for the handles, positions and weights of picks."""
    return np.empty(size, np.uint64), np.empty(size, np.uint32), np.empty(size, np.float32)


class BatchShapes:
    """Makes fresh arrays for the batches of one replay; called by the kernel when no used batch is free.

    Each method gives a batch and its arrays in the kernel's order: handles, positions and weights of the picks, one for
    each stored column (None: not wanted), then what the method's docstring names."""

    def __init__(self, schema: RowSchema, *, pick_len: int, n_step: int, burn_in: int) -> None:
        self._schema = schema
        self._pick_len = pick_len
        self._n_step = n_step
        self._burn_in = burn_in
        self.allocate: Callable[[tuple[int, ...], Any], Array] = np.empty  # an array of a shape and a dtype

    def windows(self, size: int) -> tuple[tuple[Windows, dict[str, Array]], Outputs]:
        """Arrays for get_batch; after the columns: next states, lengths."""
        lead = (size, self._pick_len)
        arrays = self._columns({ColumnRole.MEMORY: (size,)}, lead)
        del arrays["policy_version"]
        after = self._next_states(lead)
        lengths = (np.empty(size, np.uint32), np.empty(size, np.uint32))
        picks = _picks(size)[:2]
        batch = Windows(
            as_observation(self._schema, arrays),
            arrays["action"],
            arrays["reward"],
            as_observation(self._schema, after),
            *lengths,
            *picks,
        )
        outputs = (*picks, None, *self._outputs(arrays), *after.values(), *lengths)
        return (batch, self._further(arrays, after)), outputs

    def transitions(self, size: int) -> tuple[Transitions, Outputs]:
        """Arrays for sample; after the columns: next states, discounts."""
        arrays = self._columns({}, (size,))
        after = self._next_states((size,))
        discount = np.empty(size, np.float32)
        picks = _picks(size)
        batch = Transitions(
            as_observation(self._schema, arrays),
            arrays["action"],
            arrays["reward"],
            discount,
            as_observation(self._schema, after),
            *picks,
            arrays["policy_version"],
            self._further(arrays, after),
        )
        return batch, (*picks, *self._outputs(arrays), *after.values(), discount)

    def sequences(self, size: int) -> tuple[Sequences, Outputs]:
        """Arrays for sample_sequences; after the columns: values of the pick's first record alone, one for each column,
        discounts, steps ahead, lengths."""
        room = self._burn_in + self._pick_len
        lead = (size, self._pick_len)
        leads = {
            ColumnRole.STATE: (size, room + self._n_step),
            ColumnRole.REWARD: lead,
            ColumnRole.MEMORY: (size,),
        }
        arrays = self._columns(leads, (size, room))
        del arrays["policy_version"]
        at_pick = {"policy_version": np.empty(size, np.uint64)}
        places = (
            np.empty(lead, np.float32),  # discount
            np.empty(lead, np.uint32),  # ahead
            np.empty(size, np.uint32),  # burn_len
            np.empty(size, np.uint32),  # length
        )
        picks = _picks(size)
        batch = Sequences(
            as_observation(self._schema, arrays),
            arrays["action"],
            arrays["reward"],
            *places,
            *picks,
            at_pick["policy_version"],
            self._further(arrays, {}),
        )
        return batch, (*picks, *self._outputs(arrays), *self._outputs(at_pick), *places)

    def _columns(self, leads: Mapping[ColumnRole, tuple[int, ...]], lead: tuple[int, ...]) -> dict[str, Array]:
        """An array for each stored column; its leading axes are those of its role in `leads`, else `lead`."""
        return {column.name: self._array(leads.get(column.role, lead), column) for column in self._schema.stored}

    def _next_states(self, lead: tuple[int, ...]) -> dict[str, Array]:
        states = self._schema.of(ColumnRole.STATE)
        return {column.name: self._array(lead, column) for column in self._schema.stored if column in states}

    def _array(self, lead: tuple[int, ...], column: Column) -> Array:
        stacked = self._schema.frame_stack > 1 and column in self._schema.observation
        stack = (self._schema.frame_stack,) if stacked else ()
        return self.allocate(lead + stack + column.shape, column.dtype)

    def _outputs(self, arrays: Mapping[str, Array]) -> Outputs:
        return tuple(arrays.get(column.name) for column in self._schema.stored)

    def _further(self, arrays: Mapping[str, Array], after: Mapping[str, Array]) -> dict[str, Array]:
        names = [column.name for column in self._schema.further]
        return {name: arrays[name] for name in names} | {f"{name}_next": after[name] for name in names if name in after}

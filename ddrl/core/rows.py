"""Rows of experience and vectors of parameters: where each named array lies; and n-step transitions made of rows.

A row is one step of one episode (written by rollouts, moved by lanes and relays as bytes, read by replay). Its columns
are data: from a `RowSchema` follow the numpy dtype, the byte offsets, and the table that the C++ kernel takes. A new
column is one `Column` in the environment's spec, in the algorithm's declaration or in a chooser, and nowhere else.

`stream` names one environment of one rollout for the whole run: stream = rollout_index * num_envs + environment.
`step` counts from 0 within an episode, so a reader sees a new episode (step 0) and a gap (a dropped row) without any
other message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np

from ddrl.core.errors import CheckpointError, ConfigError
from ddrl.core.files import MAX_NAME, decode
from ddrl.core.specs import Array, ArraySpec, Bytes, Column, ColumnRole, EnvSpec, Ints

HEADER = (
    Column("policy_version", (), "uint64"),  # of the policy that acted
    Column("stream", (), "uint32"),
    Column("step", (), "uint32"),
    Column("kind", (), "uint32"),  # RowKind
)
STATE = "state"
MAX_COLUMNS = 60  # of a row, the header included
ROLES = list(ColumnRole)  # the kernel knows a role by its place here

TableEntry = tuple[str, int, int, int, str, list[int], int]


class RowKind(IntEnum):
    """What a row records."""

    STEP = 0  # state, the action taken in it, and the reward that followed
    TERMINATED = 1  # state is the final one of an episode that reached a terminal state
    TRUNCATED = 2  # state is the final one of an episode that was cut by a limit


@dataclass(frozen=True)
class RowSchema:
    """The columns of a row, in their order in memory; those of the observation are last.

    End rows (TERMINATED, TRUNCATED) carry the columns of role STATE; all others but the header are zero there."""

    columns: tuple[Column, ...]
    frame_stack: int = 1

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"a row cannot have two columns {name!r}: rename the one of the environment or algorithm"
                )
        if len(names) > MAX_COLUMNS:
            raise ConfigError(f"a row has {len(names)} columns, at most {MAX_COLUMNS} are possible")
        for column in self.columns:
            if column.array.nbytes == 0:
                raise ConfigError(f"column {column.name!r} of shape {column.shape} is empty: leave it out")
            if column.role is ColumnRole.REWARD and column.dtype != "float32":
                raise ConfigError(f"column {column.name!r} is a reward, which must be float32, not {column.dtype}")
            if column.role is ColumnRole.STATE and f"{column.name}_next" in names:
                raise ConfigError(f"'{column.name}_next' is what {column.name!r} is in the next state: rename it")

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Structured dtype of one row, 8-byte aligned."""
        columns = [(column.name, np.dtype(column.dtype), column.shape) for column in self.columns]
        packed = np.dtype(columns)
        padding = -packed.itemsize % 8
        return np.dtype([*columns, ("padding", np.uint8, (padding,))]) if padding else packed

    def column(self, name: str) -> Column:
        """The column of that name."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(f"rows have no column {name!r}; they have {', '.join(one.name for one in self.columns)}")

    def of(self, role: ColumnRole) -> tuple[Column, ...]:
        """The columns of one role, in order."""
        return tuple(column for column in self.columns if column.role is role)

    @property
    def observation(self) -> tuple[Column, ...]:
        """The columns of the observation: "state", or "state.<name>" for each of its named arrays."""
        return tuple(column for column in self.columns if _is_observation(column.name))

    @property
    def frame(self) -> ArraySpec:
        """What is recorded of an observation, as `EnvSpec.frame`."""
        first, *_ = columns = self.observation
        if first.name == STATE:
            return first.array
        return ArraySpec.record({self.array_name(column): column.array for column in columns})

    @staticmethod
    def array_name(column: Column) -> str:
        """What a column of the observation is called in it: "image" for "state.image"."""
        return column.name.partition(".")[2] or "observation"

    @property
    def stored(self) -> tuple[Column, ...]:
        """The columns that replay stores, in its order: observation, others of role STATE, action, reward,
        policy_version, the rest."""
        states = [column for column in self.further if column.role is ColumnRole.STATE]
        rest = [column for column in self.further if column.role is not ColumnRole.STATE]
        standard = [self.column(name) for name in ("action", "reward", "policy_version")]
        return (*self.observation, *states, *standard, *rest)

    @property
    def further(self) -> tuple[Column, ...]:
        """The columns beside header, reward, action and observation."""
        standard = {column.name for column in HEADER} | {"reward", "action"}
        return tuple(one for one in self.columns if one.name not in standard and not _is_observation(one.name))

    @property
    def table(self) -> list[TableEntry]:
        """The columns as the C++ kernel takes them: name, place of the role in `ROLES`, offset in a row, bytes, buffer
        format, shape, states that make one observation."""
        places: Any = self.dtype.fields
        return [
            (
                column.name,
                ROLES.index(column.role),
                places[column.name][1],
                column.array.nbytes,
                buffer_format(column.array.numpy),
                list(column.shape),
                self.frame_stack if _is_observation(column.name) else 1,
            )
            for column in self.columns
        ]


def row_schema(spec: EnvSpec, extra: Sequence[Column] = ()) -> RowSchema:
    """The rows of an environment, with the further columns of an algorithm or chooser."""
    return schema_of(
        spec.frame, spec.action, (*spec.columns, *extra), reward_shape=spec.reward_shape, frame_stack=spec.frame_stack
    )


def schema_of(
    frame: ArraySpec,
    action: ArraySpec,
    further: Sequence[Column] = (),
    *,
    reward_shape: tuple[int, ...] = (),
    frame_stack: int = 1,
) -> RowSchema:
    """The rows of steps with these arrays; `frame`: what is recorded of an observation."""
    for column in further:
        if _is_observation(column.name) or column.name == "padding":
            raise ConfigError(f"a further column cannot be called {column.name!r}: rename it")
    names = {STATE: frame} if not frame.fields else {f"{STATE}.{name}": array for name, array in frame.fields}
    return RowSchema(
        (
            *HEADER,
            Column("reward", reward_shape, "float32", ColumnRole.REWARD),
            Column("action", action.shape, action.dtype),
            *further,
            *(Column(name, array.shape, array.dtype, ColumnRole.STATE) for name, array in names.items()),
        ),
        frame_stack,
    )


def buffer_format(dtype: np.dtype[Any]) -> str:
    """The dtype as Python's buffers name it."""
    return memoryview(np.empty(0, dtype)).format  # pyright: ignore[reportArgumentType]  # numpy says so from Python 3.12 on


def _is_observation(name: str) -> bool:
    return name == STATE or name.startswith(f"{STATE}.")


ALIGNMENT = 64  # bytes; a cache line, and the widest vector load


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a parameter vector; `offset` in bytes."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ParameterLayout:
    """Manifest of a flat vector of parameters: every tensor begins at a 64-byte boundary. `nbytes` is the whole vector,
    padding included. Written by the learner, mapped by rollouts without a copy."""

    entries: tuple[TensorEntry, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: dict[str, tuple[tuple[int, ...], str]]) -> ParameterLayout:
        """Lay out {name: (shape, dtype)} in the order given."""
        entries: list[TensorEntry] = []
        offset = 0
        for name, (shape, dtype) in tensors.items():
            entry = TensorEntry(name, tuple(shape), np.dtype(dtype).name, offset)
            entries.append(entry)
            offset += entry.nbytes
            offset += -offset % ALIGNMENT
        return cls(tuple(entries), offset)

    def views(self, vector: Bytes) -> dict[str, Array]:
        """Every tensor as a view into `vector` (uint8, [nbytes]), without a copy."""
        if vector.nbytes != self.nbytes:
            raise CheckpointError(
                f"a parameter vector of {vector.nbytes} bytes does not fit the network's manifest of {self.nbytes} "
                "bytes: it is of another network; use a checkpoint of this one"
            )
        return {
            entry.name: vector[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def to_json(self) -> bytes:
        """The manifest as JSON; `from_json` reads it back."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ParameterLayout:
        """Read a manifest; anything else is refused."""
        what = "the parameter manifest is corrupt or was not written by ddrl"
        return decode(data, cls, CheckpointError, what)

    @property
    def digest(self) -> str:
        """Short hash of the manifest: equal digests mean interchangeable vectors."""
        return hashlib.blake2b(self.to_json(), digest_size=8).hexdigest()


Arrays = dict[str, Array]  # by the name of a column [m, *shape]


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
    """Takes the rows of any number of streams, in order, and gives each transition once, when it is complete.

    r_t = sum over j < k of discount^j r_{t+j}, discount_t = discount^k, or 0 where s_t is terminal; k = n_step, less
    where the episode ends sooner. Transitions that are not complete at a gap in `step`, or at `cut`, are lost. Used
    where no replay lies between rollout and learner (sample areas)."""

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

    def add(self, rows: Array) -> Arrays:
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
        last = breaks[np.searchsorted(breaks, place)]  # row of the unbroken run that each row is in
        reach = last - place
        ended = ~goes_on[last]
        complete = (reach >= self._n_step) | (ended & (reach > 0))
        newest = np.append(~same, True)[last]  # the run is its stream's newest
        self._rest = rows[~ended & newest & (reach < self._n_step)]
        return self._transitions(rows, np.flatnonzero(complete), np.minimum(reach, self._n_step)[complete])

    def _transitions(self, rows: Array, start: Ints, length: Ints) -> Arrays:
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

"""Lanes: rows from one producer to one consumer of a host, in order, each exactly once; and what is sent over them.

The producer (a rollout, or the root relay for one remote relay) pushes; the consumer (the trainer or a relay) pops,
usually many lanes at once through a `LaneSet`. A full lane makes the producer wait, which is counted. The ring is
ddrl/kernel/ring.hpp. A `StepWriter` makes rows of vector steps; a `MessageLane` carries messages in rows of its
own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ddrl import _kernel
from ddrl.channels.segment import Channel, Segment
from ddrl.channels.wire import Wire
from ddrl.core.errors import ChannelError
from ddrl.core.rows import RowSchema, buffer_format
from ddrl.core.specs import Array, Bytes

M = TypeVar("M")
N = TypeVar("N")

_DIGEST_NBYTES = 64  # the row's digest fills the payload's first cache line, the ring follows


def _digest(dtype: np.dtype[Any]) -> Bytes:
    return np.frombuffer(hashlib.blake2b(repr(dtype).encode(), digest_size=_DIGEST_NBYTES).digest(), np.uint8)


class Lane(Channel):
    """One end of a lane. Make it with `create` (the run) and `attach` (the other process); use each end from one thread
    at a time."""

    kind: ClassVar[str] = "lane"

    def __init__(self, segment: Segment, dtype: np.dtype[Any]) -> None:
        super().__init__(segment)
        self.dtype = dtype
        self.ring = _kernel.Ring(segment.array[_DIGEST_NBYTES:])
        self._bell: _kernel.Doorbell | None = None
        self.streams = 1  # environments whose rows it carries; 0: all lanes of a `LaneSet` share fairly

    @classmethod
    def create(cls, name: str | None, dtype: DTypeLike, capacity: int) -> Lane:
        """Make a lane of `capacity` rows. name None: private memory."""
        dtype = np.dtype(dtype)
        if capacity < 1 or dtype.itemsize < 1:
            raise ValueError(f"lane {name}: capacity ({capacity}) and row size ({dtype.itemsize}) must be at least 1")

        def initialize(array: Bytes) -> None:
            array[:_DIGEST_NBYTES] = _digest(dtype)
            _kernel.Ring.initialize(array[_DIGEST_NBYTES:], capacity, dtype.itemsize)

        nbytes = _DIGEST_NBYTES + _kernel.Ring.nbytes(capacity, dtype.itemsize)
        return cls(Segment.create(name, cls.kind, nbytes, initialize), dtype)

    @classmethod
    def attach(cls, name: str, dtype: DTypeLike) -> Lane:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map an existing lane; ChannelError where its rows are not of `dtype`."""
        segment = Segment.attach(name, cls.kind)
        dtype = np.dtype(dtype)
        if not np.array_equal(segment.array[:_DIGEST_NBYTES], _digest(dtype)):
            raise ChannelError(
                f"lane {name} carries other rows than {dtype}: all processes of a run need the same environment and "
                "ddrl"
            )
        return cls(segment, dtype)

    def push(self, rows: Array, timeout: float | None = None) -> int:
        """Append rows [n] of the lane's dtype, C-contiguous; returns how many were written.

        Fewer than n: the lane was closed, or `timeout` [s] (None: wait for ever) passed while it was full.
        """
        return self.ring.push(self._as_bytes(rows), timeout)

    def pop(self, out: Array) -> int:
        """Move the oldest rows into `out` [n]; returns how many. Never waits."""
        return self.ring.pop(self._as_bytes(out))

    def _as_bytes(self, rows: Array) -> Bytes:
        if (rows.dtype is not self.dtype and rows.dtype != self.dtype) or rows.ndim != 1 or not rows.flags.c_contiguous:
            raise ChannelError(
                f"lane {self.segment.name} takes contiguous rows [n] of {self.dtype}, got {rows.dtype} {rows.shape}"
            )
        return rows.view(np.uint8)

    def __len__(self) -> int:
        return self.ring.size

    @property
    def capacity(self) -> int:
        """Rows it holds."""
        return self.ring.capacity

    @property
    def pushed(self) -> int:
        """Rows ever pushed."""
        return self.ring.pushed

    @property
    def popped(self) -> int:
        """Rows ever popped."""
        return self.ring.popped

    @property
    def waits(self) -> int:
        """Times the producer had to wait."""
        return self.ring.waits

    @property
    def wait_seconds(self) -> float:
        """Time the producer waited [s]."""
        return self.ring.wait_seconds

    @property
    def closed(self) -> bool:
        """Whether `close` was called at either end."""
        return self.ring.closed

    @property
    def bell(self) -> _kernel.Doorbell | None:
        """Rung by this end after each push; None: no bell."""
        return self._bell

    @bell.setter
    def bell(self, bell: _kernel.Doorbell | None) -> None:
        self._bell = bell
        self.ring.set_bell(bell)

    def hand_over(self) -> None:
        """The producer's process was seen to end: make the lane ready for the next one. ChannelError where it was
        damaged.

        Until then that process was the only writer. A row becomes visible by one atomic store, after all its bytes, so
        the consumer never sees one that was not finished; those that were finished stay, and are used."""
        if not self.ring.hand_over():
            raise ChannelError(f"lane {self.segment.name} was damaged by the process that wrote it")

    def close(self) -> None:
        """End it for both ends: a waiting producer wakes, later pushes write nothing; rows inside can still be
        popped."""
        self.ring.close()


class LaneSet:
    """The consumer's ends of many lanes of one dtype, drained together."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)
        if len({lane.dtype for lane in self.lanes}) > 1:
            raise ChannelError("the lanes of a set must carry the same rows")
        self._set = _kernel.LaneSet([lane.ring for lane in self.lanes], [lane.streams for lane in self.lanes])

    def drain(self, out: Array) -> int:
        """Move rows of all lanes into `out` [n]; returns how many. Order is kept within each lane; never waits. Where
        there are more rows, lanes of some 32 environments share `out` fairly, and others get what these leave; another
        lane comes first after 512 rows for each environment of the one that did. What waits grows old, and the rows of
        a few that seldom wait are new. O(lanes + bytes)."""
        return self._set.drain(self.lanes[0]._as_bytes(out)) if self.lanes else 0  # pyright: ignore[reportPrivateUsage]

    @property
    def pending(self) -> int:
        """Rows in all lanes together."""
        return self._set.pending

    @property
    def popped(self) -> int:
        """Rows ever popped, all lanes together."""
        return sum(lane.popped for lane in self.lanes)

    @property
    def pushed(self) -> int:
        """Rows ever pushed, all lanes together."""
        return sum(lane.pushed for lane in self.lanes)

    @property
    def capacity(self) -> int:
        """Rows that all lanes together can hold."""
        return sum(lane.capacity for lane in self.lanes)

    def close(self) -> None:
        """Close every lane."""
        for lane in self.lanes:
            lane.close()


STEPS_OF_INCARNATION = 1 << 20  # between the first steps of a rollout's incarnations


class StepWriter(_kernel.StepWriter):
    """Records the environments `first_stream`, `first_stream` + 1, ... of one rollout; their number N is that of the
    first write.

    `write(state, action, reward, terminated, truncated, next_state, policy_version, columns=None, timeout=None) ->
    int`: one vector step, arrays [N, ...] of the schema's shapes and dtypes (observations stacked, reward float32,
    flags bool); returns the rows made. `columns` holds the schema's further columns by name; one of role STATE is
    also given as name_next, for the next state. Waits at a full lane until there is room, the lane is closed, or
    `timeout` [s] has passed; then `pending` rows wait here and `flush(timeout) -> bool` tries again (True: none is
    left); writing again before that is a ValueError. TypeError where an array does not fit.
    `cut()`: the environments were reset, the running episodes are over; the next write is step 0 of new ones.
    `incarnation`: of the process; the first episodes of another one than 0 begin at a step that no reader expects, so
    that they are never joined to those which its predecessor left.

    A reward or state that is NaN or infinite raises EnvError with `env_id`, the environment and the step, nothing
    written; with nonfinite="drop" the row is dropped instead, which leaves a gap in `step`, and counted
    (`nonfinite`)."""

    def __init__(
        self,
        lane: Lane,
        schema: RowSchema,
        first_stream: int,
        *,
        nonfinite: Literal["refuse", "drop"] = "refuse",
        env_id: str = "",
        incarnation: int = 0,
    ) -> None:
        if lane.dtype != schema.dtype:
            raise ChannelError(
                f"lane {lane.segment.name} carries {lane.dtype}, but {env_id or 'the schema'} makes rows {schema.dtype}"
            )
        if nonfinite not in ("refuse", "drop"):
            raise ValueError(f"nonfinite ({nonfinite!r}) must be 'refuse' or 'drop'")
        frame = schema.frame
        stack = [schema.frame_stack] if schema.frame_stack > 1 else []
        super().__init__(
            ring=lane.ring,
            row_nbytes=schema.dtype.itemsize,
            table=schema.table,
            observation=(buffer_format(frame.numpy), [*stack, *frame.shape]),
            stack=schema.frame_stack,
            first_stream=first_stream,
            env_id=env_id,
            drop_nonfinite=nonfinite == "drop",
            first_step=incarnation * STEPS_OF_INCARNATION % (1 << 32),
        )
        self.lane = lane
        self.schema = schema


PIECE = 1020  # bytes of a message that a row holds
ROWS = 1024
_ROW = np.dtype([("left", "<u4"), ("data", "u1", (PIECE,))])  # left: bytes of the message from this row on


class MessageLane(Generic[M]):
    """One end of a lane of messages. `create` for the run, `attach` for the other process; each end has one thread."""

    def __init__(self, lane: Lane, wire: Wire[M]) -> None:
        self._lane = lane
        self._wire = wire
        self._row = np.zeros(1, _ROW)
        self._begun = b""

    @classmethod
    def create(cls, name: str | None, wire: Wire[N]) -> MessageLane[N]:
        """Room for a MiB. name None: private memory."""
        return MessageLane(Lane.create(name, _ROW, ROWS), wire)

    @classmethod
    def attach(cls, name: str, wire: Wire[N]) -> MessageLane[N]:
        """Map an existing one."""
        return MessageLane(Lane.attach(name, _ROW), wire)

    def send(self, message: M, timeout: float = 0.0) -> bool:
        """Append a message; False where there is no room for it, or, with a `timeout`, not all of it was taken within
        so many seconds: the other end hangs."""
        data = self._wire.encode(message)
        rows = np.zeros(-(-len(data) // PIECE), _ROW)
        if not timeout and self._lane.capacity - len(self._lane) < len(rows):
            return False
        rows["left"] = len(data) - PIECE * np.arange(len(rows))
        padded = np.zeros(PIECE * len(rows), np.uint8)
        padded[: len(data)] = data
        rows["data"] = padded.reshape(-1, PIECE)
        return self._lane.push(rows, timeout) == len(rows)

    def receive(self) -> list[M]:
        """The messages that are there, oldest first; never waits."""
        messages: list[M] = []
        while self._lane.pop(self._row):
            left = int(self._row["left"][0])
            self._begun += self._row["data"][0, : min(left, PIECE)].tobytes()
            if left <= PIECE:
                messages.append(self._wire.decode(self._begun))
                self._begun = b""
        return messages

    @property
    def pending(self) -> bool:
        """Whether something is there."""
        return len(self._lane) > 0

    @property
    def bell(self) -> _kernel.Doorbell | None:
        """Rung by this end after each message; None: no bell."""
        return self._lane.bell

    @bell.setter
    def bell(self, bell: _kernel.Doorbell | None) -> None:
        self._lane.bell = bell

    def unlink(self) -> None:
        """Remove its name."""
        self._lane.unlink()

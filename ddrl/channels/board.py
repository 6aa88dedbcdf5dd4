"""A host's board (command, values, doorbells), blobs (bytes written once), and the table of counters.

The board's command and values are written by one process of the host (the trainer on its own, the relay on the others)
and read by all. It also holds two slots for short messages between the trainer and the root relay. Of the counters each
process writes its own row with plain stores; telemetry reads whole tables. A value that was never stored is NaN. A
relay mirrors the table of another host by `load`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar

import numpy as np

from ddrl import _kernel
from ddrl._kernel import Doorbell
from ddrl.channels.segment import Channel, Segment
from ddrl.channels.wire import aligned
from ddrl.core.metrics import COLUMNS
from ddrl.core.specs import Array, Bytes, Floats

_LINE = 64
_BELLS = 5  # of the command, of readiness, of the trainer, the relay and the rollouts
_NUM_VALUES = 16
KEEPER = 0  # of the values: process id of the keeper of the trainer's host
PROCESSES = 1  # rollouts wanted on each host, by command; NaN: as the settings say
# What a trainer leaves for the next one of the same job:
BEGAN = 2  # when the run began, earlier parts of a resumed one counted [s, CLOCK_MONOTONIC]
JUDGED = 3  # version of the newest evaluation that was recorded
WORSE_SINCE = 4  # evaluations since the best one
TAKEN = 5  # rows taken from lanes before this job began
LEFT = 6  # rows written before it that were never taken
_SLOT_BYTES = 1 << 16  # a plan has a host and two rates for each one: up to five thousand
_VALUES_AT = _LINE * _BELLS
_SLOTS_AT = _VALUES_AT + 8 * _NUM_VALUES
_NBYTES = _SLOTS_AT + 2 * _SLOT_BYTES


class Command(IntEnum):
    """What the processes of a host shall do."""

    RUN = 0
    PAUSE = 1
    STOP = 2
    FAIL = 3  # stop, because a process of this job failed


class Slot:
    """A short message from one process of the host to others; the newest replaces the last.

    One writer. Memory: checksum, number and length, each uint64, then the bytes. The checksum covers everything behind
    it, so a reader gets a whole message or none."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._head = memory[:24].view(np.uint64)
        self._data = memory[24:]

    def write(self, data: bytes) -> None:
        """Replace the message; ValueError where it is too long."""
        if len(data) > len(self._data):
            raise ValueError(f"a message of {len(data)} bytes does not fit into a slot of {len(self._data)}")
        self._data[: len(data)] = np.frombuffer(data, np.uint8)
        self._head[1] += 1
        self._head[2] = len(data)
        self._head[0] = _kernel.checksum(self._memory[8 : 24 + len(data)])

    def read(self, after: int = 0) -> tuple[int, bytes] | None:
        """Number and bytes of the newest message, if its number is above `after`; None also while it is written."""
        if self._head[1] <= after:
            return None
        copy = self._memory.copy()
        check, number, length = copy[:24].view(np.uint64).tolist()
        if length > len(self._data) or _kernel.checksum(copy[8 : 24 + length]) != check:
            return None
        return number, copy[24 : 24 + length].tobytes()


def _doorbells(array: Bytes, *, fresh: bool) -> list[Doorbell]:
    return [Doorbell(array[_LINE * i : _LINE * (i + 1)], fresh) for i in range(_BELLS)]


class Board(Channel):
    """One per host. `values` float64 [16]: gauges for everyone on the host, NaN until written. `wish`: what the trainer
    wants of the root relay, or why a broadcast without a run has failed; `plan`: by which plan the root relay sends
    models."""

    kind: ClassVar[str] = "board"

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        array = segment.array
        bells = _doorbells(array, fresh=False)
        self._command, self._ready, self.trainer_bell, self.relay_bell, self.rollout_bell = bells
        self.values: Floats = array[_VALUES_AT:_SLOTS_AT].view(np.float64)
        self.wish, self.plan = map(Slot, np.split(array[_SLOTS_AT:], 2))

    @classmethod
    def create(cls, name: str | None) -> Board:
        """Make a board: command RUN, nothing ready. name None: private memory."""

        def initialize(array: Bytes) -> None:
            _doorbells(array, fresh=True)
            array[_VALUES_AT:_SLOTS_AT].view(np.float64)[:] = np.nan
            array[_SLOTS_AT:] = 0  # slots that were never written

        return cls(Segment.create(name, cls.kind, _NBYTES, initialize))

    @property
    def command(self) -> Command:
        """What to do; setting it rings all bells."""
        return Command(self._command.value)

    @command.setter
    def command(self, command: Command) -> None:
        self._command.set(int(command))
        for bell in (self.trainer_bell, self.relay_bell, self.rollout_bell):
            bell.ring()

    def wait_command(self, other_than: Command, timeout: float | None) -> Command:
        """Wait until the command differs from `other_than`, at most `timeout` [s]; returns the command."""
        return Command(self._command.wait(int(other_than), timeout))

    @property
    def ready(self) -> int:
        """Stage of start-up that the host has reached, from 0; it only grows."""
        return self._ready.value

    @ready.setter
    def ready(self, stage: int) -> None:
        self._ready.set(stage)

    def wait_ready(self, stage: int, timeout: float | None) -> bool:
        """Wait until the host has reached `stage`, at most `timeout` [s]; returns whether it has."""
        return self._ready.wait_at_least(stage, timeout)


class Blob(Channel):
    """Bytes written once, read by every process of the host (the acting network and its manifest)."""

    kind: ClassVar[str] = "blob"

    @classmethod
    def create(cls, name: str | None, data: bytes) -> Blob:
        """Make it; it appears under its name with all its bytes. name None: private memory."""

        def initialize(array: Bytes) -> None:
            array[:8].view(np.uint64)[0] = len(data)
            array[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)

        return cls(Segment.create(name, cls.kind, 8 + len(data), initialize))

    def read(self) -> bytes:
        """A copy of the bytes."""
        length = int(self.segment.array[:8].view(np.uint64)[0])
        return self.segment.array[8 : 8 + length].tobytes()


# ---- Counters ----


class CounterRow(dict[str, _kernel.Counter]):
    """One row by column name: row["env_steps"].add(8). Keep the Counter where every nanosecond counts."""

    def __init__(self, table: Floats, row: int, columns: dict[str, int]) -> None:
        super().__init__()
        self._table = table
        self._row = row
        self._columns = columns

    def __missing__(self, name: str) -> _kernel.Counter:
        if name not in self._columns:
            raise KeyError(f"no counter {name!r}; ddrl.core.metrics lists them")
        counter = self[name] = _kernel.Counter(self._table, self._row, self._columns[name])
        return counter

    def clear(self, *kept: str) -> None:
        """Its process was seen to end, and the next one counts from nothing; but for these columns."""
        for name in self._columns:
            if name not in kept:
                self[name].set(float("nan"))


class Counters(Channel):
    """A host's table [rows, columns], which holds the names of its columns."""

    kind: ClassVar[str] = "counters"

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        header = segment.array[:24].view(np.uint64)
        self.rows, offset, length = (int(value) for value in header)
        self.columns: tuple[str, ...] = tuple(json.loads(bytes(segment.array[24 : 24 + length])))
        self._index = {name: column for column, name in enumerate(self.columns)}
        count = self.rows * len(self.columns)
        self._table: Floats = (
            segment.array[offset : offset + 8 * count].view(np.float64).reshape(self.rows, len(self.columns))
        )

    @classmethod
    def create(cls, name: str | None, rows: int, columns: Sequence[str] = COLUMNS) -> Counters:
        """Make a table, all NaN. name None: private memory."""
        names = json.dumps(list(columns)).encode()
        offset = aligned(24 + len(names))

        def initialize(array: Bytes) -> None:
            array[:24].view(np.uint64)[:] = (rows, offset, len(names))
            array[24 : 24 + len(names)] = np.frombuffer(names, np.uint8)
            array[offset:].view(np.float64)[:] = np.nan

        return cls(Segment.create(name, cls.kind, offset + 8 * rows * len(columns), initialize))

    def row(self, index: int) -> CounterRow:
        """The counters of row `index`; only their process writes them."""
        if not 0 <= index < self.rows:
            raise IndexError(f"counters {self.segment.name} have rows 0 .. {self.rows - 1}, not {index}")
        return CounterRow(self._table, index, self._index)

    def table(self) -> Floats:
        """A copy of the whole table, [rows, columns]; each value is whole, the table is no snapshot."""
        out = np.empty_like(self._table)
        _kernel.read_table(out, self._table)
        return out

    def change(self, places: Array, values: Floats) -> None:
        """Overwrite the values at `places`, ascending, counted row by row (a mirror of another host's table)."""
        table = self.table()
        if places.size and places[-1] >= table.size:
            raise ValueError(f"counters {self.segment.name} are {table.shape}, which has no place {places[-1]}")
        table.reshape(-1)[places] = values
        _kernel.store_table(self._table, table)

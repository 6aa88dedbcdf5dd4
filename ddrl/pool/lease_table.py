"""The shared memory in which tasks ask for devices and the pool's master answers: one segment a host.

One slot a task, five lines of 64 bytes; every word has one writer.

| line | writer | what |
|---|---|---|
| name | master | the task's name, UTF-8 |
| request | task | doorbell: odd n wants or holds lease n, n + 1 gives it back; only grows |
| wish | task | process id and start time, round, part, rounds remaining, time of the request, busy and held seconds |
| grant | master | doorbell: n when lease n was answered |
| answer | master | device, time of the answer, refusal |

A writer fills the line, then rings: a doorbell's store and load are sequentially consistent, so a reader that sees the
number sees the line. No lock is ever held while a task has or awaits a device, so a task can be killed anywhere."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ddrl._kernel import Doorbell
from ddrl.channels.segment import Segment
from ddrl.core.errors import PoolError

KIND = "leases"
_LINE = 64
_SLOT = 5 * _LINE
WISH = np.dtype(
    [
        ("pid", "<u8"),
        ("started", "<u8"),
        ("round", "<i8"),
        ("part", "<i8"),
        ("remaining", "<f8"),
        ("asked", "<f8"),
        ("busy", "<f4", (2,)),  # of lease n in [n // 2 % 2]: the next one may begin before the master reads this one
        ("held", "<f4", (2,)),  # likewise: seconds from the grant to the give-back
    ]
)
ANSWER = np.dtype([("device", "<i8"), ("at", "<f8"), ("refusal", "<i8")])


class Refusal(IntEnum):
    """Why a request gets no device."""

    NONE = 0
    NO_DEVICE = 1
    CANCELLED = 2


class Slot:
    """One task's lines; `wish` and `answer` are views, structured, shape ()."""

    def __init__(self, memory: NDArray[np.uint8], *, fresh: bool = False) -> None:
        lines = [memory[_LINE * line : _LINE * (line + 1)] for line in range(5)]
        self._name = lines[0]
        self.request = Doorbell(lines[1], fresh)
        self.wish = lines[2][: WISH.itemsize].view(WISH)[0:1].reshape(())
        self.grant = Doorbell(lines[3], fresh)
        self.answer = lines[4][: ANSWER.itemsize].view(ANSWER)[0:1].reshape(())
        if fresh:
            self._name[:] = 0
            self.wish[()] = np.zeros((), WISH)
            self.answer[()] = np.zeros((), ANSWER)

    @property
    def name(self) -> str:
        """The task's name; empty: the slot is free."""
        return self._name.tobytes().rstrip(b"\0").decode()

    @name.setter
    def name(self, name: str) -> None:
        data = name.encode()
        if len(data) > _LINE:
            raise PoolError(f"the task name '{name}' is longer than {_LINE} bytes: give it a shorter one")
        self._name[:] = np.frombuffer(data.ljust(_LINE, b"\0"), np.uint8)

    @property
    def owner(self) -> tuple[int, int]:
        """Process id (0: none) and start time of the task's process."""
        return int(self.wish["pid"]), int(self.wish["started"])


class LeaseTable:
    """The slots and the master's bell."""

    def __init__(self, segment: Segment, *, fresh: bool = False) -> None:
        self.segment = segment
        self.bell = Doorbell(segment.array[:_LINE], fresh)
        count = (segment.nbytes - _LINE) // _SLOT
        begins = [_LINE + _SLOT * index for index in range(count)]
        self.slots = [Slot(segment.array[begin : begin + _SLOT], fresh=fresh) for begin in begins]

    @classmethod
    def create(cls, name: str | None, slots: int) -> LeaseTable:
        """Make a table of free slots. name None: private memory."""

        def initialize(array: NDArray[np.uint8]) -> None:
            Doorbell(array[:_LINE], True)
            for begin in range(_LINE, len(array), _SLOT):
                Slot(array[begin : begin + _SLOT], fresh=True)

        return cls(Segment.create(name, KIND, _LINE + slots * _SLOT, initialize))

    @classmethod
    def attach(cls, name: str) -> LeaseTable:
        """Map an existing table."""
        return cls(Segment.attach(name, KIND))

    def find(self, task: str) -> Slot:
        """The slot of a task by name. PoolError where there is none."""
        for slot in self.slots:
            if slot.name == task:
                return slot
        known = ", ".join(slot.name for slot in self.slots if slot.name)
        raise PoolError(f"there is no task '{task}' in this pool; its tasks are: {known or 'none yet'}")

"""Messages from one process of a host to another: byte strings in order, each exactly once, in rows of a lane."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddrl import _kernel
from ddrl.channels.lane import Lane
from ddrl.core.errors import ChannelError

PIECE = 1020  # bytes of a message that a row holds
ROWS = 1024
_ROW = np.dtype([("left", "<u4"), ("data", "u1", (PIECE,))])  # left: bytes of the message from this row on


class MessageLane:
    """One end of it. `create` for the run, `attach` for the other process; each end has one thread."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._row = np.zeros(1, _ROW)
        self._begun = b""

    @classmethod
    def create(cls, name: str | None) -> MessageLane:
        """Room for a MiB. name None: private memory."""
        return cls(Lane.create(name, _ROW, ROWS))

    @classmethod
    def attach(cls, name: str) -> MessageLane:
        """Map an existing one."""
        return cls(Lane.attach(name, _ROW))

    def push(self, message: bytes, timeout: float) -> None:
        """Append a message of at least one byte; ChannelError where there is no room for it within `timeout` [s]."""
        rows = np.zeros(_rows(message), _ROW)
        rows["left"] = len(message) - PIECE * np.arange(len(rows))
        rows["data"] = np.frombuffer(message.ljust(PIECE * len(rows), b"\0"), np.uint8).reshape(-1, PIECE)
        if self._lane.push(rows, timeout) < len(rows):
            raise ChannelError(f"nobody takes messages from {self._lane.segment.name} for {timeout:.0f} s")

    def has_room(self, message: bytes) -> bool:
        """Whether `push` would not wait."""
        return self._lane.capacity - len(self._lane) >= _rows(message)

    def pop(self) -> Iterator[bytes]:
        """The messages that are there, oldest first; never waits."""
        while self._lane.pop(self._row):
            left = int(self._row["left"][0])
            self._begun += self._row["data"][0, : min(left, PIECE)].tobytes()
            if left <= PIECE:
                message = self._begun
                self._begun = b""
                yield message

    @property
    def pending(self) -> bool:
        """Whether something is there."""
        return len(self._lane) > 0

    @property
    def bell(self) -> _kernel.Doorbell | None:
        """Rung by this end after each push; None: nobody."""
        return self._lane.bell

    @bell.setter
    def bell(self, bell: _kernel.Doorbell | None) -> None:
        self._lane.bell = bell

    def unlink(self) -> None:
        """Remove its name."""
        self._lane.unlink()


def _rows(message: bytes) -> int:
    return -(-len(message) // PIECE)

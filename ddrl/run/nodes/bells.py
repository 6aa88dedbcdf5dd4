"""Doorbells of the leader and of the nodes on its host, in shared memory: who sends a message rings, who waits sleeps.

MPI wakes nobody where messages go through shared memory, and looking for them again and again takes processor time from
the nodes that are waited for. MPI may hold a message back until its sender looks again: so every sleep has an end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ddrl.channels import Doorbell
from ddrl.channels.segment import Segment

BELLS_SEGMENT = "bells"
MakeSegment = Callable[[str, int], Segment]  # from its kind and the bytes of its payload
_LINE = 64


class Bells:
    """One for each rank of the communicator, the leader's first."""

    def __init__(self, segment: Segment, ranks: int, *, fresh: bool = False) -> None:
        self.name = segment.name or ""
        self._memory: NDArray[np.uint8] = segment.array
        self._bells = [Doorbell(self._memory[_LINE * rank : _LINE * (rank + 1)], fresh) for rank in range(ranks)]

    @classmethod
    def create(cls, make: MakeSegment, ranks: int) -> Bells:
        """The leader's. ChannelError where there is no room."""
        return cls(make(BELLS_SEGMENT, _LINE * ranks), ranks, fresh=True)

    @classmethod
    def attach(cls, name: str, ranks: int) -> Bells:
        """A node's. ChannelError where it cannot be mapped."""
        return cls(Segment.attach(name, BELLS_SEGMENT), ranks)

    def __getitem__(self, rank: int) -> Doorbell:
        return self._bells[rank]

"""The leader's messages to and from its nodes: what is under way is kept until it has arrived, or its node is dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.board import CounterRow
from ddrl.distribution.waits import rest
from ddrl.run.nodes.bells import Bells
from ddrl.run.nodes.messages import VECTOR, receive

if TYPE_CHECKING:
    from mpi4py import MPI


class Post:
    """Node i is rank i + 1 of `comm`. `bells`, set later: shared with the nodes of this host. `counters`: of bytes."""

    def __init__(self, comm: MPI.Comm, counters: CounterRow | None) -> None:
        self._comm = comm
        self._counters = counters
        self.bells: Bells | None = None
        self._sending: list[tuple[MPI.Request, Any, int]] = []  # with what is being sent, and to whom
        self._abandoned: list[tuple[MPI.Request, Any]] = []  # messages of dead nodes, and their memory

    def send(self, node: int, data: NDArray[np.uint8], tag: int) -> None:
        """Begin to send; `data` must not change until it has arrived."""
        self.under_way()
        self._sending.append((self._comm.Isend(data, node + 1, tag), data, node))
        if self.bells is not None:
            self.bells[node + 1].ring()
        self._count("bytes_sent", data)

    def under_way(self) -> int:
        """Messages that have not arrived."""
        self._sending = [message for message in self._sending if not message[0].Test()]
        return len(self._sending)

    def receive(self) -> tuple[int, NDArray[np.uint8]] | None:
        """A node's next message, and which node's; None: there is none."""
        from mpi4py import MPI

        received = receive(self._comm, MPI.ANY_SOURCE)
        if received is None:
            return None
        self._count("bytes_received", received[1])
        return received[0] - 1, received[1]

    def take(self, node: int, vector: NDArray[np.uint8], alive: Callable[[], bool]) -> bool:
        """Wait for the vector that follows a gradient's message; False where the node died before it came."""
        request = self._comm.Irecv(vector, node + 1, VECTOR)
        while not request.Test():
            if not alive():
                self._abandoned.append((request, vector))
                return False
        self._count("bytes_received", vector)
        return True

    def forget(self, node: int) -> None:
        """The node is dead: stop to wait for messages to it. Their memory stays, for MPI may still read it."""
        self._abandoned += [(request, data) for request, data, whom in self._sending if whom == node]
        self._sending = [message for message in self._sending if message[2] != node]

    def rung(self) -> int:
        """A number that changes when a node rings."""
        return self.bells[0].value if self.bells is not None else 0

    def sleep(self, rung: int, begun: float, longest: float, everybody_rings: bool) -> None:
        """Until a node has rung since `rung`, at most `longest` [s]; a share of the time since `begun`
        (time.perf_counter) where one may not."""
        # MPI moves what is under way only while somebody looks; nodes of other hosts do not ring.
        if self.bells is None or self.under_way() or not everybody_rings:
            rest(begun, longest=longest)
        else:
            self.bells[0].wait(rung, longest)

    def _count(self, name: str, data: NDArray[np.uint8]) -> None:
        if self._counters is not None:
            self._counters[name].add(data.nbytes)

"""A post of small messages that never blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.distribution.relay.control import MAX_BYTES, Message, decode, encode
from ddrl.distribution.transport.requests import Posted

if TYPE_CHECKING:
    from mpi4py import MPI


class Post:
    """Sends small messages to `peers`, ranks of a communicator, under `out_tag`, and receives theirs under `tag`."""

    def __init__(self, comm: MPI.Comm, tag: int, peers: Sequence[int], *, out_tag: int) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._tag = tag
        self._out_tag = out_tag
        self._mpi = MPI
        self._peers = list(peers)
        self._buffers: list[NDArray[np.uint8]] = [np.empty(MAX_BYTES, np.uint8) for _ in self._peers]
        self._receives: list[Any] = [
            comm.Irecv(buffer, peer, tag) for buffer, peer in zip(self._buffers, self._peers, strict=True)
        ]
        self._sends: list[Any] = []
        self._sent: list[bytes] = []  # kept alive beside `_sends`
        self.bytes_sent = self.bytes_received = 0

    def posted(self) -> Posted:
        """Requests that stand."""
        return Posted(self._receives, self._sends, [*self._buffers, *self._sent])

    @property
    def idle(self) -> bool:
        """Whether all sends have been taken by MPI."""
        return not self._sends

    def send(self, peer: int, message: Message) -> None:
        """Hand a message to MPI; its bytes are kept until MPI has taken them."""
        data = encode(message)
        self._sends.append(self._comm.Isend([data, self._mpi.BYTE], peer, self._out_tag))
        self._sent.append(data)
        self.bytes_sent += len(data)

    def send_all(self, message: Message) -> None:
        """The same message to every peer."""
        for peer in self._peers:
            self.send(peer, message)

    def receive(self) -> list[tuple[int, Message]]:
        """Messages since the last call, (rank, message); also lets sends go on."""
        if self._sends:
            taken = self._mpi.Request.Testsome(self._sends)
            for index in sorted(taken or (), reverse=True):
                self._sends.pop(index)
                self._sent.pop(index)
        received: list[tuple[int, Message]] = []
        while self._receives:
            statuses: list[Any] = []
            indices: list[int] = self._mpi.Request.Testsome(self._receives, statuses) or []
            if not indices:
                break
            for index, status in zip(indices, statuses, strict=False):
                length = status.Get_count(self._mpi.BYTE)
                data = bytes(self._buffers[index][:length])
                self._receives[index] = self._comm.Irecv(self._buffers[index], self._peers[index], self._tag)
                self.bytes_received += length
                received.append((self._peers[index], decode(data)))
        return received

    def close(self) -> None:
        """Wait until all sends are through and withdraw the receives."""
        self._mpi.Request.Waitall(self._sends)
        for request in self._receives:
            request.Cancel()
        self._mpi.Request.Waitall(self._receives)
        self._sends = []
        self._sent = []
        self._receives = []

"""Small messages between the root and the other relays: what they say, and a post that never blocks.

Root to relay: `State` (what the board says), `NewPlan`, `Measure`, `Goodbye`. Relay to root: `Ready`, `Confirm`,
`Failed`, `Finished`. Packed by msgspec, so a message that is not ours is refused; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import MessageError

if TYPE_CHECKING:
    from mpi4py import MPI


class State(msgspec.Struct, tag="state"):
    """The root's board: the command and its values."""

    command: int
    values: list[float]


class NewPlan(msgspec.Struct, tag="plan"):
    """From model 0 of this epoch on, this plan: a scheme by name with its settings."""

    epoch: int
    scheme: str
    nbytes: int
    versions_in_flight: int
    parameters: dict[str, Any]


class Measure(msgspec.Struct, tag="measure"):
    """No model is under way: measure the links together, then await a plan."""


class Goodbye(msgspec.Struct, tag="goodbye"):
    """Nothing more will come: end."""


class Ready(msgspec.Struct, tag="ready"):
    """The plan of this epoch stands here, its first receives are posted."""

    epoch: int


class Confirm(msgspec.Struct, tag="confirm"):
    """A model has ended on this host: sealed (and taken by its rollouts, where that is asked), or refused with
    `problem`."""

    epoch: int
    sequence: int
    version: int
    problem: str
    seconds: float


class Failed(msgspec.Struct, tag="failed"):
    """A process of this host has failed; the job must end."""

    text: str


class Finished(msgspec.Struct, tag="finished"):
    """This host has sent its last row and its last table."""

    rows: int
    tables: int


Message = State | NewPlan | Measure | Goodbye | Ready | Confirm | Failed | Finished
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
POST_BYTES = 1 << 16  # longest message


class Post:
    """Sends small messages to some ranks of a communicator under `out_tag`, and receives from them under `tag`."""

    def __init__(
        self, comm: MPI.Comm, tag: int, peers: Sequence[int], *, out_tag: int, receive_bytes: int = POST_BYTES
    ) -> None:
        from mpi4py import MPI

        self._comm, self._tag, self._out_tag, self._mpi, self._peers = comm, tag, out_tag, MPI, list(peers)
        self._buffers: list[NDArray[np.uint8]] = [np.empty(receive_bytes, np.uint8) for _ in self._peers]
        self._receives: list[Any] = [
            comm.Irecv(buffer, peer, tag) for buffer, peer in zip(self._buffers, self._peers, strict=True)
        ]
        self._sends: list[Any] = []
        self._sent: list[bytes] = []  # kept alive beside `_sends`
        self.bytes_sent = self.bytes_received = 0

    @property
    def idle(self) -> bool:
        """Whether all sends have been taken by MPI."""
        return not self._sends

    def send(self, peer: int, message: Message) -> None:
        """Hand a message to MPI; its bytes are kept until it has gone."""
        data = _encoder.encode(message)
        self._sends.append(self._comm.Isend([data, self._mpi.BYTE], peer, self._out_tag))
        self._sent.append(data)
        self.bytes_sent += len(data)

    def send_all(self, message: Message) -> None:
        """The same message to every peer."""
        for peer in self._peers:
            self.send(peer, message)

    def receive(self) -> list[tuple[int, Message]]:
        """What has come since the last call, (rank, message); also lets sends go on."""
        if self._sends:
            gone = self._mpi.Request.Testsome(self._sends)
            for index in sorted(gone or (), reverse=True):
                self._sends.pop(index)
                self._sent.pop(index)
        come: list[tuple[int, Message]] = []
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
                try:
                    come.append((self._peers[index], _decoder.decode(data)))
                except msgspec.DecodeError as error:
                    raise MessageError(
                        f"relay {self._comm.rank} got a message of {length} bytes from relay {self._peers[index]} that "
                        f"it does not know ({error}): all relays must run the same ddrl"
                    ) from None
        return come

    def close(self) -> None:
        """Wait until all sends are through and withdraw the receives."""
        self._mpi.Request.Waitall(self._sends)
        for request in self._receives:
            request.Cancel()
        self._mpi.Request.Waitall(self._receives)
        self._sends, self._sent, self._receives = [], [], []

"""A relay among all relays: it joins, and it leaves with the others, in order or because one of them has failed.

Used as a context: an error raised inside is sent to every other relay, all of them withdraw what they have posted in
MPI, and the error goes on upwards. On the others `RelayFailed` is raised wherever they are, with the text of the first
one, so that a failure at any time, while links are measured and plans are made included, ends all of them within
seconds and leaves no memory to MPI that is freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import DdrlError, JobFailed, MessageError
from ddrl.distribution.requests import Exchange, Part, Posted, withdraw

if TYPE_CHECKING:
    from mpi4py import MPI


# -- control -----------------------------------------------------------------------------------------------------------
# Small messages between the root and the other relays, and between the root relay and its trainer.
#
# Root to relay: `State` (of the board), `NewPlan`, `Measure`, `Orders`, `Goodbye`. Relay to root: `Ready`, `Confirm`,
# `Report`, `MemberFailed`, `Finished`. Either way: `Failed`. Between trainer and root relay, in slots of their board:
# `SchemeWish`, `PlanInForce`; by message lanes: `Orders`, `Report`. Packed by msgspec, so a message that is not ours is
# refused; nothing is unpickled.


class State(msgspec.Struct, tag="state"):
    """The root's board: the command and its values. `models`: how many the root has sent by the plan in force, once the
    command is STOP or FAIL, after which it sends no more."""

    command: int
    values: list[float]
    models: int


class NewPlan(msgspec.Struct, tag="plan"):
    """From model 0 of this epoch on, this plan: a scheme by its reference, with its parameters."""

    epoch: int
    scheme: str
    nbytes: int
    versions_in_flight: int
    parameters: dict[str, Any]


class Measure(msgspec.Struct, tag="measure"):
    """No model is under way: measure the links together, then await a plan."""


class Orders(msgspec.Struct, tag="orders"):
    """From the trainer to the starter of a host's collectors: a line."""

    host: int
    line: bytes


class Report(msgspec.Struct, tag="report"):
    """From the starter of a host's collectors to the trainer: a line. sent: by `clock`, that of the host; received: by
    the root's [s, CLOCK_MONOTONIC]."""

    host: int
    line: bytes
    clock: str
    sent: float
    received: float = 0.0


class Goodbye(msgspec.Struct, tag="goodbye"):
    """Nothing more is sent: end."""


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


class MemberFailed(msgspec.Struct, tag="member_failed"):
    """A process of this host has failed; the job must end, and its relays end it in order."""

    text: str


class Finished(msgspec.Struct, tag="finished"):
    """This host has sent its last row and its last table."""

    rows: int
    tables: int


class Failed(msgspec.Struct, tag="failed"):
    """This relay, or one that sent it this message, cannot go on: withdraw everything at once."""

    text: str


class SchemeWish(msgspec.Struct, tag="scheme_wish"):
    """The scheme to use from the next version on."""

    scheme: str


class PlanInForce(msgspec.Struct, tag="plan_in_force"):
    """By which plan the root relay sends models: `shards` hosts that the root itself sends to, `chunk_bytes` of the
    largest piece, `bound_seconds` by the links measured (None: not measured)."""

    epoch: int
    scheme: str
    shards: int
    chunk_bytes: int
    bound_seconds: float | None


Message = State | NewPlan | Measure | Orders | Goodbye | Ready | Confirm | Report | MemberFailed | Finished | Failed
Note = SchemeWish | PlanInForce
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
MAX_BYTES = 1 << 16  # of a message
MAX_TEXT = MAX_BYTES // 4 - 64  # letters of a failure's text: at most 4 bytes each


def encode(message: Message | Note) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """A relay's message; MessageError for anything else."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MessageError(
            f"a message of {len(data)} bytes between relays is not known ({error}): all must run the same ddrl"
        ) from None


def decode_wish(data: bytes) -> SchemeWish:
    """What `encode` made of it."""
    return msgspec.msgpack.decode(data, type=SchemeWish)


def decode_plan(data: bytes) -> PlanInForce:
    """What `encode` made of it."""
    return msgspec.msgpack.decode(data, type=PlanInForce)


# -- post --------------------------------------------------------------------------------------------------------------
# A post of small messages that never blocks.


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


# -- membership --------------------------------------------------------------------------------------------------------

TAG_DOWN = 1
TAG_UP = 2
TAG_TABLE = 3
TAG_BLOCK = 4
TAG_EXCHANGE = 5
POLL_PERIOD = 0.01  # s, between polls of the post while others are waited for


class RelayFailed(JobFailed):
    """Another relay has failed; the text is its own."""


def describe_relay(error: BaseException) -> str:
    """The text of an error that other relays get, unless the relay is given another function."""
    return str(error) if isinstance(error, DdrlError) else f"{type(error).__name__}: {error}"


class Membership:
    """Rank 0 of `comm` is the root. Making one is collective. `data` and `control` are communicators of its own."""

    def __init__(self, comm: MPI.Comm, describe: Callable[[BaseException], str] = describe_relay) -> None:
        self.rank = comm.rank
        self.hosts = comm.size - 1
        self.data = comm.Dup()
        self.control = comm.Dup()
        self._describe = describe
        self._left = False
        self._next_poll = 0.0
        self._unread: list[tuple[int, Message]] = []
        self._parts: list[Part] = []
        root = self.rank == 0
        self.post = Post(
            self.control,
            TAG_UP if root else TAG_DOWN,
            range(1, comm.size) if root else [0],
            out_tag=TAG_DOWN if root else TAG_UP,
        )
        self.keep(self.post)
        self.exchange = Exchange(self.control, self, TAG_EXCHANGE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._give_up(error)
            return
        try:
            self.leave()
        except BaseException as late:
            self._give_up(late)
            raise

    # -- whose requests stand (`transport.requests.Guard`)

    def keep(self, part: Part) -> None:
        """`part` posts requests from now on."""
        self._parts.append(part)

    def drop(self, part: Part) -> None:
        """All of its requests have ended."""
        self._parts.remove(part)

    def poll(self) -> None:
        """Raise RelayFailed where another relay has failed."""
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_PERIOD
            self._read()

    def messages(self) -> list[tuple[int, Message]]:
        """Messages since the last call, (rank, message). RelayFailed where another relay has failed."""
        self._read()
        unread = self._unread
        self._unread = []
        return unread

    def _read(self) -> None:
        for rank, message in self.post.receive():
            if isinstance(message, Failed):
                raise RelayFailed(message.text)
            self._unread.append((rank, message))

    # -- the end

    def leave(self) -> None:
        """In order, once every model and row has ended everywhere: wait for all others, then free what is ours."""
        if self._left:
            return
        self.exchange.barrier()
        self._left = True
        self.post.close()
        self.data.Free()
        self.control.Free()

    def _give_up(self, error: BaseException) -> None:
        self.abandon(str(error) if isinstance(error, RelayFailed) else self._describe(error))

    def abandon(self, text: str) -> None:
        """Send the text of a failure, this relay's or another's, to the others, and withdraw together."""
        if self._left:
            return
        self._left = True
        self.post.send_all(Failed(text[-MAX_TEXT:]))
        if withdraw([self.data, self.control], self._parts):
            self.data.Free()
            self.control.Free()

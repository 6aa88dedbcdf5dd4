"""A relay among all relays: the small messages between them, how it joins, and how it leaves with the others, in order
or because one of them has failed.

Used as a context: an error raised inside is sent to every other relay, all of them withdraw what they have posted in
MPI, and the error propagates. On the others `RelayFailed` is raised wherever they are, with the text of the first one,
so that a failure at any time, also while links are measured and plans are made, ends all of them within seconds and
leaves no memory to MPI that is freed.

A host has an id that it keeps for the whole job; ranks are those of one membership's communicator. A membership can be
replaced by another one of fewer hosts, or in another order (`withdraw`, then `Relay.reset`).
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

TAG_DOWN = 1  # small messages from the root
TAG_UP = 2  # small messages to the root
TAG_TABLE = 3
TAG_BLOCK = 4
TAG_EXCHANGE = 5
POLL_PERIOD = 0.01  # between polls of the post while others are waited for [s]
MAX_BYTES = 1 << 16  # of a message
MAX_TEXT = MAX_BYTES // 4 - 64  # letters of a failure's text: at most 4 bytes each


# -- messages: msgspec structs, so a message that is not ours is refused; nothing is unpickled


class State(msgspec.Struct, tag="state"):
    """Root to relay. The root's board: the command and its values. `models`: how many the root has sent by the plan in
    force, once the command is STOP or FAIL, after which it sends no more."""

    command: int
    values: list[float]
    models: int


class NewPlan(msgspec.Struct, tag="plan"):
    """Root to relay. From model 0 of this epoch on, this plan: a scheme by its reference, with its parameters."""

    epoch: int
    scheme: str
    nbytes: int
    versions_in_flight: int
    parameters: dict[str, Any]


class Measure(msgspec.Struct, tag="measure"):
    """Root to relay. No model is under way: measure the links together, then await a plan."""


class Orders(msgspec.Struct, tag="orders"):
    """Trainer to the starter of a host's collectors: a line."""

    host: int
    line: bytes


class Report(msgspec.Struct, tag="report"):
    """Starter of a host's collectors to the trainer: a line. sent: by `clock`, that of the host; received: by the
    root's [s, CLOCK_MONOTONIC]."""

    host: int
    line: bytes
    clock: str
    sent: float
    received: float = 0.0


class Goodbye(msgspec.Struct, tag="goodbye"):
    """Root to relay. Nothing more is sent: end."""


class Ready(msgspec.Struct, tag="ready"):
    """Relay to root. The plan of this epoch is in force here, its first receives are posted."""

    epoch: int


class Confirm(msgspec.Struct, tag="confirm"):
    """Relay to root. A model has ended on this host: sealed (and taken by its rollouts, where that is asked), or
    refused with `problem`. seconds: from the trainer's publish to the sealing."""

    epoch: int
    sequence: int
    version: int
    problem: str
    seconds: float


class MemberFailed(msgspec.Struct, tag="member_failed"):
    """Relay to root. A process of this host has failed; the job must end, and its relays end it in order."""

    text: str


class Finished(msgspec.Struct, tag="finished"):
    """Relay to root. This host has sent its last row and its last table."""

    rows: int
    tables: int


class Failed(msgspec.Struct, tag="failed"):
    """Either way. This relay, or one that sent it this message, cannot continue: withdraw everything at once."""

    text: str


class SchemeWish(msgspec.Struct, tag="scheme_wish"):
    """Trainer to root relay, in a slot of their board. The scheme to use from the next version on."""

    scheme: str


class PlanInForce(msgspec.Struct, tag="plan_in_force"):
    """Root relay to trainer, in a slot of their board. The plan by which models are sent: `shards` hosts that the root
    itself sends to, `chunk_bytes` of the largest piece, `bound_seconds` by the links measured (None: not measured)."""

    epoch: int
    scheme: str
    shards: int
    chunk_bytes: int
    bound_seconds: float | None


Message = State | NewPlan | Measure | Orders | Goodbye | Ready | Confirm | Report | MemberFailed | Finished | Failed
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message | SchemeWish | PlanInForce) -> bytes:
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


class Post:
    """Sends small messages to `peers`, ranks of a communicator, under `out_tag`, and receives theirs under `tag`; never
    blocks."""

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
        """Requests that have not ended."""
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
        """Messages since the last call, (rank, message); also lets sends continue."""
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


class RelayFailed(JobFailed):
    """Another relay has failed; the text is its own."""


def describe_relay(error: BaseException) -> str:
    """The text of an error that other relays get, unless the relay is given another function."""
    return str(error) if isinstance(error, DdrlError) else f"{type(error).__name__}: {error}"


class Membership:
    """All relays of a communicator. Rank 0 is the root. Making one is collective. `data` and `control` are
    communicators of its own. `ids` [size]: of the hosts, by rank; None: their ranks."""

    def __init__(
        self,
        comm: MPI.Comm,
        describe: Callable[[BaseException], str] = describe_relay,
        ids: Sequence[int] | None = None,
    ) -> None:
        self.rank = comm.rank
        self.hosts = comm.size - 1  # beside the root
        self.ids = list(range(comm.size)) if ids is None else list(ids)
        self.host = self.ids[self.rank]
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

    # -- messages, addressed by hosts' ids

    def send(self, host: int, message: Message) -> None:
        """To the relay of one host; never blocks."""
        self.post.send(self.ids.index(host), message)

    def send_root(self, message: Message) -> None:
        """To the root."""
        self.post.send(0, message)

    def send_all(self, message: Message) -> None:
        """From the root to every relay, or from a relay to the root."""
        self.post.send_all(message)

    def messages(self) -> list[tuple[int, Message]]:
        """Messages since the last call, (host, message). RelayFailed where another relay has failed."""
        self._read()
        unread = self._unread
        self._unread = []
        return unread

    def poll(self) -> None:
        """Raise RelayFailed where another relay has failed."""
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_PERIOD
            self._read()

    def _read(self) -> None:
        for rank, message in self.post.receive():
            if isinstance(message, Failed):
                raise RelayFailed(message.text)
            self._unread.append((self.ids[rank], message))

    # -- objects that have posted requests (`requests.Guard`)

    def keep(self, part: Part) -> None:
        """`part` posts requests from now on."""
        self._parts.append(part)

    def drop(self, part: Part) -> None:
        """All of its requests have ended."""
        self._parts.remove(part)

    # -- the end

    def leave(self) -> None:
        """In order, once every model and row has ended everywhere: wait for all others, then free what is ours."""
        if self._left:
            return
        self.exchange.barrier()
        self._left = True
        self.post.close()
        self._free()

    def withdraw(self) -> bool:
        """End all requests together with the other relays, so that another membership can take over (`Relay.reset`);
        collective. False where some relay did not take part: then memory that MPI may touch is never freed."""
        self._left = True
        together = withdraw([self.data, self.control], self._parts)
        if together:
            self._free()
        return together

    def _free(self) -> None:
        self.data.Free()
        self.control.Free()

    def _give_up(self, error: BaseException) -> None:
        self.abandon(str(error) if isinstance(error, RelayFailed) else self._describe(error))

    def abandon(self, text: str) -> None:
        """Send the text of a failure, this relay's or another's, to the others, and withdraw together."""
        if not self._left:
            self.post.send_all(Failed(text[-MAX_TEXT:]))
            self.withdraw()

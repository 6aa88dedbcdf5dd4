"""The group of all relays: the messages between them, and how a relay leaves the group with the others, in order or
because one of them has failed.

A `Membership` is a context: an error raised inside is sent to every other relay, all of them withdraw their requests
from MPI, and the error propagates. On the others `RelayFailed` is raised wherever they are, with the text of the first
error. So a failure at any time, also while links are measured and plans are made, ends all relays within seconds, and
no memory is freed that MPI may still touch.

A host has an id that it keeps for the whole job; ranks are those of one membership's communicator. A membership can be
replaced by one of fewer hosts or in another order (`withdraw`, then `Relay.reset`).
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import numpy as np

from ddrl.channels.wire import Wire
from ddrl.core.errors import DdrlError, JobFailed
from ddrl.core.specs import Array, Floats
from ddrl.distribution.requests import Exchange, MpiEnd, Part, nothing, wait, withdraw

if TYPE_CHECKING:
    from mpi4py import MPI

TAG_MESSAGE = 1
TAG_BLOCK = 2  # rows of experience
TAG_EXCHANGE = 3
TAG_LEFT_OUT = 4
PMIX_ERR_PROC_TERM_WO_SYNC = -200
POLL_PERIOD = 0.01  # between checks for a failure while others are waited for [s]
BEAT_PERIOD = 0.25  # between signs of life meanwhile [s]
MAX_TEXT = 1 << 14  # letters of a failure's text


# -- messages: msgspec structs, so malformed bytes are refused; nothing is unpickled


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


class Table(msgspec.Struct, tag="table"):
    """Relay to root, and a sign of life. What has changed in the host's table of counters since its last message:
    `values` [k] at `places` [k] of the table, counted row by row."""

    places: Array
    values: Floats


class Finished(msgspec.Struct, tag="finished"):
    """Relay to root. This host has sent its last row, of `rows` in all; its last table is before this message."""

    rows: int


class Failed(msgspec.Struct, tag="failed"):
    """Either way. This relay, or one that sent it this message, cannot continue: withdraw everything at once."""

    text: str


class SchemeWish(msgspec.Struct, tag="scheme_wish"):
    """Trainer to root relay, in a slot of their board: the scheme to use from the next version on."""

    scheme: str


class PlanInForce(msgspec.Struct, tag="plan_in_force"):
    """Root relay to trainer, in a slot of their board: the plan by which models are sent. `shards`: hosts that the root
    itself sends to; `chunk_bytes`: of the largest piece; `bound_seconds`: by the measured links (None: not
    measured); `sources`: of hosts 1 to n, the host that sends it the most of a model; `up`, `down`: measured rates
    [kB/s] of every host, the root's first; empty where they were not measured."""

    epoch: int
    scheme: str
    shards: int
    sources: list[int]
    chunk_bytes: int
    bound_seconds: float | None
    up: list[int] = []
    down: list[int] = []


Handlers = dict[type, Callable[[int, Any], None]]  # called with (host, message), by the type of message
Down = State | NewPlan | Measure | Orders | Goodbye  # root to relay
Up = Ready | Confirm | Report | MemberFailed | Table | Finished  # relay to root
Message = Down | Up | Failed
RELAYS: Wire[Message] = Wire("the relays", Message)
M = TypeVar("M", bound=Message)
PLANS: Wire[SchemeWish | PlanInForce | Failed] = Wire("the board", SchemeWish | PlanInForce | Failed)


class RelayFailed(JobFailed):
    """Another relay has failed; the text is its own."""


class HostLeftOut(JobFailed):
    """A host was silent for too long: the others continue without it."""


def describe_relay(error: BaseException) -> str:
    """The text of an error that other relays get, unless the relay is given another function."""
    return str(error) if isinstance(error, DdrlError) else f"{type(error).__name__}: {error}"


def declare_dead(rank: int) -> bool:
    """Have Open MPI take this rank of the world for dead, here and on all other ranks; it has no public call for that.
    False where it cannot."""
    try:
        library = ctypes.CDLL("libmpi.so.40")
        find = library.ompi_proc_for_name
        declare = library.ompi_errhandler_proc_failed_internal
        propagate = library.ompi_comm_failure_propagate
        world = ctypes.c_byte.in_dll(library, "ompi_mpi_comm_world")
        mine = ctypes.c_void_p.in_dll(library, "ompi_proc_local_proc").value
    except (OSError, AttributeError, ValueError):
        return False
    assert mine is not None
    job, own_rank = (ctypes.c_uint32 * 12).from_address(mine)[10:12]
    if own_rank != _world_rank():
        return False  # the structure is another one
    find.restype = ctypes.c_void_p
    find.argtypes = [ctypes.c_uint64]
    declare.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_bool]
    process = find(job | rank << 32)
    if process is None:
        return False
    declare(process, PMIX_ERR_PROC_TERM_WO_SYNC, False)  # True would also end the process, if it is of this machine
    propagate(ctypes.byref(world), ctypes.c_void_p(process), PMIX_ERR_PROC_TERM_WO_SYNC)
    return True


def _world_rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


NEVER_FREED: list[Any] = []  # requests that died with a relay, and their memory


class Membership:
    """All relays of a communicator. Rank 0 is the root. Making one is collective. `data` and `control` are
    communicators of its own. `ids` [size]: of the hosts, by rank; None: their ranks. `shrinks`: MPI reports deaths, and
    the relays that live are to continue (`shrink`)."""

    def __init__(
        self,
        comm: MPI.Comm,
        describe: Callable[[BaseException], str] = describe_relay,
        ids: Sequence[int] | None = None,
        *,
        shrinks: bool = False,
    ) -> None:
        self.shrinks = shrinks
        self._describe = describe
        ids = list(range(comm.size)) if ids is None else list(ids)
        self._first = comm  # never revoked
        self._first_ids = ids
        self.silent: set[int] = set()  # hosts that the root has left out
        self._join(comm.Dup() if shrinks else comm, ids)

    def _join(self, comm: MPI.Comm, ids: list[int]) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.hosts = comm.size - 1  # beside the root
        self.ids = ids
        self.host = self.ids[self.rank]
        self.data = comm.Dup()
        self.control = comm.Dup()
        self.messages = MpiEnd(self.control, RELAYS, TAG_MESSAGE)
        self._peers = [0] if self.rank else range(1, comm.size)
        self._left = False
        self.beat: Callable[[], object] = nothing  # gives a sign of life while others are waited for
        self._next_poll = 0.0
        self._next_beat = 0.0
        self._unread: list[tuple[int, Message]] = []
        self._parts: list[Part] = [self.messages]
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
        self.messages.send(message, self.ids.index(host))

    def send_root(self, message: Up) -> None:
        """To the root."""
        self.messages.send(message, 0)

    def send_all(self, message: Message) -> None:
        """From the root to every relay, or from a relay to the root."""
        self.messages.send(message, *self._peers)

    def receive(self) -> list[tuple[int, Message]]:
        """Messages since the last call, (host, message), those of a host in order. RelayFailed where another relay has
        failed."""
        self._read()
        unread = self._unread
        self._unread = []
        return unread

    def take(self, kind: type[M]) -> list[tuple[int, M]]:
        """Messages of one kind alone, which `receive` then does not return."""
        found = [(host, message) for host, message in self._unread if isinstance(message, kind)]
        self._unread = [entry for entry in self._unread if not isinstance(entry[1], kind)]
        return found

    def poll(self) -> None:
        """Raise RelayFailed where another relay has failed; give a sign of life."""
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_PERIOD
            self._read()
            if now >= self._next_beat:
                self._next_beat = now + BEAT_PERIOD
                self.beat()

    def _read(self) -> None:
        while (received := self.messages.take()) is not None:
            rank, message = received
            if isinstance(message, Failed):
                raise RelayFailed(message.text)
            self._unread.append((self.ids[rank], message))

    # -- objects that have posted requests (`requests.Guard`)

    def keep(self, part: Part) -> None:
        """`part` posts requests from now on."""
        self._parts.append(part)

    def drop(self, part: Part) -> None:
        """All of its requests have ended."""
        if part in self._parts:  # else they ended when the membership shrank
            self._parts.remove(part)

    # -- the end

    def leave(self) -> None:
        """In order, once every model and row has ended everywhere: wait for all others, then free what is ours."""
        if self._left:
            return
        self.exchange.barrier()
        self._left = True
        posted = self.messages.posted()
        wait([*posted.receives, *posted.sends])
        self._free()

    def withdraw(self) -> bool:
        """End all requests together with the other relays, so that another membership can take over (`Relay.reset`);
        collective. False where some relay did not take part: then memory that MPI may touch is never freed."""
        self._left = True
        together = withdraw([self.data, self.control], self._parts)
        if together:
            self._free()
        return together

    def has_lost(self) -> bool:
        """Whether a relay has died, or another one has found so."""
        if not self.shrinks:
            return False
        return self.control.Is_revoked() or self.data.Is_revoked() or self.control.Get_failed().size > 0

    def leave_out(self, host: int) -> bool:
        """At the root: continue without a host that is silent but, as far as MPI knows, lives: all relays that live are
        to `shrink`, and it is to end once it is back (`is_left_out`). False where this MPI cannot."""
        from mpi4py import MPI

        rank = self._first_ids.index(host)
        (world_rank,) = self._first.Get_group().Translate_ranks([rank], MPI.COMM_WORLD.Get_group())
        NEVER_FREED.append(self._first.Isend([b"", MPI.BYTE], rank, TAG_LEFT_OUT))
        if declare_dead(world_rank):
            self.silent.add(host)
        return host in self.silent

    def is_left_out(self) -> bool:
        """Whether the root has continued without this host."""
        return self.shrinks and self._first.Iprobe(0, TAG_LEFT_OUT)

    def shrink(self) -> None:
        """Continue with the relays that live, wherever they are in their calls; collective over them, and followed by
        `Relay.reset`. What has arrived is handed on, and all else that was under way is dropped. JobFailed where the
        root is not among them."""
        from mpi4py import MPI

        posted = [part.posted() for part in self._parts]
        self.data.Revoke()
        self.control.Revoke()
        for entry in posted:
            NEVER_FREED.append((entry, list(entry.receives), list(entry.sends)))
            for index, request in enumerate(entry.receives):
                status = MPI.Status()
                with contextlib.suppress(MPI.Exception):
                    if request and request.Test(status) and entry.arrived is not None:
                        entry.arrived(index, status.Get_count(MPI.BYTE))
            entry.receives.clear()
            entry.sends.clear()
        self._left = True
        comm = self._comm
        ids = self.ids
        agreed = 0
        while not agreed:  # another one may die meanwhile
            comm.Revoke()
            rest = comm.Shrink()
            ids = [ids[rank] for rank in rest.Get_group().Translate_ranks(None, comm.Get_group())]
            with contextlib.suppress(MPI.Exception):
                self._join(rest, ids)
                self._flush()
                agreed = 1
            try:
                agreed = rest.Agree(agreed)
            except MPI.Exception:
                agreed = 0
            comm = rest
        if ids[0]:
            self._left = True
            raise JobFailed("the trainer's host has died")

    def _flush(self) -> None:
        """Exchange a message with every other relay: what they sent before has then arrived, and nothing is written
        into memory that is used again."""
        others = [rank for rank in range(self.hosts + 1) if rank != self.rank]
        memory = np.zeros((len(others), 2), np.uint8)
        requests: list[Any] = []
        for place, rank in zip(memory, others, strict=True):
            requests.append(self.data.Irecv(place[:1], rank, TAG_EXCHANGE))
            requests.append(self.data.Isend(place[1:], rank, TAG_EXCHANGE))
        NEVER_FREED.append(memory)
        wait(requests)

    def _free(self) -> None:
        self.data.Free()
        self.control.Free()

    def _give_up(self, error: BaseException) -> None:
        self.abandon(str(error) if isinstance(error, RelayFailed) else self._describe(error))

    def abandon(self, text: str) -> None:
        """Send the text of a failure, this relay's or another's, to the others, and withdraw together."""
        if not self._left:
            self.send_all(Failed(text[-MAX_TEXT:]))
            self.withdraw()

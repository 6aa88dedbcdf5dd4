"""Requests that MPI has not ended yet, how they are withdrawn, the messages of a wire over MPI, and collective calls
that can be aborted.

MPI writes into a posted buffer whenever its message arrives, and reads from one until it has been taken: freeing such
memory earlier crashes the process, or its neighbour waits for ever. So every object that posts requests lists those
that have not ended (`posted`), a `Guard` holds all such objects, and `withdraw` ends every request of all relays
together. Knows nothing of models.

Whoever waits for others over MPI sleeps between polls: blocking MPI calls spin, and hundreds of processes that spin on
a few cores would starve the one they wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from ddrl.channels.wire import Wire
from ddrl.core.specs import Array, Bytes, Floats

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.channels.board import Doorbell

M = TypeVar("M")

# -- waits -------------------------------------------------------------------------------------------------------------

SHARE = 0.02  # of the time waited so far, that a sleep lasts
SHORTEST = 2e-5  # sleep [s]


def nothing() -> None:
    """Does nothing between polls."""


def rest_seconds(
    waited: float, share: float = SHARE, longest: float = math.inf, *, shortest: float = SHORTEST
) -> float:
    """A share of the time `waited`, at least `shortest` and at most `longest` [s]: a message is noticed late by no more
    than that share, and hundreds of waiting processes leave the cores free."""
    return min(longest, max(shortest, share * waited))


def rest(begun: float, share: float = SHARE, longest: float = math.inf) -> None:
    """Sleep `rest_seconds` of the time since `begun` (time.perf_counter)."""
    time.sleep(rest_seconds(time.perf_counter() - begun, share, longest))


def wait(
    requests: Sequence[MPI.Request],
    meanwhile: Callable[[], object] = nothing,
    *,
    share: float = SHARE,
    longest: float = math.inf,
) -> None:
    """Until all of them have ended; `meanwhile` is called between polls; an error that it raises ends the wait."""
    from mpi4py import MPI

    begun = time.perf_counter()
    while (ended := MPI.Request.Testsome(requests)) is not None:
        meanwhile()
        if not ended:  # else there may be more: MPICH takes one message a poll
            rest(begun, share, longest)


# -- events ------------------------------------------------------------------------------------------------------------
# Sleeping until MPI has something to do, or until this host's bell rings.
#
# Open MPI watches its sockets by epoll, and a process can wait for an epoll: it becomes readable when a message arrives
# and when a full socket has room again. So a relay sleeps in the kernel and wakes with the packet instead of polling.
# MPI libraries and transports without an epoll (shared memory) wake nobody: there every sleep must be short.


MAX_DESCRIPTOR = 1024  # that select takes


def epolls() -> list[int]:
    """Descriptors of this process that are epolls: those of MPI, once it is initialized."""
    found: list[int] = []
    for path in Path("/proc/self/fd").glob("*"):
        try:
            if os.readlink(path) == "anon_inode:[eventpoll]" and int(path.name) < MAX_DESCRIPTOR:
                found.append(int(path.name))
        except OSError:
            continue  # the listing's own
    return found


def yield_when_idle(on: bool) -> bool:
    """Switch whether Open MPI yields the core at every poll that finds nothing, as it does where ranks share cores;
    returns the previous state. A relay that sleeps by itself must keep the core: else what has arrived waits until all
    others had a turn. Other MPI libraries: False, and nothing changes."""
    path = next((words[-1] for words in map(str.split, _mapped()) if "/libopen-pal." in words[-1]), None)
    if path is None:
        return False
    library = ctypes.CDLL(path)
    before = ctypes.c_bool.in_dll(library, "opal_progress_yield_when_idle").value
    library.opal_progress_set_yield_when_idle(ctypes.c_bool(on))
    return before


def _mapped() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


Sleep = Callable[[int, Sequence[int], float], bool]  # (bell, MPI's descriptors, s): whether MPI's ended it


def select_sleep(bell: int, descriptors: Sequence[int], seconds: float) -> bool:
    """Until one of them can be read."""
    ready = select.select([bell, *descriptors], [], [], seconds)[0]
    return any(one != bell for one in ready)


class Events:
    """Waits for `bell` and for MPI at once.

    A thread passes the bell on to a descriptor, for the kernel cannot wait for memory and descriptors together."""

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell
        self._epolls = epolls()
        self._yielded = yield_when_idle(False)
        self._asked = threading.Semaphore(0)
        self._asking = False
        self._seen = 0
        self._closed = False
        if self._epolls:
            self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._pass_on, name="bell", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # no thread may wait in the kernel's module when the interpreter ends

    def wait(self, seen: int, seconds: float, sleep: Sleep = select_sleep) -> bool:
        """Sleep at most `seconds`, or until the bell's value is no longer `seen` or MPI has something to do; whether it
        was MPI. Where MPI has descriptors, by `sleep`, which may move messages meanwhile."""
        if not self._epolls:
            self._bell.wait(seen, seconds)
            return False
        if self._bell.value != seen:
            return False
        if not self._asking:
            self._asking = True
            self._seen = seen
            self._asked.release()
        woken = sleep(self._rung, self._epolls, seconds)
        with contextlib.suppress(BlockingIOError):  # not rung
            os.eventfd_read(self._rung)
            self._asking = False
        return woken

    def close(self) -> None:
        """End the thread."""
        yield_when_idle(self._yielded)
        if self._epolls:
            self._epolls = []
            self._closed = True
            self._asked.release()
            self._bell.ring()
            self._thread.join()
            os.close(self._rung)
            atexit.unregister(self.close)

    def _pass_on(self) -> None:
        while True:
            self._asked.acquire()
            if self._closed:
                return
            self._bell.wait(self._seen, None)
            os.eventfd_write(self._rung, 1)


# -- requests ----------------------------------------------------------------------------------------------------------

WITHDRAW_SECONDS = 8.0  # for all relays to begin, and to take what still travels
COLLECTIVE_TAG = 1 << 14
MAX_POLL_PERIOD = 0.5  # however long others have been waited for [s]


@dataclass
class Posted:
    """Requests that have not ended, with the memory that they read or write; ended ones among them do no harm.

    `arrived`: called by `withdraw` with (index, bytes) of each receive whose message was there already."""

    receives: list[Any]
    sends: list[Any]
    memory: list[Any] = field(default_factory=list[Any])
    arrived: Callable[[int, int], None] | None = None


class Part(Protocol):
    """An object that posts requests."""

    def posted(self) -> Posted:
        """Requests that have not ended."""
        ...


class Guard(Protocol):
    """Holds all objects that post requests, and raises when another relay has failed."""

    def keep(self, part: Part) -> None:
        """`part` posts requests from now on; it stays alive until they have ended."""
        ...

    def drop(self, part: Part) -> None:
        """All of its requests have ended."""
        ...

    def poll(self) -> None:
        """Raises where another relay has failed; called while this one waits for others."""
        ...


class MpiEnd(Generic[M]):
    """One rank's end of a wire over MPI, by a tag of its own: messages of one rank are received in order. Only `flush`
    waits."""

    def __init__(self, comm: MPI.Comm, wire: Wire[M], tag: int) -> None:
        self.comm = comm
        self.bytes_sent = 0
        self.bytes_received = 0
        self._wire = wire
        self._tag = tag
        self._sends: list[tuple[Any, Any, int]] = []  # request, memory that MPI reads, rank
        self._arriving: deque[tuple[Any, int, Bytes]] = deque()  # request, rank, bytes
        self._received: deque[tuple[int, M]] = deque()
        self._of_the_dead: list[Any] = []  # requests and memory

    def send(self, message: M, *ranks: int) -> None:
        """Begin to send a message to each of these ranks."""
        data = self._wire.encode(message)
        for rank in ranks:
            self.post(data, rank, self._tag)

    def post(self, data: Bytes, rank: int, tag: int) -> None:
        """Begin to send memory, which must not change before it has arrived."""
        self._sends.append((self.comm.Isend(data, rank, tag), data, rank))
        self.bytes_sent += data.nbytes

    @property
    def all_sent(self) -> bool:
        """Whether MPI has taken every message."""
        self._sends = [entry for entry in self._sends if not entry[0].Test()]
        return not self._sends

    @property
    def arriving(self) -> bool:
        """Whether a message had begun to arrive when one was last asked for; it does so only while MPI is called."""
        return bool(self._arriving)

    def take(self, rank: int | None = None) -> tuple[int, M] | None:
        """The sender and the oldest message that has arrived and was not taken, or the oldest of `rank`."""
        self._read()
        for index, received in enumerate(self._received):
            if rank is None or received[0] == rank:
                del self._received[index]
                return received
        return None

    def _read(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        misses = 0
        while misses < 2:  # the first call may only make MPI take in what the second one returns
            found = self.comm.Improbe(MPI.ANY_SOURCE, self._tag, status)
            if found is None:
                misses += 1
            else:
                data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self._arriving.append((found.Irecv(data), status.Get_source(), data))
        while self._arriving and self._arriving[0][0].Test():
            _, rank, data = self._arriving.popleft()
            self.bytes_received += data.nbytes
            self._received.append((rank, self._wire.decode(data)))

    def flush(self, share: float = SHARE, longest: float = math.inf) -> None:
        """Wait until everything sent has arrived; `share`, `longest`: as of `waits.wait`."""
        wait([request for request, _, _ in self._sends], share=share, longest=longest)
        self._sends = []

    def forget(self, rank: int) -> None:
        """`rank` has died: nothing sent to it is waited for. The memory is kept, since MPI may still read it."""
        self._of_the_dead += [entry for entry in self._sends if entry[2] == rank]
        self._sends = [entry for entry in self._sends if entry[2] != rank]

    def posted(self) -> Posted:
        """Requests that have not ended."""
        receives = [request for request, _, _ in self._arriving]
        return Posted(receives, [request for request, _, _ in self._sends], [*self._arriving, *self._sends])


class Exchange:
    """Collective calls of all ranks of a communicator, as MPI's own, that can be aborted at any time: they are made of
    sends and receives, over a binomial tree. Every rank makes the same calls in the same order."""

    def __init__(self, comm: MPI.Comm, guard: Guard, tag: int = COLLECTIVE_TAG) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.comm = comm
        self.guard = guard
        self._tag = tag
        self._receives: list[tuple[Any, Any]] = []  # (request, buffer)
        self._sends: list[tuple[Any, Any]] = []
        guard.keep(self)

    def posted(self) -> Posted:
        """Requests that have not ended."""
        pending = [*self._receives, *self._sends]
        return Posted(
            [request for request, _ in self._receives],
            [request for request, _ in self._sends],
            [buffer for _, buffer in pending],
        )

    def close(self) -> None:
        """All of its requests have ended."""
        self.guard.drop(self)

    def receive(self, buffer: Array, rank: int, tag: int) -> MPI.Request:
        """Post a receive."""
        self._receives.append((self.comm.Irecv(buffer, rank, tag), buffer))
        return self._receives[-1][0]

    def send(self, buffer: Array, rank: int, tag: int) -> MPI.Request:
        """Post a send."""
        self._sends.append((self.comm.Isend(buffer, rank, tag), buffer))
        return self._sends[-1][0]

    def wait(self, requests: Sequence[Any]) -> None:
        """Until all of them have ended, sleeping between polls."""
        wait(requests, self.guard.poll, longest=MAX_POLL_PERIOD)
        self._receives = [entry for entry in self._receives if entry[0]]
        self._sends = [entry for entry in self._sends if entry[0]]

    def poll(self) -> None:
        """Raise where another relay has failed."""
        self.guard.poll()

    def reduce(self, values: Floats, operation: Callable[..., Floats]) -> Floats:
        """`operation` (np.add, np.maximum) over all ranks' values, at every rank."""
        total = values.copy()
        step = 1
        while step < self.size and not self.rank & step:
            if self.rank + step < self.size:
                received = np.empty_like(total)
                self.wait([self.receive(received, self.rank + step, self._tag)])
                total = operation(total, received)
            step *= 2
        if self.rank:
            self.wait([self.send(total, self.rank - step, self._tag)])
        return self._down(total)

    def _down(self, data: Array) -> Array:
        """The root's data at every rank; all give arrays of the same size."""
        step = 1
        while step < self.size and not self.rank & step:
            step *= 2
        if self.rank:
            data = np.empty_like(data)
            self.wait([self.receive(data, self.rank - step, self._tag)])
        sends: list[Any] = []
        while step > 1:
            step //= 2
            if self.rank + step < self.size:
                sends.append(self.send(data, self.rank + step, self._tag))
        self.wait(sends)
        return data

    def gather(self, value: float) -> list[float]:
        """Every rank's value, at every rank."""
        values = np.zeros(self.size)
        values[self.rank] = value
        return self.reduce(values, np.add).tolist()

    def barrier(self) -> None:
        """Until every rank has called it."""
        self.reduce(np.zeros(1), np.add)

    def broadcast(self, data: bytes | None) -> bytes:
        """Bytes from rank 0, which gives them, to every rank."""
        size = int(self._down(np.array([0 if data is None else len(data)], np.int64))[0])
        whole = np.zeros(size, np.uint8) if data is None else np.frombuffer(bytearray(data), np.uint8)
        return self._down(whole).tobytes() if size else b""


def withdraw(
    comms: Sequence[MPI.Comm],
    parts: Iterable[Part],
    meanwhile: Callable[[], object] = nothing,
) -> bool:
    """End every request of this rank, together with all other ranks of `comms`, which must do the same: receives are
    cancelled, and messages of others are received and dropped until no rank has a send left (Hoefler, Siebert and
    Lumsdaine 2010, nonblocking consensus). False after WITHDRAW_SECONDS, where some rank did not begin: then memory
    that MPI may still touch is never freed, and neither where `meanwhile`, called between polls, raises."""
    from mpi4py import MPI

    posted: list[Posted] | None = [part.posted() for part in parts]
    receives = [(entry, index, request) for entry in posted for index, request in enumerate(entry.receives) if request]
    pending: list[Any] = [request for _, _, request in receives]
    pending += [request for entry in posted for request in entry.sends if request]
    for _, _, request in receives:
        request.Cancel()
    taken: list[Any] = []
    barrier: MPI.Request | None = None
    begun = time.perf_counter()
    status = MPI.Status()
    statuses: list[MPI.Status] = []
    try:
        while time.perf_counter() - begun < WITHDRAW_SECONDS:
            for comm in comms:
                while (message := comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                    taken.append(np.empty(status.Get_count(MPI.BYTE), np.uint8))
                    pending.append(message.Irecv([taken[-1], MPI.BYTE]))
            ended = MPI.Request.Testall(pending, None if barrier is not None else statuses)
            if ended and barrier is None:
                _report_arrivals(receives, statuses)
                barrier = comms[-1].Ibarrier()
            if barrier is not None and barrier.Test() and ended:
                posted = None
                return True
            meanwhile()
            rest(begun, longest=0.01)
        return False
    finally:
        if posted is not None:
            never_freed = (posted, pending, taken, barrier)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(never_freed))  # MPI ends after the interpreter has freed all


def _report_arrivals(receives: Sequence[tuple[Posted, int, Any]], statuses: Sequence[MPI.Status]) -> None:
    """Hand on what had arrived before its receive could be cancelled. `statuses`: of `receives`, then of others."""
    from mpi4py import MPI

    for (entry, index, _), status in zip(receives, statuses, strict=False):
        if entry.arrived is not None and not status.Is_cancelled():
            entry.arrived(index, status.Get_count(MPI.BYTE))

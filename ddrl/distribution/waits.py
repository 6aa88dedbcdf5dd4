"""Waiting for other processes over MPI without taking the processor from them: everything here sleeps between polls.

Blocking MPI calls spin; hundreds of processes that spin on a few cores would starve the one they wait for.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.channels.board import Doorbell


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
    while not MPI.Request.Testall(requests):
        meanwhile()
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

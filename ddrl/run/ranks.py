"""The few collective calls of a start and an end, without spinning and without pickling.

Every call is nonblocking and polled with a sleep (`distribution.transport.waits`). A barrier has a name: where ranks
reach different ones, or one does not reach it in time, the error names them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddrl.channels.segment import unlink_run
from ddrl.core.errors import DdrlError, JobFailed
from ddrl.distribution.waits import nothing, wait
from ddrl.run.process import (
    skip_finalize,
)
from ddrl.run.topology import describe

if TYPE_CHECKING:
    from mpi4py import MPI


# -- messages ----------------------------------------------------------------------------------------------------------

NAME_BYTES = 256
# In place of a topology: the name of a slice's module that serves the ranks, a newline, and its message.
SLICE_MARK = b"slice:"
# Of the time waited so far, and [s]: hundreds of ranks that poll a hundred times a second slow the one they wait for.
SHARE = 0.3
LONGEST = 0.1


class BarrierError(DdrlError):
    """Ranks did not meet at a barrier."""


class Barrier:
    """All ranks of `comm` meet here; making it counts this rank, `wait` waits for the others."""

    def __init__(self, comm: MPI.Comm, name: str) -> None:
        from mpi4py import MPI

        code = zlib.crc32(name.encode())
        self.name = name
        self._comm = comm
        self._mine = np.array([code, -code], np.int64)
        self._everyone = np.zeros(2, np.int64)
        self._request = comm.Iallreduce(self._mine, self._everyone, MPI.MAX)

    def wait(self, meanwhile: Callable[[], object] = nothing, limit: float | None = None) -> None:
        """Until all are here; `meanwhile` is called between polls. BarrierError after `limit` seconds, or where some
        came to another barrier. Waiting once more does nothing."""
        deadline = None if limit is None else time.monotonic() + limit

        def look() -> None:
            meanwhile()
            if deadline is not None and time.monotonic() > deadline:
                raise BarrierError(f"{self._where()}: not every rank came within {limit:g} s")

        wait([self._request], look, share=SHARE, longest=LONGEST)
        if not np.array_equal(self._everyone, self._mine):
            raise BarrierError(f"{self._where()}: some ranks came to another one, so they do not do the same")

    def _where(self) -> str:
        return f"rank {self._comm.Get_rank()} waits at the barrier '{self.name}'"


def barrier(comm: MPI.Comm, name: str, meanwhile: Callable[[], object] = nothing, limit: float | None = None) -> None:
    """Make one and wait; see Barrier."""
    Barrier(comm, name).wait(meanwhile, limit)


def broadcast(comm: MPI.Comm, data: bytes | None, root: int = 0) -> bytes:
    """Bytes from the root (who gives `data`) to all ranks of `comm`."""
    size = np.array([len(data) if data is not None else 0], np.int64)
    wait([comm.Ibcast(size, root)], share=SHARE, longest=LONGEST)
    buffer = np.frombuffer(bytearray(data if data is not None else int(size[0])), np.uint8)
    if len(buffer):
        wait([comm.Ibcast(buffer, root)], share=SHARE, longest=LONGEST)
    return buffer.tobytes()


def host_names(comm: MPI.Comm) -> list[str]:
    """Name of the machine of every rank."""
    mine = np.zeros(NAME_BYTES, np.uint8)
    name = socket.gethostname().encode()[:NAME_BYTES]
    mine[: len(name)] = np.frombuffer(name, np.uint8)
    everyone = np.zeros((comm.Get_size(), NAME_BYTES), np.uint8)
    wait([comm.Iallgather(mine, everyone)], share=SHARE, longest=LONGEST)
    return [bytes(row[row != 0]).decode() for row in everyone]


# -- agreement ---------------------------------------------------------------------------------------------------------
# How the ranks of a job begin and end together: each reports whether it could, and each gets the answer.
#
# Two points of a job are collective over all ranks: "every host's channels stand" and "nobody needs them any more". A
# rank that failed takes part all the same, so that nobody waits for it; the lowest one that failed prints why, once.
#
# An mpirun with --enable-recovery goes on without ranks that die: `abort` and the end of a process (`process.end`) then
# differ.


RECOVERY = b"--enable-recovery"  # of Open MPI's mpirun
END_TIMEOUT = 10.0  # [s] after a failure for a rank inside a long environment step to end; then the job is aborted


class Agreement:
    """One collective answer to "did everyone reach this point?". Made by every rank; `wait` gives the answer."""

    def __init__(self, world: MPI.Intracomm, error: BaseException | None = None) -> None:
        self._world = world
        self._error = error
        rank = world.Get_rank()
        lowest = rank if error is not None else world.Get_size()
        self._mine = np.array([lowest, 0 if _recovers(os.getppid()) else 1], np.int64)
        self._lowest = np.zeros(2, np.int64)
        from mpi4py import MPI

        self._request = world.Iallreduce(self._mine, self._lowest, MPI.MIN)

    def wait(self) -> None:
        """Return when every rank is here. JobFailed where one came with an error, which the lowest such rank prints."""
        wait([self._request], share=SHARE, longest=LONGEST)
        if self._lowest[1] == 0:  # ranks of mpirun's own host see it, and everybody hears of it
            skip_finalize()
        rank = self._world.Get_rank()
        lowest = int(self._lowest[0])
        if lowest == self._world.Get_size():
            return
        if self._error is not None and rank == lowest and rank != 0:  # rank 0 raises its error itself
            print(f"ddrl: {describe(self._error, f'rank {rank}')}", file=sys.stderr, flush=True)
        raise JobFailed("")


def _recovers(launcher: int) -> bool:
    """Whether a rank's parent is an mpirun with --enable-recovery. On other hosts it is a daemon, which does not show
    that."""
    try:
        return RECOVERY in Path(f"/proc/{launcher}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False


def abort(world: MPI.Intracomm, run_id: str = "") -> None:
    """End the whole job, and remove the channels that the run already has on this machine.

    An mpirun with --enable-recovery treats MPI's abort as the death of one rank. So it is told to end, and its ranks
    end with it."""
    if run_id:
        unlink_run(run_id)
    launcher = os.getppid()
    if _recovers(launcher):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            os.kill(launcher, signal.SIGTERM)
    world.Abort(1)


@contextlib.contextmanager
def abort_on_error(world: MPI.Intracomm, run_id: str = "") -> Generator[None]:
    """Abort the whole job where this rank fails while no message can reach the others."""
    try:
        yield
    except BaseException as error:
        print(f"ddrl: {describe(error, f'rank {world.Get_rank()}')}", file=sys.stderr, flush=True)
        abort(world, run_id)


def part(
    world: MPI.Intracomm,
    meanwhile: Callable[[], object] = lambda: None,
    run_id: str = "",
    error: BaseException | None = None,
) -> None:
    """Wait until no rank needs any host's channels.

    The trainer gives the `error` that ended the job, if one did, and waits for at most END_TIMEOUT then: it removes
    this machine's channels and aborts the job.
    """
    deadline = time.monotonic() + END_TIMEOUT

    def look() -> None:
        meanwhile()
        if error is not None and time.monotonic() > deadline:
            if str(error):
                print(f"ddrl: {error}", file=sys.stderr, flush=True)
            abort(world, run_id)

    barrier(world, "nobody needs any host's channels", look)

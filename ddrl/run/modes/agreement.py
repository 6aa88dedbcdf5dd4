"""How the ranks of a job begin and end together: each reports whether it could, and each gets the answer.

Two points of a job are collective over all ranks: "every host's channels stand" and "nobody needs them any more". A
rank that failed takes part all the same, so that nobody waits for it; the lowest one that failed prints why, once.

An mpirun with --enable-recovery goes on without ranks that die: `abort` and the end of a process (`process.end`) then
differ.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddrl.channels.segment import unlink_run
from ddrl.core.errors import JobFailed
from ddrl.distribution.transport.waits import wait
from ddrl.run.failure import describe
from ddrl.run.messages import LONGEST, SHARE, barrier
from ddrl.run.process import skip_finalize

if TYPE_CHECKING:
    from mpi4py import MPI

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

"""The few collective calls of a start and an end, without spinning and without pickling.

Every call is nonblocking and polled with a sleep (`distribution.transport.waits`). A barrier has a name: where ranks
reach different ones, or one does not reach it in time, the error names them."""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ddrl.core.errors import DdrlError
from ddrl.distribution.transport.waits import nothing, wait

if TYPE_CHECKING:
    from mpi4py import MPI

NAME_BYTES = 256
SLICE_MARK = (
    b"slice:"  # in place of a topology: the name of a slice's module that serves the ranks, a newline, its message
)
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

"""The few collective calls of a start and an end, without spinning and without pickling.

Blocking MPI calls spin; hundreds of spinning ranks on a few cores would starve the one they wait for. So every call
here is nonblocking and polled with a sleep."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

NAME_BYTES = 256
SHORTEST = 1e-4  # [s] first sleep between looks at a call that others have not joined yet
LONGEST = 0.1  # [s] last one: hundreds of ranks that look a hundred times a second would slow the one they wait for


def wait_for(request: MPI.Request, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Wait for a nonblocking call; `meanwhile` is done between looks."""
    pause = SHORTEST
    while not request.Test():
        meanwhile()
        time.sleep(pause)
        pause = min(1.3 * pause, LONGEST)


def broadcast(comm: MPI.Comm, data: bytes | None, root: int = 0) -> bytes:
    """Bytes from the root (who gives `data`) to all ranks of `comm`."""
    size = np.array([len(data) if data is not None else 0], np.int64)
    wait_for(comm.Ibcast(size, root))
    buffer = np.frombuffer(bytearray(data if data is not None else int(size[0])), np.uint8)
    if len(buffer):
        wait_for(comm.Ibcast(buffer, root))
    return buffer.tobytes()


def host_names(comm: MPI.Comm) -> list[str]:
    """Name of the machine of every rank."""
    mine = np.zeros(NAME_BYTES, np.uint8)
    name = socket.gethostname().encode()[:NAME_BYTES]
    mine[: len(name)] = np.frombuffer(name, np.uint8)
    everyone = np.zeros((comm.Get_size(), NAME_BYTES), np.uint8)
    wait_for(comm.Iallgather(mine, everyone))
    return [bytes(row[row != 0]).decode() for row in everyone]

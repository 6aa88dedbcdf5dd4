"""Counters tables of the other hosts, mirrored on the trainer's: whole tables, the newest replaces the last.

Written by each relay about every quarter of a second, read by telemetry on the trainer's host. Loss of one would not
matter; none is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.counters import Counters
from ddrl.distribution.transport.requests import Posted

if TYPE_CHECKING:
    from mpi4py import MPI

PERIOD = 0.25  # s


class TableSender:
    """Sends this host's table to rank 0."""

    def __init__(self, comm: MPI.Comm, tag: int, table: Counters) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._tag = tag
        self._table = table
        self._request: Any = MPI.REQUEST_NULL
        self._data = table.table()
        self._next = 0.0
        self._last_one = False
        self.sent = 0

    def progress(self) -> None:
        """Send the table where the last one has left and PERIOD has passed."""
        now = time.monotonic()
        if now >= self._next and self._request.Test():
            self._next = now + PERIOD
            self._send()

    def _send(self) -> None:
        self._data = self._table.table()
        self._request = self._comm.Isend(self._data, 0, self._tag)
        self.sent += 1

    def finish(self) -> bool:
        """Send one last table; True once it has left."""
        if not self._last_one and self._request.Test():
            self._last_one = True
            self._next = float("inf")
            self._send()
        return self._last_one and bool(self._request.Test())

    def posted(self) -> Posted:
        """Requests that stand."""
        return Posted([], [self._request], [self._data])

    def close(self) -> None:
        """Wait for the last send."""
        self._request.Wait()


class TableReceiver:
    """Loads the table that rank i + 1 sends into `mirrors[i]`."""

    def __init__(self, comm: MPI.Comm, tag: int, mirrors: Sequence[Counters]) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._tag = tag
        self._mpi = MPI
        self._mirrors = list(mirrors)
        self._data: list[NDArray[np.float64]] = [np.ascontiguousarray(mirror.table()) for mirror in mirrors]
        self._requests: list[Any] = [comm.Irecv(data, index + 1, tag) for index, data in enumerate(self._data)]
        self._received = [0] * len(self._mirrors)

    def received(self, rank: int) -> int:
        """Tables received from a rank."""
        return self._received[rank - 1]

    def progress(self) -> None:
        """Load the tables that have arrived."""
        indices: list[int] = self._mpi.Request.Testsome(self._requests) or []
        for index in indices:
            self._mirrors[index].load(self._data[index])
            self._received[index] += 1
            self._requests[index] = self._comm.Irecv(self._data[index], index + 1, self._tag)

    def posted(self) -> Posted:
        """Requests that stand."""
        return Posted(self._requests, [], self._data)

    def close(self) -> None:
        """Withdraw the receives."""
        for request in self._requests:
            request.Cancel()
        self._mpi.Request.Waitall(self._requests)

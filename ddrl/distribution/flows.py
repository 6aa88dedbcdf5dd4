"""Experience from a host's lanes to the trainer's host: rows as bytes, in blocks, each once and in order per lane.

A relay's `UplinkSender` drains its host's lanes into a block and sends it in synchronous mode, two blocks at most on
their way: a block has left only when the root has taken it, and the root takes a host's next block only when the last
one fits into that host's lane to the trainer. So a slow trainer fills that lane, then the blocks, then the host's
lanes, and at last its rollouts wait: backpressure reaches them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.board import Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.distribution.requests import Posted

if TYPE_CHECKING:
    from mpi4py import MPI


# -- uplink ------------------------------------------------------------------------------------------------------------

BLOCKS = 2  # per relay, on their way


class UplinkSender:
    """Drains `lanes` and sends to rank 0. A block goes when a quarter of it waits, or `period` seconds after the last.

    A block holds at most `block_bytes`, and no more rows than the lanes.
    """

    def __init__(
        self, comm: MPI.Comm, tag: int, lanes: LaneSet, row_dtype: np.dtype[Any], block_bytes: int, period: float
    ) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._tag = tag
        self._lanes = lanes
        self._mpi = MPI
        self._period = period
        # No more than the lanes hold: rows that wait in blocks are as late as rows that wait in lanes.
        rows = max(1, min(block_bytes // row_dtype.itemsize, lanes.capacity))
        self._blocks = [np.empty(rows, row_dtype) for _ in range(BLOCKS)]
        self._requests: list[Any] = [MPI.REQUEST_NULL] * BLOCKS
        self._enough = max(1, rows // 4)
        self._last = 0.0
        self.rows = self.bytes_sent = 0

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return bool(self._mpi.Request.Testall(self._requests))

    @property
    def pending(self) -> int:
        """Rows that wait in this host's lanes."""
        return self._lanes.pending

    def progress(self, flush: bool = False) -> bool:
        """Send what waits, if a block is free; True if anything went."""
        now = time.monotonic()
        pending = self._lanes.pending
        if not pending or (pending < self._enough and not flush and now - self._last < self._period):
            self._mpi.Request.Testall(self._requests)
            return False
        for index, request in enumerate(self._requests):
            if request.Test():
                block = self._blocks[index]
                rows = self._lanes.drain(block)
                if not rows:
                    return False
                data = block[:rows].view(np.uint8)
                self._requests[index] = self._comm.Issend(data, 0, self._tag)
                self.rows += rows
                self.bytes_sent += data.nbytes
                self._last = now
                return True
        return False

    def posted(self) -> Posted:
        """Requests that stand."""
        return Posted([], self._requests, self._blocks)

    def close(self) -> None:
        """Wait until the last block has been taken."""
        self._mpi.Request.Waitall(self._requests)


class UplinkReceiver:
    """The root's end: one block at a time from each relay, rank i + 1 into `lanes[i]`, in order."""

    def __init__(
        self, comm: MPI.Comm, tag: int, lanes: Sequence[Lane], row_dtype: np.dtype[Any], block_bytes: int
    ) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._tag = tag
        self._lanes = list(lanes)
        self._mpi = MPI
        rows = max(1, block_bytes // row_dtype.itemsize)
        self._blocks = [np.empty(rows, row_dtype) for _ in lanes]
        self._requests: list[Any] = [
            comm.Irecv(block.view(np.uint8), index + 1, tag) for index, block in enumerate(self._blocks)
        ]
        self._waiting: dict[int, NDArray[Any]] = {}  # rows of a block for which there is no room yet
        self.rows = self.bytes_received = self.discarded = self.placed = 0

    @property
    def idle(self) -> bool:
        """Every row received stands in its lane."""
        return not self._waiting

    @property
    def waiting(self) -> int:
        """Rows received for which there is no room yet."""
        return sum(len(rows) for rows in self._waiting.values())

    def progress(self) -> bool:
        """Take blocks and put rows into lanes, as far as there is room; True if anything moved."""
        moved = False
        statuses: list[Any] = []
        for index, status in zip(self._mpi.Request.Testsome(self._requests, statuses) or (), statuses, strict=False):
            length = status.Get_count(self._mpi.BYTE)
            self.bytes_received += length
            rows = length // self._blocks[index].dtype.itemsize
            self.rows += rows
            self._waiting[index] = self._blocks[index][:rows]
            moved = True
        for index in list(self._waiting):
            rows = self._waiting[index]
            lane = self._lanes[index]
            room = min(len(rows), lane.capacity - len(lane))
            if room:
                moved = True
                placed = lane.push(rows[:room])
                self.placed += placed
                rows = rows[placed:]
            if len(rows) and lane.closed:  # its consumer takes no more
                self.discarded += len(rows)
                rows = rows[:0]
            if len(rows):
                self._waiting[index] = rows
            else:
                self._take_next(index)
        return moved

    def discard(self) -> int:
        """Give up rows for which there is no room, because nobody drains the lanes any more; returns how many.
        `discarded` counts all of them."""
        lost = self.waiting
        self.discarded += lost
        for index in list(self._waiting):
            self._take_next(index)
        return lost

    def _take_next(self, index: int) -> None:
        self._waiting.pop(index, None)
        self._requests[index] = self._comm.Irecv(self._blocks[index].view(np.uint8), index + 1, self._tag)

    def posted(self) -> Posted:
        """Requests that stand."""
        return Posted(self._requests, [], self._blocks)

    def close(self) -> None:
        """Withdraw the receives."""
        for request in self._requests:
            if request:
                request.Cancel()
        self._mpi.Request.Waitall(self._requests)


# -- tables ------------------------------------------------------------------------------------------------------------
# Counters tables of the other hosts, mirrored on the trainer's: whole tables, the newest replaces the last.
#
# Written by each relay about every quarter of a second, read by telemetry on the trainer's host. Loss of one would not
# matter; none is lost.


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

"""The collectors of all hosts as one: each host has a starter, its keeper.

Messages to and from a starter elsewhere travel between relays. A host's rows arrive mixed, in blocks of their own, so a
report on a worker is read once the rows that the worker had written by then are there.
Times are converted: clocks of hosts differ by a fixed time, known as exactly as the fastest message was fast.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.channels.board import Command
from ddrl.channels.lane import LaneSet
from ddrl.core.errors import JobFailed
from ddrl.core.roles import Role
from ddrl.distribution.membership import Orders, Report
from ddrl.pool.collectors import COLLECTORS, Down, Ended, Sent, StarterLink, Up, host_clock
from ddrl.pool.prewarm import Corrected, Order, Start
from ddrl.run.topology import HostChannels, read_failure
from ddrl.run.training import Rows

ROOM_TIMEOUT = 60.0  # [s] for the root relay to take an order
BUFFER_BYTES = 1 << 22  # of rows that are parted at once


class WorkerRows:
    """Rows of one worker of another host that arrived and were not taken yet."""

    def __init__(self) -> None:
        self.received = 0  # rows ever
        self._pieces: deque[NDArray[Any]] = deque()

    def add(self, rows: NDArray[Any]) -> None:
        """Append rows [n]."""
        self.received += len(rows)
        self._pieces.append(rows)

    def pop(self, out: NDArray[Any]) -> int:
        count = 0
        while self._pieces and count < len(out):
            piece = self._pieces.popleft()
            taken = min(len(piece), len(out) - count)
            out[count : count + taken] = piece[:taken]
            count += taken
            if taken < len(piece):
                self._pieces.appendleft(piece[taken:])
        return count


class Clocks:
    """Times of other hosts by this host's clock, and back."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._ahead: dict[int, float] = {}  # seconds of this host's clock before the other one's
        self._starts: dict[int, tuple[float, float]] = {}  # by worker: of its newest process, there and here

    def note(self, report: Report) -> None:
        """Learn from a message how clocks differ: at most by the time that it seems to have taken."""
        ahead = 0.0 if report.clock == self._own else report.received - report.sent
        self._ahead[report.host] = min(ahead, self._ahead.get(report.host, math.inf))

    def here(self, host: int, message: Up) -> Up:
        """A message with times by this host's clock. The start of a process stays what it was at first."""
        ahead = self._ahead[host]
        if isinstance(message, Ended):
            return msgspec.structs.replace(message, end=message.end + ahead)
        if isinstance(message, Corrected):
            return message
        if self._starts.get(message.worker, (math.nan, 0.0))[0] != message.start:
            self._starts[message.worker] = message.start, message.start + ahead
        start = self._starts[message.worker][1]
        return msgspec.structs.replace(message, start=start, ready=message.ready + ahead, sent=message.sent + ahead)

    def there(self, host: int, start: Start) -> Start:
        """A start with its time by the other host's clock."""
        return start if start.at is None else msgspec.structs.replace(start, at=start.at - self._ahead.get(host, 0.0))


class HostStarters:
    """`Starters` of a task with several hosts. own: of this host."""

    def __init__(self, channels: HostChannels, own: StarterLink) -> None:
        topology = channels.topology
        self._run_id = topology.run_id
        self._own = own
        self._board = channels.board
        relay = next(rank for rank in topology.on_host(0) if rank.role is Role.RELAY)
        self._relay = channels.counters.row(topology.row_of(relay))
        self._relay_pidfd = -1  # of a relay that lives
        self._orders = channels.orders
        self._reports = channels.reports
        self._hosts = topology.hosts
        self._host_of = [rank.host for rank in topology.ranks if rank.role is Role.ROLLOUT]
        self._lanes = LaneSet(channels.remote_lanes)
        self._buffer = np.zeros(max(64, BUFFER_BYTES // topology.schema.dtype.itemsize), topology.schema.dtype)
        self._streams = topology.config.env.num_envs  # of a worker
        elsewhere = [worker for worker, host in enumerate(self._host_of) if host]
        self._rows = {worker: WorkerRows() for worker in elsewhere}
        self._held: dict[int, deque[Up]] = {worker: deque() for worker in elsewhere}  # their rows are not there yet
        self._clocks = Clocks(host_clock())
        self.lanes: Sequence[Rows] = [
            self._rows[worker] if host else channels.lanes[worker] for worker, host in enumerate(self._host_of)
        ]

    def send(self, message: Down) -> None:
        with self._cause_first():
            self._own.send(self._part(message, 0))
        for host in range(1, self._hosts):
            assert self._orders is not None
            line = COLLECTORS.encode(self._part(message, host)).tobytes()
            if not self._orders.send(Orders(host, line), ROOM_TIMEOUT):
                raise JobFailed(f"the root relay hangs: for {ROOM_TIMEOUT:g} s it has taken no order for collectors")

    def receive(self) -> list[Up]:
        """Within a round this is the only check of the job."""
        self._check_job()
        with self._cause_first():
            own = self._own.receive()
        return [*own, *self._receive_others()]

    def wait(self, timeout: float) -> None:
        bell = self._board.trainer_bell
        seen = bell.value
        if not (self._own.wait(0.0) or self._lanes.pending or (self._reports is not None and self._reports.pending)):
            bell.wait(seen, timeout)

    def stop(self) -> list[Up]:
        """Those of other hosts end with the job's command."""
        messages = [*self._own.stop(), *self._receive_others()]
        if self._relay_pidfd >= 0:
            os.close(self._relay_pidfd)
        for held in self._held.values():
            messages.extend(held)
        return messages

    def _check_job(self) -> None:
        """JobFailed where the job has failed elsewhere."""
        if self._board.command == Command.FAIL:
            raise JobFailed(read_failure(self._run_id, 0))
        if self._relay_has_ended():
            self._relay["ended"].set(1.0)  # so that nobody waits for its last rows
            raise JobFailed("the root relay has ended, and with it the other hosts' collectors")

    def _relay_has_ended(self) -> bool:
        """Whether it has said so, or has died. It is a process of the launcher, so no keeper watches it."""
        pid = self._relay["pid"].value
        try:
            if self._relay_pidfd < 0 and not math.isnan(pid):
                self._relay_pidfd = os.pidfd_open(int(pid))
        except ProcessLookupError:
            return True
        died = self._relay_pidfd >= 0 and bool(select.select([self._relay_pidfd], [], [], 0.0)[0])
        return died or self._relay["ended"].value == 1.0

    @contextlib.contextmanager
    def _cause_first(self) -> Generator[None]:
        """This host's starter ends where the job has failed elsewhere: that is the reason then."""
        try:
            yield
        except JobFailed:
            self._check_job()
            raise

    def _part(self, message: Down, host: int) -> Down:
        """What a host's starter has to know of a message."""
        if isinstance(message, Order):
            starts = [
                self._clocks.there(host, start) if of == host else Start()
                for start, of in zip(message.starts, self._host_of, strict=True)
            ]
            return msgspec.structs.replace(message, starts=tuple(starts))
        return msgspec.structs.replace(
            message, workers=tuple(worker for worker in message.workers if self._host_of[worker] == host)
        )

    def _receive_others(self) -> list[Up]:
        for report in self._reports.receive() if self._reports is not None else ():
            assert isinstance(report, Report)
            self._clocks.note(report)
            said = COLLECTORS.decode(report.line)
            assert isinstance(said, Up)
            message = self._clocks.here(report.host, said)
            self._held[message.worker].append(message)
        while count := self._lanes.drain(self._buffer):
            rows = self._buffer[:count]
            workers = rows["stream"] // self._streams
            for worker in np.unique(workers).tolist():
                self._rows[worker].add(rows[workers == worker])
        messages: list[Up] = []
        for worker, held in self._held.items():
            while held and _rows_of(held[0]) <= self._rows[worker].received:
                messages.append(held.popleft())
        return messages


def _rows_of(message: Sent | Ended | Corrected) -> int:
    return 0 if isinstance(message, Corrected) else message.rows

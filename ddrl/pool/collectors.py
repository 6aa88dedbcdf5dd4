"""Collectors: processes that collect the data of one round and end, as forks of their host's keeper.

The trainer, or elsewhere the host's relay, sends `Order` and `Begin` to the keeper, which starts collectors at the
ordered times (`CollectorForks`) and reports what they did (`StarterLink`). A fork has all imports that a collector
needs, so it starts in the time that its environment takes.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ddrl.channels.board import Board
from ddrl.channels.mailbox import Mailbox, MailboxReader
from ddrl.channels.wire import SocketEnd, Wire
from ddrl.core.errors import JobFailed
from ddrl.core.metrics import Phase
from ddrl.core.roles import Assignment, Role
from ddrl.pool import PoolConfig
from ddrl.pool.prewarm import Corrected, Order, Schedule, Unsent
from ddrl.run.keeper import Child, Keeper, Place
from ddrl.run.keeper import Ended as ProcessEnded
from ddrl.run.members import GOING, exit_status, make_worker, member_seed
from ddrl.run.topology import START_TIMEOUT, HostChannels, describe

# -- messages ----------------------------------------------------------------------------------------------------------
# What a trainer and its collectors' starters send to each other, each message one JSON object.
#
# Down: `Order`, how the collectors of a round are to start; `Begin`, its parameters are there. Up: `Sent`, `Ended`,
# `Corrected`. Times are CLOCK_MONOTONIC [s], which processes of one host share; `clock` names the host's.


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The parameters of `round` are there: collectors of these workers start now, unless they have."""

    round: int
    workers: tuple[int, ...]


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A collector has sent its data of `round`, all of them. start: of its process; ready: it could act; rows: that its
    worker's lane has ever held."""

    round: int
    worker: int
    start: float
    ready: float
    sent: float
    clock: str
    rows: int = 0


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A collector's process has ended in `round`, with a status as Popen's; words: what it printed as errors; rows: as
    in `Sent`. begun: `Begin` of the round had arrived; else that will start another process."""

    round: int
    worker: int
    end: float
    status: int
    cpu_seconds: float
    words: str
    rows: int = 0
    begun: bool = True


Down = Order | Begin
Up = Sent | Ended | Corrected


def host_clock() -> str:
    """Names the clock of this host since it started: times of equal names can be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def earliest(arrived: Sequence[Sent]) -> Sent:
    """Whose data are recorded next: those sent first, or those that arrived first where clocks cannot be compared.

    arrived: in the order of arrival."""
    if len({sent.clock for sent in arrived}) > 1:
        return arrived[0]
    return min(arrived, key=lambda sent: sent.sent)


Message = Down | Up
COLLECTORS: Wire[Message] = Wire("the collectors", Message)
KEEPER_ENDED = "the keeper of this host has ended, and with it the collectors"


# -- one collector -----------------------------------------------------------------------------------------------------
# It makes its environments, waits for its round's parameters, takes pool.collect_steps steps, sends them, and ends; or,
# if it is ordered so, stays for the next round. It sends into the lane of its worker, which outlives it. What it
# collects depends on run.seed, its worker, the round and the parameters alone, so that a new process collects the same
# again.

COMMAND_PERIOD = 1.0  # [s] in which the board's command is read; its bell is rung too


def collect(
    channels: HostChannels, assignment: Assignment, sent: Sent, decision: int, report: Callable[[Sent], object]
) -> None:
    """Collect the round that `sent` names, and those after it while `decision`, a pipe, gives a byte for each; end of
    file ends it. `report` is called once a round's data are sent."""
    board = channels.board
    mailbox = channels.mailbox
    config = channels.topology.config
    assert mailbox is not None
    place = channels.topology.row_of(assignment)
    reader = MailboxReader(mailbox, place)
    worker = make_worker(channels, assignment, channels.counters_row(assignment), reader)
    round = sent.round
    stays = True
    try:
        while stays:
            worker.restart(member_seed(config.run.seed, assignment.index, round))
            ready = time.monotonic()
            if not _await_parameters(board, mailbox, round):
                return
            mailbox.reader(place)  # taken only now: the worker's collector of the round before may have had it
            worker.refresh()
            for _ in range(config.section(PoolConfig).collect_steps):
                if board.command not in GOING:
                    return
                worker.step()
            worker.report()
            worker.release()
            reader.release()
            report(Sent(round, sent.worker, sent.start, ready, time.monotonic(), sent.clock))
            stays = bool(os.read(decision, 1))
            round += 1
    finally:
        worker.env.close()


def _await_parameters(board: Board, mailbox: Mailbox, version: int) -> bool:
    """False where the board says stop."""
    while True:
        seen = board.rollout_bell.value
        if board.command not in GOING:
            return False
        if mailbox.newest >= version:
            return True
        board.rollout_bell.wait(seen, COMMAND_PERIOD)


# -- all collectors of a host ------------------------------------------------------------------------------------------

STOP_TIMEOUT = 10.0  # [s] a collector may be inside a long environment step when it is to stop


@dataclass
class _Process:
    """A collector that runs. round: that it collects, or waits for."""

    child: Child
    worker: int
    round: int
    decision: int  # end of the pipe to it; -1: closed, it ends after its round
    has_sent: bool = False
    stays: bool = False  # it was ordered to stay after its round


class CollectorForks:
    """The collectors of a host, seen from its keeper. `started` is called with the row of a worker in the counters when
    its collector starts to be watched for silence: it is in phase WAITING while nothing is expected of it."""

    def __init__(
        self, keeper: Keeper, channels: HostChannels, trainer: SocketEnd[Message], started: Callable[[int], object]
    ) -> None:
        self._keeper = keeper
        self._channels = channels
        self._trainer = trainer
        self._started = started
        topology = channels.topology
        ranks = [rank for rank in topology.on_host(channels.host) if rank.role is Role.ROLLOUT]
        self._ranks: dict[int, Assignment] = {rank.index: rank for rank in ranks}
        self._lanes = {index: channels.attach_lane(index) for index in self._ranks}  # to count their rows
        self._rows = {index: topology.row_of(rank) for index, rank in self._ranks.items()}
        self._schedule = Schedule()
        self._processes: dict[int, _Process] = {}  # by place
        self._next_place = len(topology.ranks)  # each process has a place of its own
        self._newest = -1  # round whose parameters are there
        self._reports, self._report = SocketEnd.pair(COLLECTORS)  # from the collectors
        self._clock = host_clock()
        self._kill_at = math.inf
        for rank in ranks:
            channels.name_row(rank)["phase"].set(Phase.WAITING)
        keeper.watch(trainer.fileno(), self._read_orders)
        keeper.watch(self._reports.fileno(), self._read_reports)

    def timeout(self) -> float:
        """Seconds until `start_due` must be called although nothing happens; inf: never."""
        return max(0.0, min(self._schedule.next_time(self._unsent), self._kill_at) - time.monotonic())

    def start_due(self) -> None:
        """Start those that are to start by now."""
        now = time.monotonic()
        if now >= self._kill_at:
            for process in self._processes.values():
                process.child.send(signal.SIGKILL)
        for round, worker in self._schedule.due(now, self._unsent):
            self._start(round, worker)

    def note_end(self, child: Child, ended: ProcessEnded) -> bool:
        """Report the end of a process; False where it is no collector."""
        process = self._processes.get(child.place)
        if process is None:
            return False
        self._read_reports()  # what it sent before it ended
        del self._processes[child.place]
        self._close_decision(process)
        rows = self._lanes[process.worker].pushed
        how = ended.status, ended.cpu_seconds, ended.words
        self._send(Ended(process.round, process.worker, ended.at, *how, rows, process.round <= self._newest))
        self._set_phase(process.worker)
        self._end_link()
        return True

    def end(self) -> None:
        """Let each end after its round."""
        for process in self._processes.values():
            self._close_decision(process)

    def acting(self, rank: int) -> Child | None:
        """The collector of a worker's rank of which data are expected."""
        return next((one.child for one in self._processes.values() if one.child.rank == rank and self._acts(one)), None)

    @property
    def _unsent(self) -> Unsent:
        return {(one.round, one.worker) for one in self._processes.values() if not one.has_sent}

    def _acts(self, process: _Process) -> bool:
        return not process.has_sent and process.round <= self._newest

    def _set_phase(self, worker: int) -> None:
        acts = any(self._acts(one) for one in self._processes.values() if one.worker == worker)
        self._channels.counters.row(self._rows[worker])["phase"].set(Phase.RUNNING if acts else Phase.WAITING)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _read_orders(self) -> None:
        for message in self._trainer.receive():
            if isinstance(message, Order):
                self._schedule.order(message)
                for process in self._processes.values():
                    self._decide(process)
            elif isinstance(message, Begin):
                self._begin(message)
        if self._trainer.closed:
            self._keeper.unwatch(self._trainer.fileno())
            self._kill_at = time.monotonic() + STOP_TIMEOUT
            self.end()
            self._end_link()

    def _begin(self, begin: Begin) -> None:
        self._schedule.begin(begin.round)
        is_restart = begin.round == self._newest  # of collectors that have died in it
        self._newest = begin.round
        for worker in begin.workers:
            if not any(one.worker == worker and one.round == begin.round for one in self._processes.values()):
                self._start(begin.round, worker)
            if is_restart:
                self._channels.counters.row(self._rows[worker])["restarts"].add(1)
            self._started(self._rows[worker])
            self._set_phase(worker)

    def _read_reports(self) -> None:
        for report in self._reports.receive():
            assert isinstance(report, Sent)
            sent = msgspec.structs.replace(report, rows=self._lanes[report.worker].pushed)
            for process in self._processes.values():
                if (process.worker, process.round) == (sent.worker, sent.round):
                    process.has_sent = True
                    self._advance(process)
            self._set_phase(sent.worker)
            for corrected in self._schedule.sent(sent.round, sent.worker, sent.sent, time.monotonic()):
                self._send(corrected)
            self._send(sent)

    def _send(self, message: Up) -> None:
        self._trainer.send(message)
        self._channels.drain_bell.ring()

    def _end_link(self) -> None:
        """With the last process after the end of the orders: nothing more is reported."""
        if self._trainer.closed and not self._processes:
            self._kill_at = math.inf
            self._trainer.end()
            self._channels.drain_bell.ring()

    # -- processes -----------------------------------------------------------------------------------------------------

    def _decide(self, process: _Process) -> None:
        """Let a collector know what follows its round, once that is ordered."""
        start = self._schedule.ordered(process.round + 1, process.worker)
        if start is None or process.stays or process.decision < 0:
            return
        if not start.stays:
            self._close_decision(process)
            return
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            os.write(process.decision, b"+")
        process.stays = True
        self._advance(process)

    def _advance(self, process: _Process) -> None:
        """A collector that has sent and stays is one of the next round."""
        if process.stays and process.has_sent:
            process.round = process.round + 1
            process.has_sent = False
            process.stays = False
            self._decide(process)

    def _start(self, round: int, worker: int) -> None:
        if self._channels.mailbox is None and self._channels.attach_policy(START_TIMEOUT) is None:
            return  # the job has ended
        begin = time.monotonic()
        reading, decision = os.pipe()
        rank = self._ranks[worker]
        sent = Sent(round, worker, begin, begin, begin, self._clock)

        def work() -> int:
            os.close(decision)
            for process in self._processes.values():
                self._close_decision(process)  # else another collector's pipe would not end with this process
            return self._collect(rank, sent, reading)

        place = self._next_place
        self._next_place += 1
        self._keeper.places[place] = Place(rank.rank, Role.ROLLOUT, work)
        try:
            child = self._keeper.start(place)
        finally:
            del self._keeper.places[place]
            os.close(reading)
        self._processes[place] = _Process(child, worker, round, decision)
        self._decide(self._processes[place])

    def _collect(self, rank: Assignment, sent: Sent, decision: int) -> int:
        """In a fork: the exit status."""
        try:
            collect(self._channels.in_fork(), rank, sent, decision, self._report.send)
        except BaseException as error:
            print(describe(error, "a collector"), file=sys.stderr)
            return exit_status(error, self._channels.topology.config)
        return 0

    def _close_decision(self, process: _Process) -> None:
        if process.decision >= 0:
            os.close(process.decision)
            process.decision = -1


def fork_collectors(
    keeper: Keeper, channels: HostChannels, started: Callable[[int], object]
) -> tuple[CollectorForks, int]:
    """The collectors of a host, and the descriptor of the socket over which `StarterLink` orders them."""
    own, other = SocketEnd.pair(COLLECTORS)
    return CollectorForks(keeper, channels, own, started), other.detach()


# -- the other end -----------------------------------------------------------------------------------------------------


class StarterLink:
    """A host's starter of collectors, its keeper, as the trainer or the host's relay sees it."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the socket, which this object closes."""
        self.clock = host_clock()
        self._socket = SocketEnd.of(descriptor, COLLECTORS)
        self._ending = False

    def send(self, message: Down) -> None:
        """Send a message; JobFailed where the keeper has ended; nothing after `end`."""
        if not self._ending and not self._socket.send(message):
            raise JobFailed(KEEPER_ENDED)

    def receive(self) -> list[Up]:
        """Messages since the last call, without waiting. JobFailed where the keeper has ended before `end`."""
        messages = [message for message in self._socket.receive() if isinstance(message, Up)]
        if self.ended and not messages and not self._ending:
            raise JobFailed(KEEPER_ENDED)
        return messages

    def write(self, line: bytes) -> None:
        """As `send`, of a message as bytes."""
        message = COLLECTORS.decode(line)
        if isinstance(message, Down):
            self.send(message)

    def read(self) -> list[bytes]:
        """As `receive`, messages as bytes."""
        return [COLLECTORS.encode(message).tobytes() for message in self.receive()]

    def wait(self, timeout: float) -> bool:
        """Sleep until there is a message, at most `timeout` [s]; whether there is one."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    @property
    def ended(self) -> bool:
        """Whether all collectors have ended and everything about them was read."""
        return self._socket.closed

    def end(self) -> None:
        """Ask for the end of all collectors."""
        self._ending = True
        self._socket.end()

    def stop(self, timeout: float = 2 * STOP_TIMEOUT) -> list[Up]:
        """End all collectors and wait for it, at most `timeout` [s]; the messages that were left."""
        self.end()
        deadline = time.monotonic() + timeout
        messages = self.receive()
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
            messages += self.receive()
        self._socket.close()
        return messages

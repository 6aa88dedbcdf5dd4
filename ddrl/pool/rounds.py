"""Learning in rounds, with collectors that end once they have sent their data (pool.collectors).

A round, whose number is the version that its collectors act with:
  1. its parameters are published; each of W collectors takes a fixed number of steps and sends them;
  2. when the first worker's data are there, learning begins: a pool's device is taken with the first gradient. Workers
     follow one another, in the order of `pool.gradient_order`; one's data are recorded and its gradient is computed
     while others still collect, never two at once;
  3. an update is the mean of one gradient a worker, weighted by draws, all at the same parameters: the gradient of one
     batch of all workers' draws. The first update awaits all workers; further ones follow as long as the source of
     experience gives draws (replay.samples_per_insert, an algorithm's epochs);
  4. the device is given back, then the next parameters are published.

A collector that dies is replaced, at most rollout.restarts times a worker and round; it collects the same again, and
the device is given back until then. One that ends with an error ends the task, unless rollout.on_error is restart.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ddrl.channels.board import Command
from ddrl.channels.lane import LaneSet
from ddrl.core.errors import JobFailed
from ddrl.core.files import open_to_append
from ddrl.core.roles import Role
from ddrl.core.specs import Array
from ddrl.distribution.membership import Orders, Report
from ddrl.pool import PoolConfig
from ddrl.pool.collectors import COLLECTORS, Begin, Down, Ended, Sent, StarterLink, Up, earliest, host_clock
from ddrl.pool.prewarm import Corrected, Order, Planner, Start
from ddrl.run.keeper import ENVIRONMENT_FAILED
from ddrl.run.topology import HostChannels, read_failure
from ddrl.run.training import STATISTICS_PERIOD, Move, Rows, Training

if TYPE_CHECKING:
    from ddrl.learner.part import Gradient, GradientMean
    from ddrl.run.task import Task

# -- collectors of several hosts ---------------------------------------------------------------------------------------
# Each host has a starter, its keeper. Messages to and from one elsewhere travel between relays. A host's rows arrive
# mixed, in blocks of their own, so a report on a worker is read once the rows that the worker had written by then are
# there. Times are converted: clocks of hosts differ by a fixed time, known as exactly as the fastest message was fast.

ROOM_TIMEOUT = 60.0  # [s] for the root relay to take an order
BUFFER_BYTES = 1 << 22  # of rows that are parted at once


class WorkerRows:
    """Rows of one worker of another host that arrived and were not taken yet."""

    def __init__(self) -> None:
        self.received = 0  # rows ever
        self._pieces: deque[Array] = deque()

    def add(self, rows: Array) -> None:
        """Append rows [n]."""
        self.received += len(rows)
        self._pieces.append(rows)

    def pop(self, out: Array) -> int:
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
    """Starts the collectors of a task with several hosts, as `StarterLink` does those of one. own: of this host."""

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


# -- the trainer's end -------------------------------------------------------------------------------------------------

MAX_LINES = 100_000  # of collectors in a trace; the sums count all


@dataclass
class Trace:
    """Files of what collectors did, a JSON object a line; times count from `began` [s, CLOCK_MONOTONIC].

    FOLDER/collectors.jsonl: task, round, worker, start, ready, parameters, sent, end (null: it stayed for the next
    round). FOLDER/instructions.jsonl: task, round, issued, start by worker (null: it stays, or starts when its
    parameters are there). Rounds count from `first`."""

    folder: Path
    task: str
    began: float
    first: int = 0
    _lines: int = field(default=0, repr=False)

    def write(self, name: str, round: int, **times: Any) -> None:
        """Append a line in one write: several tasks write to one file."""
        if self._lines >= MAX_LINES:
            return
        self._lines += 1
        line = {"task": self.task, "round": round - self.first}
        line |= {key: self._since(value) if key != "worker" else value for key, value in times.items()}
        with open_to_append(self.folder / name) as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _since(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._since(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
        return None if value is None or math.isnan(value) else round(value - self.began, 6)


class Collectors:
    """The trainer's end of its collectors: orders to those who start them, and what they did. `trace` may be replaced
    before the first round."""

    def __init__(self, starter: StarterLink | HostStarters, config: PoolConfig, workers: int, trace: Trace) -> None:
        self.workers = workers
        self.trace = trace
        self.planner = Planner(workers, config.collectors, config.delay_cost)
        self.cpu_seconds = 0.0  # of collectors that have ended, their start included
        self._starter = starter
        self._has_begun = False
        self._unwritten: dict[tuple[int, int], Sent] = {}  # by round and worker: sent, their process not ended yet

    def begin(self, round: int, now: float) -> None:
        """The parameters of a round are about to be published: its collectors act, and orders for the next round go
        out."""
        if not self._has_begun:
            self.trace.first = round
            self._has_begun = True
        orders = self.planner.begin(round, now)
        self._starter.send(Begin(round, tuple(range(self.workers))))
        for order in orders:
            self._starter.send(order)
            starts = [start.at for start in order.starts]
            self.trace.write("instructions.jsonl", order.round, issued=time.monotonic(), start=starts)

    def start_again(self, round: int, worker: int) -> None:
        """The worker's collector was killed before it had sent."""
        self._starter.send(Begin(round, (worker,)))

    def receive(self) -> list[Sent | Ended]:
        """Messages since the last call, corrections apart; never waits."""
        messages = self._starter.receive()
        for message in messages:
            self._note(message)
        return [message for message in messages if not isinstance(message, Corrected)]

    def wait(self, timeout: float) -> None:
        """Sleep until there is something to receive, at most `timeout` [s]."""
        self._starter.wait(timeout)

    def close(self) -> None:
        """End them all."""
        for message in self._starter.stop():
            self._note(message)
        for key in sorted(self._unwritten):
            self._write(self._unwritten[key], None)
        self._unwritten.clear()

    def figures(self) -> dict[str, float]:
        """Sums for a summary: counts, and seconds."""
        predicted = self.planner.predicted
        sums: dict[str, float] = asdict(self.planner.warmth)
        for name in ("corrections", "late_corrections"):
            sums[name] = getattr(predicted, name)
        for name in ("collectors", "hits", "idle_seconds", "late_seconds"):
            sums[f"predicted_{name}"] = getattr(predicted, name)
        return {**sums, "collector_cpu_seconds": self.cpu_seconds}

    def _note(self, message: Up) -> None:
        match message:
            case Corrected():
                self.planner.note_corrected(message)
            case Sent(round=round, worker=worker):
                if self.planner.parameters(round) is None:
                    return
                if self.planner.note_sent(round, worker, message.start, message.ready, message.sent):
                    earlier = self._unwritten.pop((round - 1, worker), None)  # the process that stayed had not ended
                    if earlier is not None:
                        self._write(earlier, None)
                self._unwritten[round, worker] = message
            case Ended(round=round, worker=worker):
                self.cpu_seconds += message.cpu_seconds
                self.planner.note_end(worker, message.end)
                sent = self._unwritten.pop((round, worker), None)
                if sent is not None:
                    self._write(sent, message.end)

    def _write(self, sent: Sent, end: float | None) -> None:
        self.trace.write(
            "collectors.jsonl",
            sent.round,
            worker=sent.worker,
            start=sent.start,
            ready=sent.ready,
            parameters=self.planner.parameters(sent.round),
            sent=sent.sent,
            end=end,
        )


def go_in_rounds(task: Task, collectors: int) -> Collectors:
    """Let a task learn in rounds; its collectors, which the caller closes. `collectors`: descriptor of the socket that
    orders those of this host."""
    link = StarterLink(collectors)
    starters: StarterLink | HostStarters = link
    lanes: Sequence[Rows] = list(task.channels.lanes.values())
    if task.channels.orders is not None:
        hosts = HostStarters(task.channels, link)
        starters = hosts
        lanes = hosts.lanes
    folder = task.directory.path
    trace = Trace(folder, folder.name, time.monotonic())
    made = Collectors(starters, task.config.section(PoolConfig), task.topology.rollouts, trace)
    task.training.follow(Rounds(task.training, made, lanes))
    return made


class Rounds:
    """The cycle that the module describes, a `RoundCycle` of training. lanes: of the workers, by worker."""

    def __init__(self, training: Training, collectors: Collectors, lanes: Sequence[Rows]) -> None:
        self.collectors = collectors
        self.number = -1
        self._training = training
        self._lanes = lanes
        self._by_worker = training.config.section(PoolConfig).gradient_order == "worker"
        self._arrived: list[Sent] = []  # this round's, not recorded yet
        self._recorded: set[int] = set()
        self._deaths = Counter[int]()  # of collectors in this round, by worker
        if training.state.policy_version >= 0:  # of a checkpoint, which is published again: its round begins anew
            training.state.policy_version -= 1

    def begin(self, version: int) -> None:
        self.number = version
        self._deaths.clear()
        self._recorded.clear()
        self._training.source.cut()  # the next collectors begin new episodes
        self.collectors.begin(version, time.monotonic())

    def wait(self, timeout: float) -> None:
        """It counts as a sign of life within a round: the keepers report collectors that are late."""
        self.collectors.wait(timeout)
        self._training.report()

    def moves(self) -> Iterator[Move]:
        training = self._training
        while True:
            yield Move.DRAIN
            self._receive()
            training.idle = training.ending or self._next() is None
            if not training.idle:
                yield from self._learn()
                yield Move.PUBLISH
                training.publish()

    def _learn(self) -> Iterator[Move]:
        """All updates of a round."""
        shares: list[Iterator[Any]] = []  # by worker, in their order: the batches that are drawn for it
        first = True
        while True:
            batches = [] if first else [next(share, None) for share in shares]
            if not first and all(batch is None for batch in batches):
                return
            yield from self._update(batches, shares, gather=first)
            first = False

    def _update(self, batches: list[Any], shares: list[Iterator[Any]], *, gather: bool) -> Iterator[Move]:
        """One update from `batches`, None where a worker has none. gather: fill `batches` and `shares` on the way, as
        the workers' data arrive."""
        training = self._training
        learner = self._training.learner
        with_statistics = training.state.updates % STATISTICS_PERIOD == 0
        steps: list[tuple[Gradient, Any]] = []
        for part in learner.parts:
            mean = learner.mean()
            done = 0
            while done < (len(self._lanes) if gather else len(batches)):
                if done == len(batches):
                    sent = self._next()
                    if sent is None:
                        training.idle = True
                        yield Move.RECORD
                        self._receive()
                        continue
                    training.idle = False
                    self._record(sent)
                    shares.append(self._draws())
                    batches.append(next(shares[-1], None))
                if batches[done] is not None:
                    yield from self._gradient(batches[done], part, mean, with_statistics)
                done += 1
            if mean.gradient is not None:
                yield Move.APPLY
                begin = time.perf_counter()
                steps.append((mean.gradient, learner.apply(mean.gradient)))
                training.count("learn_seconds", time.perf_counter() - begin)
        if steps:
            self._account([batch for batch in batches if batch is not None], steps)

    def _gradient(self, batch: Any, part: str, mean: GradientMean, with_statistics: bool) -> Iterator[Move]:
        yield Move.GRADIENT
        begin = time.perf_counter()
        gradient = self._training.learner.gradient(batch, part, with_statistics)
        if gradient is not None:
            mean.add(gradient)
        self._training.count("learn_seconds", time.perf_counter() - begin)

    def _account(self, batches: Sequence[Any], steps: list[tuple[Gradient, Any]]) -> None:
        training = self._training
        update = training.learner.outcome(steps)
        training.show(update.figures)
        priorities: Sequence[Any] = [None] * len(batches)
        if update.priority is not None:
            priorities = np.split(update.priority, len(batches))  # draws of one size
        for batch, priority in zip(batches, priorities, strict=True):
            training.account(batch, priority)
        training.updated()

    def _draws(self) -> Iterator[Any]:
        """A worker's share of the round's draws: as many as the source gives when it is this worker's turn."""
        source = self._training.source
        while source.pacing.ready():
            yield from self._training.learner.prepare(source)

    # -- data ----------------------------------------------------------------------------------------------------------

    def _next(self) -> Sent | None:
        """Whose data are recorded next; None: they are not there yet."""
        if self._by_worker:
            due = len(self._recorded)
            return next((sent for sent in self._arrived if sent.worker == due), None)
        return earliest(self._arrived) if self._arrived else None

    def _record(self, sent: Sent) -> None:
        self._arrived.remove(sent)
        self._recorded.add(sent.worker)
        self._training.empty(self._lanes[sent.worker])

    def _receive(self) -> None:
        for message in self.collectors.receive():
            if isinstance(message, Sent):
                self._arrived.append(message)
            else:
                self._note_end(message)

    def _note_end(self, ended: Ended) -> None:
        """A collector's process has ended: as it should, or it is replaced, or the task fails."""
        if ended.status > 0 and ended.status != ENVIRONMENT_FAILED:
            raise JobFailed(f"collector {ended.worker} ended with status {ended.status}:\n{ended.words}")
        has_sent = ended.worker in self._recorded or any(sent.worker == ended.worker for sent in self._arrived)
        if ended.round != self.number or has_sent or not ended.begun:
            return
        if ended.status == ENVIRONMENT_FAILED:
            how = "had an exception in its environment"
        else:
            how = f"was killed by {signal.Signals(-ended.status).name}" if ended.status else "ended before it had sent"
        self._deaths[ended.worker] += 1
        limit = self._training.config.rollout.restarts
        if self._deaths[ended.worker] > limit:
            words = f":\n{ended.words}" if ended.words else ""
            after = f"after {limit} others in round {self.number} (rollout.restarts)"
            raise JobFailed(f"collector {ended.worker} {how}, {after}{words}")
        self._training.empty(self._lanes[ended.worker], record=False)
        if self._training.lender is not None:
            self._training.lender.pause()
        self.collectors.start_again(self.number, ended.worker)

"""Starts and ends the collectors of a task on its host: `python -m ddrl.pool.collectors RUN_ID HOST PARENT`.

Orders come in by stdin, reports go out by stdout (`ddrl.pool.collectors`). It keeps the planned times, moves those
that count from a worker's own data once these are sent, and forks: it has loaded what every collector needs, so that a
collector starts in the time that its environment takes. It computes nothing itself, has one thread, and sleeps in
between.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from ddrl.channels.board import Board, Command
from ddrl.channels.mailbox import Mailbox, MailboxReader, Pin
from ddrl.core.errors import JobFailed
from ddrl.core.roles import Assignment, Role
from ddrl.pool.settings import PoolConfig
from ddrl.run.members import GOING, START_TIMEOUT, make_worker, member_seed
from ddrl.run.process import die_with, ignore_interrupts, interrupts_held_back, step_back
from ddrl.run.topology import HostChannels, describe

# -- orders ------------------------------------------------------------------------------------------------------------
# What a trainer and the starter of its collectors say to each other, one JSON object a line.
#
# Down: `Order`, how the collectors of a round are to start; `Begin`, its parameters are there. Up: `Sent`, `Ended`,
# `Corrected`. Times are CLOCK_MONOTONIC [s], which processes of one host share; `clock` names the host's.


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one worker's next collector starts. With neither time: when its parameters are there, as every other one."""

    stays: bool = False  # the collector of the round before goes on; else it ends
    at: float | None = None  # planned time
    after: float | None = None  # the time moves to so many seconds after the worker's data ...
    back: int = 1  # ... of so many rounds before


class Order(msgspec.Struct, frozen=True, tag=True):
    """How the collectors of `round` start, by worker."""

    round: int
    plans: tuple[Plan, ...]


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
    in `Sent`."""

    round: int
    worker: int
    end: float
    status: int
    cpu_seconds: float
    words: str
    rows: int = 0


class Corrected(msgspec.Struct, frozen=True, tag=True):
    """The start of a collector of `round` was moved once the worker's data before it were sent; late: the planned time
    had passed."""

    round: int
    worker: int
    late: bool


Down = Order | Begin
Up = Sent | Ended | Corrected


def host_clock() -> str:
    """Names the clock of this host since it started: times of equal names can be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def earliest(arrived: Sequence[Sent]) -> Sent:
    """Whose data come next: those sent first, or, where their clocks cannot be compared, those that arrived first.

    arrived: in the order of arrival."""
    if len({sent.clock for sent in arrived}) > 1:
        return arrived[0]
    return min(arrived, key=lambda sent: sent.sent)


# -- collector ---------------------------------------------------------------------------------------------------------
# A collector: a process that makes its environments, waits for its round's parameters, takes pool.collect_steps steps,
# sends them, and ends; or, where it is told so, stays for the next round.
#
# Forked by the starter, whose channels it uses. It sends into the lane of its worker, which outlives it. What it
# collects
# depends on run.seed, its worker, the round and the parameters alone, so that a new process collects the same again.


LOOK_AT_BOARD = 1.0  # [s] between looks at the command; its bell is rung too


class LateReader:
    """A place in the mailbox that is taken with the round's parameters: until then the worker's collector of the round
    before may have it."""

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        self._mailbox = mailbox
        self._index = index
        self._reader: MailboxReader | None = None

    def take(self) -> None:
        """Take the place."""
        self._reader = self._mailbox.reader(self._index)

    def release(self) -> None:
        """Give it back."""
        if self._reader is not None:
            self._reader.release()
            self._reader = None

    def pin(self) -> Pin | None:
        """See `MailboxReader`; None without the place."""
        return None if self._reader is None else self._reader.pin()

    def unpin(self) -> None:
        """See `MailboxReader`."""
        if self._reader is not None:
            self._reader.unpin()


def collect(
    channels: HostChannels, assignment: Assignment, sent: Sent, decision: int, say: Callable[[Sent], None]
) -> None:
    """Collect the round that `sent` names, and those after it while `decision`, a pipe, gives a byte for each; end of
    file ends it. `say` is told of each round's data."""
    board = channels.board
    mailbox = channels.mailbox
    config = channels.topology.config
    assert mailbox is not None
    reader = LateReader(mailbox, channels.topology.row_of(assignment))
    worker = make_worker(channels, assignment, channels.counters_row(assignment), reader)
    round = sent.round
    goes_on = True
    try:
        while goes_on:
            worker.restart(member_seed(config.run.seed, assignment.index, round))
            ready = time.monotonic()
            if not _await_parameters(board, mailbox, round):
                return
            reader.take()
            worker.refresh()
            for _ in range(config.section(PoolConfig).collect_steps):
                if board.command not in GOING:
                    return
                worker.step()
            worker.report()
            worker.release()
            reader.release()
            say(Sent(round, sent.worker, sent.start, ready, time.monotonic(), sent.clock))
            goes_on = bool(os.read(decision, 1))
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
        board.rollout_bell.wait(seen, LOOK_AT_BOARD)


# -- starter -----------------------------------------------------------------------------------------------------------

STOP_TIMEOUT = 10.0  # [s] a collector may be inside a long environment step when it is told to stop
MAX_WORDS = 4_000  # bytes of what a collector printed that are kept


@dataclass
class _Process:
    """A living collector. round: that it works at, or waits for."""

    worker: int
    round: int
    pid: int
    pidfd: int
    decision: int  # end of the pipe to it; -1: closed, it ends after its round
    errors: int
    has_sent: bool = False
    stays: bool = False  # it has been told to go on after its round


class Schedule:
    """Who is to start when: pure. `due` says whose time has come."""

    def __init__(self) -> None:
        self._orders: dict[int, Order] = {}
        self._times: dict[tuple[int, int], float] = {}  # (round, worker) not started

    def order(self, order: Order) -> None:
        """Take an order up."""
        self._orders[order.round] = order
        for worker, plan in enumerate(order.plans):
            if plan.at is not None:
                self._times[order.round, worker] = plan.at

    def plan(self, round: int, worker: int) -> Plan | None:
        """What was ordered; None: nothing yet."""
        order = self._orders.get(round)
        return None if order is None else order.plans[worker]

    def sent(self, round: int, worker: int, at: float, now: float) -> list[Corrected]:
        """The worker's data of the round were sent: starts of later ones that count from them move."""
        moved: list[Corrected] = []
        for (later, of), planned in self._times.items():
            plan = self._orders[later].plans[of]
            if of == worker and plan.after is not None and later - plan.back == round:
                self._times[later, of] = at + plan.after
                moved.append(Corrected(later, worker, late=planned < now))
        return moved

    def begin(self, begin: Begin) -> None:
        """The round has its parameters: what was planned for it and for rounds before is void."""
        self._orders = {round: order for round, order in self._orders.items() if round >= begin.round}
        self._times = {key: at for key, at in self._times.items() if key[0] > begin.round}

    def due(self, now: float, unsent: set[tuple[int, int]]) -> list[tuple[int, int]]:
        """(round, worker) whose time has come, no longer planned. unsent: (round, worker) that still collect; a start
        that counts from their data waits for these."""
        ready = [key for key, at in self._times.items() if at <= now and not self._held(key, unsent)]
        for key in ready:
            del self._times[key]
        return sorted(ready)

    def next_time(self, unsent: set[tuple[int, int]]) -> float | None:
        """When `due` gives the next one; None: only after an event."""
        return min((at for key, at in self._times.items() if not self._held(key, unsent)), default=None)

    def _held(self, key: tuple[int, int], unsent: set[tuple[int, int]]) -> bool:
        round, worker = key
        plan = self._orders[round].plans[worker]
        return plan.after is not None and (round - plan.back, worker) in unsent


class Starter:
    """See the module."""

    def __init__(self, channels: HostChannels, orders: int, reports: int) -> None:
        self._channels = channels
        self._orders = orders
        self._reports = reports
        ranks = [rank for rank in channels.topology.on_host(channels.host) if rank.role is Role.ROLLOUT]
        self._ranks: dict[int, Assignment] = {rank.index: rank for rank in ranks}
        self._lanes = {index: channels.attach_lane(index) for index in self._ranks}  # to count their rows
        self._schedule = Schedule()
        self._processes: dict[int, _Process] = {}  # by pidfd
        self._own, self._theirs = os.pipe()  # from the collectors
        self._clock = host_clock()
        self._selector = selectors.DefaultSelector()
        for descriptor in (orders, self._own):
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._down = Lines(orders)
        self._up = Lines(self._own)

    def run(self) -> None:
        """Until the orders end; then all collectors end."""
        down = msgspec.json.Decoder(Down)
        up = msgspec.json.Decoder(Sent)
        while not self._down.ended:
            unsent = {(one.round, one.worker) for one in self._processes.values() if not one.has_sent}
            at = self._schedule.next_time(unsent)
            timeout = None if at is None else max(0.0, at - time.monotonic())
            descriptors = {key.fd for key, _ in self._selector.select(timeout)}
            if self._own in descriptors:
                for line in self._up.read():
                    self._note_sent(up.decode(line))
            if self._orders in descriptors:
                for line in self._down.read():
                    self._follow(down.decode(line))
            for descriptor in descriptors & self._processes.keys():
                self._note_end(self._processes.pop(descriptor))
            unsent = {(one.round, one.worker) for one in self._processes.values() if not one.has_sent}
            for round, worker in self._schedule.due(time.monotonic(), unsent):
                self._start(round, worker)
        self._stop()

    def _follow(self, message: Down) -> None:
        if isinstance(message, Order):
            self._schedule.order(message)
            for process in self._processes.values():
                self._decide(process)
            return
        self._schedule.begin(message)
        for worker in message.workers:
            if not any(one.worker == worker and one.round == message.round for one in self._processes.values()):
                self._start(message.round, worker)

    def _note_sent(self, sent: Sent) -> None:
        sent = msgspec.structs.replace(sent, rows=self._lanes[sent.worker].pushed)
        for process in self._processes.values():
            if (process.worker, process.round) == (sent.worker, sent.round):
                process.has_sent = True
                self._advance(process)
        for corrected in self._schedule.sent(sent.round, sent.worker, sent.sent, time.monotonic()):
            self._say(corrected)
        self._say(sent)

    def _decide(self, process: _Process) -> None:
        """Tell a collector what comes after its round, once that is ordered."""
        plan = self._schedule.plan(process.round + 1, process.worker)
        if plan is None or process.stays or process.decision < 0:
            return
        if not plan.stays:
            os.close(process.decision)
            process.decision = -1
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

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start(self, round: int, worker: int) -> None:
        begin = time.monotonic()
        parent = os.getpid()
        theirs, decision = os.pipe()
        errors = os.memfd_create("errors")
        pid = os.fork()
        if pid == 0:
            for process in self._processes.values():
                if process.decision >= 0:
                    os.close(process.decision)  # else the end of another collector's pipe would never come
            os.close(decision)
            sent = Sent(round, worker, begin, begin, begin, self._clock)
            _become(parent, errors, lambda: collect(self._channels, self._ranks[worker], sent, theirs, self._tell))
        os.close(theirs)
        process = _Process(worker, round, pid, os.pidfd_open(pid), decision, errors)
        self._processes[process.pidfd] = process
        self._selector.register(process.pidfd, selectors.EVENT_READ)
        self._decide(process)

    def _tell(self, sent: Sent) -> None:
        """In a collector: a line in one write, so that lines of several do not mix."""
        os.write(self._theirs, msgspec.json.encode(sent) + b"\n")

    def _note_end(self, process: _Process) -> None:
        end = time.monotonic()
        _, status, usage = os.wait4(process.pid, 0)
        for line in self._up.read():  # what it sent before it ended
            self._note_sent(msgspec.json.decode(line, type=Sent))
        self._selector.unregister(process.pidfd)
        words = os.pread(process.errors, MAX_WORDS, max(0, os.fstat(process.errors).st_size - MAX_WORDS))
        for descriptor in (process.pidfd, process.errors, process.decision):
            if descriptor >= 0:
                os.close(descriptor)
        self._say(
            Ended(
                process.round,
                process.worker,
                end,
                os.waitstatus_to_exitcode(status),
                usage.ru_utime + usage.ru_stime,
                words.decode(errors="replace").strip(),
                self._lanes[process.worker].pushed,
            )
        )

    def _say(self, message: Up) -> None:
        with contextlib.suppress(BrokenPipeError):  # the trainer has ended, and so shall this process
            os.write(self._reports, msgspec.json.encode(message) + b"\n")
        self._channels.drain_bell.ring()

    def _stop(self) -> None:
        for process in self._processes.values():
            if process.decision >= 0:
                os.close(process.decision)
                process.decision = -1
        deadline = time.monotonic() + STOP_TIMEOUT
        while self._processes:
            if time.monotonic() >= deadline:
                for process in self._processes.values():
                    os.kill(process.pid, signal.SIGKILL)
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic()) or None):
                if key.fd in self._processes:
                    self._note_end(self._processes.pop(key.fd))
                elif key.fd == self._orders:
                    self._selector.unregister(self._orders)
                else:
                    self._up.read()


class Lines:
    """Whole lines of a pipe; reading never waits."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.ended = False
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[bytes]:
        """Those that have come since the last call."""
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return lines


def _become(parent: int, errors: int, work: Callable[[], None]) -> None:
    """In the forked process: do the work and end, whatever happens."""
    status = 1
    try:
        die_with(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        work()
        status = 0
    except BaseException as error:
        print(describe(error, "a collector"), file=sys.stderr)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


# -- starters ----------------------------------------------------------------------------------------------------------
# The process that starts a host's collectors, as who started it sees it: a child, and the pipes to and from it.


class Starters(Protocol):
    """What starts a task's collectors: a process on this host, or one on each host."""

    def say(self, message: Down) -> None:
        """Send a message; JobFailed where nobody takes it."""
        ...

    def hear(self) -> list[Up]:
        """What has come since the last call; never waits. JobFailed where a starter has ended."""
        ...

    def wait(self, timeout: float) -> object:
        """Sleep until there is something to hear, at most `timeout` [s]."""
        ...

    def stop(self) -> list[Up]:
        """End all collectors; what was not heard yet."""
        ...


class StarterProcess:
    """The process that starts a host's collectors, and the pipes to and from it; a child of the trainer, on other hosts
    of the relay."""

    def __init__(self, run_id: str, host: int) -> None:
        self.clock = host_clock()
        self._told = False  # to end
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
        with interrupts_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ddrl.pool.collectors", run_id, str(host), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin.fileno()
        self._reports = self._process.stdout.fileno()
        self._lines = Lines(self._reports)
        self._decoder = msgspec.json.Decoder(Up)

    def say(self, message: Down) -> None:
        """Send a message; JobFailed where the starter has ended."""
        self.write(msgspec.json.encode(message))

    def hear(self) -> list[Up]:
        """What has come since the last call; never waits. JobFailed where the starter has ended."""
        return [self._decoder.decode(line) for line in self.read()]

    def write(self, line: bytes) -> None:
        """As `say`, of a message as bytes; nothing after `end`."""
        if self._told:
            return
        try:
            os.write(self._orders, line + b"\n")
        except BrokenPipeError:
            raise JobFailed(self._last_words()) from None

    def read(self) -> list[bytes]:
        """As `hear`, messages as bytes; no error where it was told to end."""
        lines = self._lines.read()
        if self._lines.ended and not lines and not self._told:
            raise JobFailed(self._last_words())
        return lines

    def wait(self, timeout: float) -> bool:
        """Sleep until there is something to hear, at most `timeout` [s]; whether there is."""
        return bool(select.select([self._reports], [], [], timeout)[0])

    @property
    def ended(self) -> bool:
        """Whether all that it said was read, and no more comes."""
        return self._lines.ended

    def end(self) -> None:
        """Tell it to end all collectors, and itself."""
        assert self._process.stdin is not None
        self._told = True
        self._process.stdin.close()

    def stop(self, timeout: float = 2 * STOP_TIMEOUT) -> list[Up]:
        """End all collectors and wait for them, at most `timeout` [s]; what was not heard yet."""
        assert self._process.stdout is not None
        self.end()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        messages: list[Up] = [self._decoder.decode(line) for line in self._lines.read()]
        self._process.stdout.close()
        self._errors.close()
        return messages

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()
        return f"the starter of the collectors ended with status {status}{f':{chr(10)}{words}' if words else ''}"


def main() -> int:
    """Serve one task until who started this process, its trainer or its host's relay, says so or ends."""
    ignore_interrupts()  # the trainer decides when to stop
    run_id = sys.argv[1]
    host = int(sys.argv[2])
    parent = int(sys.argv[3])
    die_with(parent)
    reports = os.dup(1)
    os.dup2(2, 1)  # what anything prints is no report
    step_back()
    channels = HostChannels.attach(run_id, host, START_TIMEOUT)
    if channels.attach_policy(START_TIMEOUT) is None:
        return 1 if channels.board.command == Command.FAIL else 0
    gc.freeze()  # forked processes share what stands
    Starter(channels, 0, reports).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

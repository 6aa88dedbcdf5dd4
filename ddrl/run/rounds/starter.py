"""Starts and ends the collectors of a task on its host: `python -m ddrl.run.rounds.starter RUN_ID HOST PARENT`.

Orders come in by stdin, reports go out by stdout (`ddrl.run.rounds.orders`). It keeps the planned times, moves those
that count from a worker's own data once these are sent, and forks: it has loaded what every collector needs, so that a
collector starts in the time that its environment takes. It computes nothing itself, has one thread, and sleeps in
between.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ddrl.channels.board import Command
from ddrl.core.roles import Assignment, Role
from ddrl.run.members import START_TIMEOUT
from ddrl.run.process import die_with, ignore_interrupts, step_back
from ddrl.run.rounds.collector import collect
from ddrl.run.rounds.orders import Begin, Corrected, Down, Ended, Order, Plan, Sent, Up, host_clock
from ddrl.run.topology import HostChannels, describe

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

"""A host's relay: models in, experience out, control and counters between, all over MPI and all without waiting.

One per host, ranks of one communicator in host order; rank 0, the root, stands beside the trainer. `progress` does what can be done now;
`run` repeats it and sleeps on the relay's bell between, so an idle relay costs next to nothing and never spins in MPI. A relay knows bytes
and rows, not tensors. Order of the end: the board says STOP -> the root tells all -> each relay drains its lanes, sends its last table and
`Finished` -> the root, once every model has ended everywhere and every row stands in its lane, says `Goodbye` -> all withdraw and return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Board, Command
from ddrl.channels.counters import CounterRow, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox, MailboxReader, checksum
from ddrl.core.config import ClusterConfig
from ddrl.core.errors import ConfigError
from ddrl.distribution.control import POST_BYTES, Confirm, Failed, Finished, Goodbye, Measure, Message, NewPlan, Post, Ready, State
from ddrl.distribution.executor import Executor, Report
from ddrl.distribution.inbox import MailboxInbox
from ddrl.distribution.links import PaceWatch, measure_links
from ddrl.distribution.planner import Choice, choose
from ddrl.distribution.schemes import make_plan
from ddrl.distribution.tables import TableReceiver, TableSender
from ddrl.distribution.uplink import UplinkReceiver, UplinkSender

if TYPE_CHECKING:
    from mpi4py import MPI

TAG_DOWN, TAG_UP, TAG_TABLE, TAG_BLOCK = 1, 2, 3, 4
STATE_PERIOD = 0.1  # s, between looks at the root's board values
BUSY_SLEEP, BUSY_LONGEST, IDLE_SLEEP = 2e-4, 2e-3, 1e-2  # s, between two looks: shortest, longest while models travel, longest
SOCKET_BYTES = 1 << 16
DRAIN_SECONDS = 2.0  # s after STOP without any row taken by the trainer before rows are given up; a closed lane gives them up at once
QUIET_SECONDS = 10.0  # s after STOP for the producers of a host to fall silent
RETRIES = 3  # sends of a version that some host refused


def readers_needed(config: ClusterConfig) -> int:
    """Firm readers of its mailbox that a relay needs."""
    return config.versions_in_flight + 1


def slots_needed(config: ClusterConfig) -> int:
    """Fewest slots of a mailbox: newest, one being written, those under way or being sent on, and one pinned by rollouts."""
    return config.versions_in_flight + 3


class Relay:
    """See the module. Making one is collective over `comm`.

    `mailbox`: of this host, `readers`: `readers_needed` firm readers of it. `counters`: this relay's row. `lanes_up`: this host's lanes
    (not at the root, whose lanes the trainer drains itself). Root only: `lanes_down`, one per other relay in rank order, and `mirrors`, a
    counters table per other relay, as large as `table` there. Others only: `table`, this host's counters, sent up. `quiet`: whether no
    producer of this host will push another row. `confirm`: whether this host's rollouts all use that version (closed loop: the next model
    leaves only then; give versions_in_flight = 1 with it). A board that says FAIL ends the job everywhere: its relay sends the text of
    `failure` to the root, which hands it to `on_failure` (default: the root's board says FAIL); rows not yet sent are then left.
    """

    def __init__(self, comm: MPI.Comm, mailbox: Mailbox, board: Board, config: ClusterConfig, counters: CounterRow, *,
                 readers: Sequence[MailboxReader], row_dtype: np.dtype[Any], lanes_up: LaneSet | None = None,
                 lanes_down: Sequence[Lane] = (), table: Counters | None = None, mirrors: Sequence[Counters] = (),
                 quiet: Callable[[], bool] = lambda: True, confirm: Callable[[int], bool] | None = None,
                 failure: Callable[[], str] | None = None, on_failure: Callable[[str], None] | None = None, trace: bool = False) -> None:
        if len(readers) < readers_needed(config):
            raise ConfigError(f"a relay needs {readers_needed(config)} readers of its mailbox (cluster.versions_in_flight + 1), not {len(readers)}")
        self.root, self.hosts, self.rank = comm.rank == 0, comm.size - 1, comm.rank
        if self.root and (len(lanes_down) != self.hosts or len(mirrors) not in (0, self.hosts)):
            raise ConfigError(f"the root relay needs a lane for each of the {self.hosts} other relays, not {len(lanes_down)}")
        self._mailbox, self._board, self._config, self._counters, self._trace = mailbox, board, config, counters, trace
        self._quiet, self._confirm_when, self._failure, self._on_failure = quiet, confirm, failure, on_failure
        self._data, self._control = comm.Dup(), comm.Dup()
        self._inbox = MailboxInbox(mailbox, readers)
        others = list(range(1, comm.size))
        self._post = Post(self._control, TAG_UP if self.root else TAG_DOWN, others if self.root else [0],
                          out_tag=TAG_DOWN if self.root else TAG_UP, receive_bytes=POST_BYTES)
        self._blocks_down = UplinkReceiver(self._control, TAG_BLOCK, lanes_down, row_dtype, config.uplink_block_bytes) if self.root else None
        self._blocks_up = None
        if not self.root and lanes_up is not None:
            self._blocks_up = UplinkSender(self._control, TAG_BLOCK, lanes_up, row_dtype, config.uplink_block_bytes,
                                           period=max(2e-3, 5e-5 * self.hosts))
        self._tables_down = TableReceiver(self._control, TAG_TABLE, mirrors) if self.root and mirrors else None
        self._tables_up = TableSender(self._control, TAG_TABLE, table) if table is not None and not self.root else None
        self.executor: Executor | None = None
        self.finished = False
        self.problems: list[str] = []  # refused versions, newest last, for the log
        self.confirms: list[tuple[int, Confirm]] = []  # root: (rank, how a model ended there) since somebody took them away
        self._in_flight = config.versions_in_flight
        self._epoch, self._ready = -1, set[int]()
        self._open: dict[int, set[int]] = {}  # root: hosts that have not confirmed a model yet, by sequence
        self._sent_version, self._tries, self._refused = -1, 0, False
        self._unconfirmed: list[Report] = []
        self._stopping = self._told_finished = self._told_failure = self._said_goodbye = False
        self._finished: dict[int, Finished] = {}
        self._state: tuple[int, bytes] | None = None
        self._next_state = 0.0
        self._stopped_at = 0.0
        self._placed, self._placed_at = 0, 0.0
        self._next_counters = 0.0
        self._sleep, self._pace, self._moved_at = BUSY_SLEEP, BUSY_SLEEP, 0.0
        self.links = measure_links(self._data) if config.scheme == "auto" and self.hosts else None
        self.choice = Choice("direct", {})
        self._watch = PaceWatch()
        if self.root:
            self._plan()

    # -- one look at everything

    def progress(self) -> bool:
        """Do what can be done without waiting; True if anything moved."""
        if self.finished:
            return False
        moved = self._read_post()
        if self.finished:  # it was goodbye
            return True
        moved = (self._executor_progress() if self.executor is not None else False) or moved
        if self._blocks_up is not None and not self._told_failure:
            moved = self._blocks_up.progress(flush=self._stopping) or moved
        if self._blocks_down is not None:
            moved = self._blocks_down.progress() or moved
        if self._tables_up is not None:
            self._tables_up.progress()
        if self._tables_down is not None:
            self._tables_down.progress()
        if self.root:
            moved = self._root_progress() or moved
        else:
            moved = self._report() or moved
            self._tell_failure()
            self._finish_up()
        now = time.monotonic()
        if now >= self._next_counters:
            self._next_counters = now + 0.05
            self._count()
        return moved

    def run(self) -> None:
        """Relay until the stop protocol has ended on this host."""
        while not self.finished:
            self.step()

    def step(self) -> None:
        """One `progress`; where nothing moved, sleep until the bell, or for about half the time that lately lay between two moves."""
        bell = self._board.relay_bell
        seen = bell.value
        if self.progress():
            now = time.monotonic()
            self._pace += 0.1 * (min(now - self._moved_at, IDLE_SLEEP) - self._pace)
            self._moved_at = now
            self._sleep = max(BUSY_SLEEP, 0.5 * self._pace)
        elif not self.finished:
            bell.wait(seen, self._sleep)
            self._sleep = min(self._longest_sleep(), self._sleep * 1.3)

    def _longest_sleep(self) -> float:
        """While models are under way: as long as a socket takes to fill up, for MPI reads sockets only when it is called."""
        if self.executor is None or (self.executor.idle and not self._open):
            return IDLE_SLEEP
        if self.links is None:
            return BUSY_LONGEST
        return min(IDLE_SLEEP, max(BUSY_SLEEP, SOCKET_BYTES / self.links.down[self.rank]))

    # -- plans

    def _plan(self) -> None:
        """Root: choose a plan from the settings and the links, and use it."""
        network = self.links.network() if self.links is not None else None
        self.plan_with(choose(self._config, self.hosts, self._mailbox.nbytes, network))

    def measure(self) -> None:
        """Root: measure the links anew and plan with them; call it only while no model is under way (`settled`). Lasts about a second."""
        self._post.send_all(Measure())
        self._remeasure()
        self._plan()

    def _remeasure(self) -> None:
        if self.executor is not None:
            self.executor.close()
            self.executor = None
        self.links = measure_links(self._data)

    def plan_with(self, choice: Choice, versions_in_flight: int = 0) -> None:
        """Root: use this scheme from the next model on (`versions_in_flight` 0: as the settings say, and never more); call it only while
        no model is under way (`settled`)."""
        self.choice = choice
        self._in_flight = min(versions_in_flight or self._config.versions_in_flight, self._config.versions_in_flight)
        plan = make_plan(choice.scheme, self.hosts, self._mailbox.nbytes, **choice.parameters)
        self._epoch += 1
        if self.executor is not None:
            self.executor.close()
        self._watch.restart()
        self._ready.clear()
        self._post.send_all(NewPlan(self._epoch, choice.scheme, self._mailbox.nbytes, self._in_flight, choice.parameters))
        self.executor = Executor(self._data, plan, None, checksum, epoch=self._epoch, versions_in_flight=self._in_flight,
                                 trace=self._trace)

    @property
    def rows_discarded(self) -> int:
        """Root: rows given up after STOP, because nobody drained them."""
        return self._blocks_down.discarded if self._blocks_down is not None else 0

    @property
    def settled(self) -> bool:
        """Root: every model sent has ended on every host."""
        return not self._open and self.executor is not None and self.executor.idle

    def _adopt(self, plan: NewPlan) -> None:
        if plan.nbytes != self._mailbox.nbytes:
            raise ConfigError(f"relay {self.rank} has a mailbox for models of {self._mailbox.nbytes} bytes, but the root sends {plan.nbytes}: "
                              "all hosts must use the same network")
        if self.executor is not None:
            self.executor.close()
        self._epoch = plan.epoch
        self.executor = Executor(self._data, make_plan(plan.scheme, self.hosts, plan.nbytes, **plan.parameters), self._inbox, checksum,
                                 epoch=plan.epoch, versions_in_flight=plan.versions_in_flight, trace=self._trace)
        self._post.send(0, Ready(plan.epoch))

    # -- messages

    def _read_post(self) -> bool:
        come = self._post.receive()
        for rank, message in come:
            self._handle(rank, message)
        return bool(come)

    def _handle(self, rank: int, message: Message) -> None:
        if isinstance(message, Confirm):
            self._confirmed(rank, message)
        elif isinstance(message, State):
            self._board.values[: len(message.values)] = message.values
            if self._board.command not in (Command(message.command), Command.FAIL):
                self._board.command = Command(message.command)
            self._stopping = self._stopping or message.command >= Command.STOP
            self._told_failure = self._told_failure or message.command == Command.FAIL  # the root knows
        elif isinstance(message, NewPlan):
            self._adopt(message)
        elif isinstance(message, Measure):
            self._remeasure()
        elif isinstance(message, Ready):
            if message.epoch == self._epoch:
                self._ready.add(rank)
        elif isinstance(message, Finished):
            self._finished[rank] = message
        elif isinstance(message, Failed):
            if self._on_failure is not None:
                self._on_failure(message.text)
            self._board.command = Command.FAIL
        else:
            self._end()

    # -- root

    def _root_progress(self) -> bool:
        self._tell_state()
        moved = self._send_newest()
        if self._stopping:
            self._give_up_rows()
        if self._stopping and not self._said_goodbye and self._all_done():
            self._post.send_all(Goodbye())
            self._said_goodbye = moved = True
        if self._said_goodbye and self._post.idle:
            self._end()
        return moved

    def _tell_state(self) -> None:
        now, command = time.monotonic(), int(self._board.command)
        if self._state is not None and command == self._state[0] and now < self._next_state:
            return
        self._next_state = now + STATE_PERIOD
        values = np.asarray(self._board.values)
        state = (command, values.tobytes())
        if state != self._state:
            self._state = state
            self._post.send_all(State(command, values.tolist()))
        self._stopping = self._stopping or command >= Command.STOP

    def _send_newest(self) -> bool:
        """Begin with the newest version, if all stand ready and not too many models are under way."""
        executor, newest = self.executor, self._mailbox.newest
        fresh = newest > self._sent_version
        if self._watch.suspicious and self._config.scheme == "auto" and not self._stopping:
            if not self.settled:  # let what is under way end
                return False
            self.measure()
            return True
        if self._stopping or executor is None or not self.hosts or newest < 0 or not (fresh or self._refused):
            return False
        if len(self._ready) < self.hosts or len(self._open) >= self._in_flight:
            return False
        self._tries = 0 if fresh else self._tries + 1
        self._refused = False
        if self._tries > RETRIES:
            return False
        held = self._inbox.hold()
        self._sent_version = held.version
        sequence = executor.start(held)
        self._open[sequence] = set(range(1, self.hosts + 1))
        self._watch.began(sequence)
        return True

    def _confirmed(self, rank: int, message: Confirm) -> None:
        if message.epoch != self._epoch:
            return
        self.confirms.append((rank, message))
        if message.problem:
            self.problems.append(f"host {rank} refused version {message.version}: {message.problem}")
            self._refused = True
        hosts = self._open[message.sequence]
        hosts.discard(rank)
        if not hosts:
            del self._open[message.sequence]
            self._watch.ended(message.sequence)

    def _all_done(self) -> bool:
        receiver = self._blocks_down
        if receiver is None or len(self._finished) < self.hosts or not self.settled:
            return False
        if self._tables_down is not None and any(self._tables_down.received(rank) < end.tables for rank, end in self._finished.items()):
            return False
        if receiver.rows < sum(end.rows for end in self._finished.values()):
            return False
        return receiver.idle

    def _give_up_rows(self) -> None:
        """After STOP: if the trainer has not taken a row for DRAIN_SECONDS, it never will, and what waits for it must not hold up the end."""
        receiver, now = self._blocks_down, time.monotonic()
        if receiver is None or receiver.idle or receiver.placed != self._placed:
            self._placed, self._placed_at = receiver.placed if receiver is not None else 0, now
        elif receiver.discarded or now - self._placed_at > DRAIN_SECONDS:
            if not receiver.discarded:
                self.problems.append("rows were given up after STOP, because the trainer no longer drains its lanes")
            receiver.discard()

    # -- other hosts

    def _report(self) -> bool:
        """Confirm models to the root, as soon as this host's rollouts have them where that is asked."""
        sent = False
        while self._unconfirmed:
            report = self._unconfirmed[0]
            if not report.problem and self._confirm_when is not None and not self._stopping and not self._confirm_when(report.version):
                break
            self._unconfirmed.pop(0)
            self._post.send(0, Confirm(self._epoch, report.sequence, report.version, report.problem, report.seconds))
            sent = True
        return sent

    def _tell_failure(self) -> None:
        if not self._told_failure and self._board.command == Command.FAIL:
            self._told_failure = self._stopping = True
            text = self._failure() if self._failure is not None else f"host {self.rank} failed"
            self._post.send(0, Failed(text[-(POST_BYTES // 4 - 64) :]))  # at most 4 bytes a letter

    def _finish_up(self) -> None:
        if not self._stopping or self._told_finished:
            return
        self._stopped_at = self._stopped_at or time.monotonic()
        if not self._told_failure:
            if not self._quiet() and time.monotonic() - self._stopped_at < QUIET_SECONDS:
                return
            if self._blocks_up is not None and self._blocks_up.pending:
                return
        if self._blocks_up is not None and not self._blocks_up.idle:
            return
        if self._tables_up is not None:
            self._count()  # the last table is exact
            if not self._tables_up.finish():
                return
        self._told_finished = True
        self._post.send(0, Finished(self._blocks_up.rows if self._blocks_up else 0, self._tables_up.sent if self._tables_up else 0))

    # -- both

    def _executor_progress(self) -> bool:
        executor = self.executor
        assert executor is not None
        moved = executor.progress()
        for report in executor.reports:
            self._unconfirmed.append(report)
            if report.problem:
                self.problems.append(f"version {report.version} refused on host {self.rank}: {report.problem}")
            else:
                self._counters["seal_seconds"].set(report.seconds)
        executor.reports.clear()
        return moved

    def _count(self) -> None:
        """Bring the counters up to date."""
        executor, row = self.executor, self._counters
        row["heartbeat"].set(time.time())
        if executor is None:
            return
        traffic = executor.traffic
        uplink_sent = self._blocks_up.bytes_sent if self._blocks_up else 0
        uplink_received = self._blocks_down.bytes_received if self._blocks_down else 0
        figures = {"model_bytes_sent": traffic.bytes_sent, "model_bytes_received": traffic.bytes_received,
                   "bytes_sent": traffic.bytes_sent + uplink_sent + self._post.bytes_sent,
                   "bytes_received": traffic.bytes_received + uplink_received + self._post.bytes_received,
                   "versions_sealed": traffic.sealed, "checksum_failures": traffic.refused,
                   "rows_forwarded": (self._blocks_up.rows if self._blocks_up else 0) + (self._blocks_down.rows if self._blocks_down else 0)}
        for name, value in figures.items():
            row[name].set(float(value))
        if self._mailbox.newest >= 0:
            row["policy_version"].set(float(self._mailbox.newest))

    def _end(self) -> None:
        """Everything has ended everywhere: withdraw and be finished."""
        self._count()
        if self.executor is not None:
            self.executor.close()
        for part in (self._post, self._blocks_up, self._blocks_down, self._tables_up, self._tables_down):
            if part is not None:
                part.close()
        self._data.Free()
        self._control.Free()
        self.finished = True

"""The duties of a relay beside carrying models: rows and tables of counters up to the trainer's host, lines for
collectors both ways, the board's command and values down, and the end of the job.

Rows are sent as bytes, in blocks, each once and in order per lane. `RowsUp` drains its host's lanes into a block and
sends it in synchronous mode, at most two blocks at a time: a send ends only when the root has taken the block, and the
root takes a host's next block only when the last one has fitted into that host's lane to the trainer. So a slow trainer
fills that lane, then the blocks, then the host's lanes, and at last its rollouts wait.

The end, in order: the board's command is STOP; the root sends it to all; each relay drains its lanes and sends its last
table and `Finished`; once every model has ended everywhere and every row is in its lane, the root sends `Goodbye`; all
leave together.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ddrl.channels.board import Board, Command, CounterRow, Counters
from ddrl.channels.lane import Lane, LaneSet, MessageLane
from ddrl.core.specs import Array, Floats
from ddrl.distribution.membership import (
    MAX_TEXT,
    PLANS,
    TAG_BLOCK,
    Finished,
    Goodbye,
    Handlers,
    HostLeftOut,
    MemberFailed,
    Membership,
    Message,
    Orders,
    Report,
    SchemeWish,
    State,
    Table,
)
from ddrl.distribution.models import ModelReceiver, ModelSender
from ddrl.distribution.requests import Posted

BLOCKS = 3  # of a relay, in turn; two may be on their way
TABLE_PERIOD = 0.25  # between tables of a host [s]
MAX_TABLE_PERIOD = 1.0  # where the root's link is slow: a table is a sign of life too
TABLES_SHARE = 1 / 8  # of the root's link, that the tables of all hosts take
UNKNOWN_RATE = 1e6  # of that link, where it was not measured [bytes/s]
TABLE_BYTES = 300  # of a message without values, about, and headers of TCP
STATE_PERIOD = 0.1  # between reads of the root's board values [s]
QUIET_SECONDS = 10.0  # after STOP for the producers of a host to fall silent [s]
# After STOP without any row taken by the trainer before rows are given up [s]; a closed lane gives them up at once.
DRAIN_SECONDS = 2.0
TCP_LONGEST_PAUSE = 120.0  # between two tries to send over a connection that does not answer [s]
ANSWER_SECONDS = 2.0  # since a host's last table, within which it takes part in what all hosts do together


class Duty:
    """One thing that a relay does beside carrying models; the relay calls all of its duties in turn."""

    done = False  # nothing is left to do on this host: the relay ends
    waiting = False  # something waits for time to pass, which no event announces

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def handlers(self) -> Handlers:
        """What is called with (host, message), by the type of message."""
        return {}

    def progress(self) -> bool:
        """Do what can be done without waiting; True if anything moved."""
        return False

    def figures(self) -> dict[str, float]:
        """Its counters."""
        return {}

    def reset(self, membership: Membership) -> None:
        """Continue with other relays; the requests of the old membership have ended. Collective over the new one."""
        self._membership = membership

    def close(self) -> None:
        """Everything has ended everywhere: withdraw."""


class RowsUp(Duty):
    """Drains `lanes` and sends to the root. A block is sent when it is filled, or `period` seconds after the last.

    A block holds at most `block_bytes`, and no more than a quarter of the lanes' rows: rows that wait in blocks are as
    late as rows that wait in lanes. MPI may report a block as taken before the root has all of it, but not the next
    one too: so a block is filled again once the next one has been taken, and what the root lacks when another host
    dies is still here."""

    def __init__(
        self, membership: Membership, lanes: LaneSet, row_dtype: np.dtype[Any], block_bytes: int, period: float
    ) -> None:
        from mpi4py import MPI

        super().__init__(membership)
        self._mpi = MPI
        self._lanes = lanes
        self._period = period
        rows = max(1, min(block_bytes // row_dtype.itemsize, lanes.capacity // 4))
        self._blocks = [np.empty(rows, row_dtype) for _ in range(BLOCKS)]
        self._sent = [(0, 0)] * BLOCKS  # of each block: number of its first row, rows
        self._requests: list[Any] = [MPI.REQUEST_NULL] * BLOCKS
        self._last = 0.0
        self._next = 0  # block to fill
        self.flush = False  # send what there is
        self.muted = False  # send nothing more
        self.rows = self.bytes_sent = 0
        membership.keep(self)

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return bool(self._mpi.Request.Testall(self._requests))

    @property
    def waiting(self) -> bool:
        """Whether rows wait for their block to fill."""
        return bool(self.pending)

    @property
    def pending(self) -> int:
        """Rows that wait in this host's lanes."""
        return self._lanes.pending

    def progress(self) -> bool:
        """Send what waits, if a block is free; True if anything went."""
        if self.muted:
            return False
        now = time.monotonic()
        pending = self._lanes.pending
        if not pending or (pending < len(self._blocks[0]) and not self.flush and now - self._last < self._period):
            self._mpi.Request.Testall(self._requests)
            return False
        index = self._next
        after = (index + 1) % BLOCKS
        if not (self._requests[index].Test() and self._requests[after].Test()):
            return False
        rows = self._lanes.drain(self._blocks[index])
        if not rows:
            return False
        self._sent[index] = (self.rows, rows)
        self._send(index)
        self.rows += rows
        self._last = now
        self._next = after
        return True

    def _send(self, index: int) -> None:
        data = self._blocks[index][: self._sent[index][1]].view(np.uint8)
        self._requests[index] = self._membership.control.Issend(data, 0, TAG_BLOCK)
        self.bytes_sent += data.nbytes

    def posted(self) -> Posted:
        """Requests that have not ended."""
        return Posted([], self._requests, self._blocks)

    def reset(self, membership: Membership) -> None:
        """Send again the blocks that the root has not got."""
        super().reset(membership)
        self._requests = [self._mpi.REQUEST_NULL] * BLOCKS
        membership.keep(self)
        received = _rows_received(membership, {})[membership.host]
        for index in sorted(range(BLOCKS), key=lambda index: self._sent[index]):
            first, rows = self._sent[index]
            if rows and first >= received:
                self._send(index)

    def figures(self) -> dict[str, float]:
        """Bytes and rows sent, and rows that wait or were sent."""
        return {"bytes_sent": self.bytes_sent, "rows_forwarded": self.rows, "rows_written": self._lanes.pushed}

    def close(self) -> None:
        """Wait until the last block has been taken."""
        self._mpi.Request.Waitall(self._requests)
        self._membership.drop(self)


class RowsIn(Duty):
    """The root's end: one block at a time from each host, host i + 1 into `lanes[i]`, in order."""

    def __init__(
        self, membership: Membership, lanes: Sequence[Lane], row_dtype: np.dtype[Any], block_bytes: int
    ) -> None:
        from mpi4py import MPI

        super().__init__(membership)
        self._mpi = MPI
        self._lanes = list(lanes)
        rows = max(1, block_bytes // row_dtype.itemsize)
        self._blocks = [np.empty(rows, row_dtype) for _ in lanes]
        self._received = [0] * len(self._lanes)  # rows of each host
        self._waiting: dict[int, Array] = {}  # rows of a block for which there is no room yet
        self._placed_before = 0
        self._placed_at = 0.0  # when a row was last taken, after STOP
        self.problem = ""  # rows were given up
        self.rows = self.bytes_received = self.discarded = self.placed = 0
        self._requests: list[Any] = []
        self._post()

    def _post(self) -> None:
        """Receive from the hosts of the membership."""
        self._membership.keep(self)
        self._requests = [self._mpi.REQUEST_NULL] * len(self._lanes)
        for host in self._membership.ids[1:]:
            if host - 1 not in self._waiting:
                self._take_next(host - 1)

    @property
    def idle(self) -> bool:
        """Every row received is in its lane."""
        return not self._waiting

    def received(self, host: int) -> int:
        """Rows of this host that have arrived."""
        return self._received[host - 1]

    def progress(self) -> bool:
        """Take blocks and put rows into lanes, as far as there is room; True if anything moved."""
        moved = False
        statuses: list[Any] = []
        for index, status in zip(self._mpi.Request.Testsome(self._requests, statuses) or (), statuses, strict=False):
            self._arrived(index, status.Get_count(self._mpi.BYTE))
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
                self._waiting.pop(index)
                self._take_next(index)
        return moved

    def _arrived(self, index: int, nbytes: int) -> None:
        rows = nbytes // self._blocks[index].dtype.itemsize
        self.bytes_received += nbytes
        self.rows += rows
        self._received[index] += rows
        self._waiting[index] = self._blocks[index][:rows]

    def _take_next(self, index: int) -> None:
        if index + 1 in self._membership.ids:
            rank = self._membership.ids.index(index + 1)
            self._requests[index] = self._membership.control.Irecv(self._blocks[index].view(np.uint8), rank, TAG_BLOCK)

    def give_up(self) -> None:
        """After STOP: if the trainer has not taken a row for DRAIN_SECONDS, it never will, and what waits for it must
        not delay the end. `discarded` counts these rows."""
        now = time.monotonic()
        if self.idle or self.placed != self._placed_before:
            self._placed_before = self.placed
            self._placed_at = now
        elif self.discarded or now - self._placed_at > DRAIN_SECONDS:
            if not self.discarded:
                self.problem = "rows were given up after STOP, because the trainer no longer drains its lanes"
            self.discarded += sum(map(len, self._waiting.values()))
            for index in list(self._waiting):
                self._waiting.pop(index)
                self._take_next(index)

    def posted(self) -> Posted:
        """Requests that have not ended."""
        return Posted(self._requests, [], self._blocks, self._arrived)

    def reset(self, membership: Membership) -> None:
        """Publish which rows of each host are here."""
        super().reset(membership)
        self._post()
        _rows_received(membership, {index + 1: rows for index, rows in enumerate(self._received)})

    def figures(self) -> dict[str, float]:
        """Bytes and rows received."""
        return {"bytes_received": self.bytes_received, "rows_forwarded": self.rows}

    def close(self) -> None:
        """Withdraw the receives."""
        for request in self._requests:
            if request:
                request.Cancel()
        self._mpi.Request.Waitall(self._requests)
        self._membership.drop(self)


def _rows_received(membership: Membership, counts: dict[int, int]) -> dict[int, int]:
    """Rows that the root has received of each host; `counts`: the root's, empty elsewhere. Collective."""
    values = np.array([float(counts.get(host, 0)) for host in membership.ids])
    return dict(zip(membership.ids, membership.exchange.reduce(values, np.maximum).astype(int).tolist(), strict=True))


class TablesUp(Duty):
    """Sends what has changed of this host's counters to the root, every TABLE_PERIOD, more seldom where the tables of
    all hosts would take more than TABLES_SHARE of the root's link: whatever waits there delays the answers to what the
    root sends. `models`: whose measured links say how fast that one is."""

    def __init__(self, membership: Membership, table: Counters, own: CounterRow) -> None:
        """own: this relay's row."""
        super().__init__(membership)
        self.models: ModelReceiver | None = None
        self._table = table
        self._sent: Floats | None = None
        self._own = own
        self._last = -math.inf
        self._period = TABLE_PERIOD
        membership.beat = self._beat

    def _beat(self) -> None:
        """While others are waited for, perhaps to measure the links, tables are no more than signs of life."""
        self._own["heartbeat"].set(time.time())
        self._period = MAX_TABLE_PERIOD
        self.progress()

    def progress(self) -> bool:
        """Send the table where the last messages have left and its period has passed."""
        if time.monotonic() >= self._last + self._period and self._membership.messages.all_sent:
            self._send()
        return False

    def finish(self, rows: int) -> bool:
        """Send one last table once this relay's own row, which it counts before its duties, says that `rows` rows were
        passed on; False before."""
        if self._own["rows_forwarded"].value != rows:
            return False
        self._send()
        self._last = math.inf
        return True

    def _send(self) -> None:
        table = self._table.table().reshape(-1)
        places = np.arange(len(table), dtype=np.int32)
        if self._sent is not None:
            places = places[table.view(np.uint64) != self._sent.view(np.uint64)]  # bits: NaN is no change
        values = table[places]
        self._membership.send_root(Table(places, values))
        self._sent = table
        self._last = time.monotonic()
        links = None if self.models is None else self.models.links
        rate = TABLES_SHARE * (UNKNOWN_RATE if links is None else links.down[0])
        seconds = self._membership.hosts * (TABLE_BYTES + places.nbytes + values.nbytes) / rate
        self._period = min(MAX_TABLE_PERIOD, max(TABLE_PERIOD, seconds))

    def reset(self, membership: Membership) -> None:
        """Send a whole table at once: the last one may not have arrived."""
        super().reset(membership)
        membership.beat = self._beat
        self._sent = None
        self._last = -math.inf


class TablesIn(Duty):
    """Loads the table that host i + 1 sends into `mirrors[i]`; read by telemetry on the trainer's host."""

    def __init__(
        self, membership: Membership, mirrors: Sequence[Counters], own: CounterRow, rows: RowsIn, host_limit: float
    ) -> None:
        """own: this relay's row; host_limit: a host that is silent for longer [s] is left out, where MPI can."""
        super().__init__(membership)
        self._mirrors = list(mirrors)
        self._own = own
        self._rows = rows
        self._host_limit = host_limit if membership.shrinks else math.inf
        self._silence: dict[int, float] = {}  # of each host that has sent a table: since the last one [s]
        self._watched_at = 0.0
        self._healed_at = 0.0  # from then on every connection carries messages, after a host was silent [s]
        membership.beat = self._beat

    def _beat(self) -> None:
        self._own["heartbeat"].set(time.time())
        for host, table in self._membership.take(Table):  # the other relays' signs of life
            self._load(host, table)
        self.progress()

    def progress(self) -> bool:
        """HostLeftOut where a host was silent for too long, and the others are to continue without it. Time in which
        this process itself did not run does not count."""
        now = time.monotonic()
        passed = now - self._watched_at
        if passed < TABLE_PERIOD:
            return False
        self._watched_at = now
        for host in self._silence:
            self._silence[host] += min(passed, 2 * TABLE_PERIOD)
            if self._silence[host] > self._host_limit and self._membership.leave_out(host):
                raise HostLeftOut(
                    f"host {host} has shown no sign of life for {self._silence[host]:.0f} s (cluster.host_limit)"
                )
        return False

    def all_answer(self) -> bool:
        """Whether no host is silent, and each connection to one that was has had the time to carry messages again."""
        answer = all(silence < ANSWER_SECONDS for silence in self._silence.values())
        return answer and time.monotonic() >= self._healed_at

    def reset(self, membership: Membership) -> None:
        """Continue with the hosts that are left. Nobody waits for a process of another one; its relay's row says how
        many of its rows have arrived."""
        super().reset(membership)
        membership.beat = self._beat
        for host, mirror in enumerate(self._mirrors, start=1):
            if host not in membership.ids:
                self._silence.pop(host, None)
                received = self._rows.received(host)
                for row in range(len(mirror.table())):
                    values = mirror.row(row)
                    values["ended"].set(1.0)
                    if not math.isnan(values["rows_forwarded"].value):
                        values["rows_forwarded"].set(received)
                        values["rows_written"].set(max(received, values["rows_written"].value))

    def handlers(self) -> Handlers:
        """Tables go into the mirrors."""
        return {Table: self._load}

    def _load(self, host: int, message: Table) -> None:
        silence = self._silence.get(host, 0.0)
        if silence >= ANSWER_SECONDS:  # other connections may still wait: TCP tries again after twice the last pause
            self._healed_at = max(self._healed_at, time.monotonic() + min(silence, TCP_LONGEST_PAUSE))
        self._silence[host] = 0.0
        self._mirrors[host - 1].change(message.places, message.values)


class Starter(Protocol):
    """Starts and ends this host's collectors. It and the trainer exchange lines, through the relays."""

    clock: str  # names this host's clock

    def write(self, line: bytes) -> None:
        """Hand it a line."""
        ...

    def read(self) -> list[bytes]:
        """Lines from it since the last call; never waits. JobFailed where it has ended without being asked to."""
        ...

    def end(self) -> None:
        """Have it end, and all collectors with it."""
        ...


class LinesIn(Duty):
    """On every other host: lines from the trainer to this host's `starter` of collectors, and back."""

    def __init__(self, membership: Membership, starter: Starter) -> None:
        super().__init__(membership)
        self._starter = starter

    def handlers(self) -> Handlers:
        """Orders go to the starter."""
        return {Orders: lambda host, orders: self._starter.write(orders.line)}

    def progress(self) -> bool:
        """Send the starter's lines."""
        for line in self._starter.read():
            report = Report(self._membership.host, line, self._starter.clock, time.monotonic())
            self._membership.send_root(report)
        return False


class LinesOut(Duty):
    """At the root: `orders` from the trainer to the other hosts' starters of collectors, and `reports` back."""

    def __init__(self, membership: Membership, orders: MessageLane[Message], reports: MessageLane[Message]) -> None:
        super().__init__(membership)
        self._orders = orders
        self._reports = reports
        self._unread: deque[Report] = deque()  # reports for which there is no room yet

    def handlers(self) -> Handlers:
        """Reports go to the trainer."""
        return {Report: self._reported}

    def _reported(self, host: int, report: Report) -> None:
        report.received = time.monotonic()
        self._unread.append(report)

    def progress(self) -> bool:
        """Pass on both lanes' lines; True if there were any."""
        moved = False
        for message in self._orders.receive():
            if isinstance(message, Orders):
                self._membership.send(message.host, message)
                moved = True
        while self._unread and self._reports.send(self._unread[0]):
            self._unread.popleft()
            moved = True
        return moved


class RootCommands(Duty):
    """At the root: the board's command and values to all, the scheme that the trainer asks for, the plan in force to
    the trainer, and the job's end."""

    def __init__(
        self,
        membership: Membership,
        board: Board,
        models: ModelSender,
        rows: RowsIn,
        on_failure: Callable[[str], None] | None,
    ) -> None:
        super().__init__(membership)
        self._board = board
        self._models = models
        self._rows = rows
        self._on_failure = on_failure
        self._finished: dict[int, Finished] = {}  # by host
        self._stopping = False
        self._said_goodbye = False
        self._state: tuple[int, bytes] | None = None
        self._next_state = 0.0
        self._wishes_read = 0
        self._described_epoch: int = -1

    def handlers(self) -> Handlers:
        """Hosts that have finished, or failed."""
        return {Finished: self._finished.__setitem__, MemberFailed: self._failed}

    def _failed(self, host: int, message: MemberFailed) -> None:
        if self._on_failure is not None and self._board.command != Command.FAIL:
            self._on_failure(message.text)
        self._board.command = Command.FAIL

    def progress(self) -> bool:
        """Send what has changed; from STOP on, end when all others have."""
        self._send_state()
        self._models.stopping = self._stopping
        if not self._stopping:
            return False
        self._rows.give_up()
        moved = False
        if not self._said_goodbye and self._all_done():
            self._membership.send_all(Goodbye())
            self._said_goodbye = moved = True
        self.done = self._said_goodbye and self._membership.messages.all_sent
        return moved

    def _send_state(self) -> None:
        now = time.monotonic()
        command = int(self._board.command)
        if self._state is not None and command == self._state[0] and now < self._next_state:
            return
        self._next_state = now + STATE_PERIOD
        values = np.asarray(self._board.values)
        state = (command, values.tobytes())
        if state != self._state:
            self._state = state
            self._membership.send_all(State(command, values.tolist(), self._models.started))
        wish = self._board.wish.read(self._wishes_read)
        if wish is not None:
            self._wishes_read = wish[0]
            asked = PLANS.decode(wish[1])
            if isinstance(asked, SchemeWish):
                self._models.change(asked.scheme)
        plan = self._models.in_force
        if plan is not None and plan.epoch != self._described_epoch:
            self._described_epoch = plan.epoch
            self._board.plan.write(PLANS.encode(plan).tobytes())
            self._board.trainer_bell.ring()
        self._stopping = self._stopping or command >= Command.STOP

    def _all_done(self) -> bool:
        if len(self._finished) < self._membership.hosts or not self._models.settled:
            return False
        return self._rows.idle and all(self._rows.received(host) >= end.rows for host, end in self._finished.items())

    def reset(self, membership: Membership) -> None:
        """Send everything again."""
        super().reset(membership)
        self._finished.clear()
        self._state = None
        self._said_goodbye = False


class HostCommands(Duty):
    """On every other host: the root's command and values to this host's board, and this host's end.

    Where this host's command is FAIL, the root gets the text of `failure` and ends the job; rows not yet sent are
    left. `quiet`: whether no producer of this host will push another row."""

    def __init__(
        self,
        membership: Membership,
        board: Board,
        models: ModelReceiver,
        rows: RowsUp,
        tables: TablesUp,
        starter: Starter | None,
        *,
        quiet: Callable[[], bool],
        failure: Callable[[], str] | None,
    ) -> None:
        super().__init__(membership)
        self._board = board
        self._models = models
        self._rows = rows
        self._tables = tables
        self._starter = starter
        self._quiet = quiet
        self._failure = failure
        self._stopping = False
        self._failure_at_root = False
        self._sent_finished = False
        self._last_models: int | None = None  # that the root sends by the plan in force, known from STOP on
        self._stopped_at = 0.0

    @property
    def waiting(self) -> bool:
        """Whether the end is near."""
        return self._stopping

    def handlers(self) -> Handlers:
        """The root's board, and its goodbye."""
        return {State: self._obey, Goodbye: self._end}

    def _end(self, host: int, message: Goodbye) -> None:
        self.done = True

    def _obey(self, host: int, state: State) -> None:
        self._board.values[: len(state.values)] = state.values
        if self._board.command not in (Command(state.command), Command.FAIL):
            self._board.command = Command(state.command)
        if state.command >= Command.STOP:
            self._last_models = state.models
            self._stop()
            if self._starter is not None:
                self._starter.end()
        if state.command == Command.FAIL:
            self._fail()

    def _stop(self) -> None:
        self._stopping = True
        self._models.stopping = True
        self._rows.flush = True

    def _fail(self) -> None:
        self._failure_at_root = True
        self._rows.muted = True

    def progress(self) -> bool:
        """Send this host's failure, or that it has finished."""
        if not self._failure_at_root and self._board.command == Command.FAIL:
            self._stop()
            self._fail()
            text = self._failure() if self._failure is not None else f"host {self._membership.host} failed"
            self._membership.send_root(MemberFailed(text[-MAX_TEXT:]))
        if self._stopping and not self._sent_finished and self._last_models is not None:
            self._finish(self._last_models)
        return False

    def _finish(self, last_models: int) -> None:
        """Send the last table and `Finished` once nothing more can come from this host."""
        self._stopped_at = self._stopped_at or time.monotonic()
        if not self._failure_at_root:
            if not self._quiet() and time.monotonic() - self._stopped_at < QUIET_SECONDS:
                return
            if self._rows.pending:
                return
        if not self._rows.idle or not self._models.ended(last_models):
            return
        if self._tables.finish(self._rows.rows):  # exact: nothing more is received or passed on
            self._membership.send_root(Finished(self._rows.rows))
            self._sent_finished = True

    def reset(self, membership: Membership) -> None:
        """Send everything again."""
        super().reset(membership)
        self._sent_finished = False
        self._failure_at_root = False
        self._last_models = None

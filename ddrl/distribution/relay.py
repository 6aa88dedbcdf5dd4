"""What both kinds of relay share: polling everything once, sleeping between polls, counters, and the end.

`progress` does what can be done now; `run` repeats it and sleeps between, until MPI or the relay's bell wakes it, so
an idle relay costs next to nothing and never spins in MPI. A relay handles bytes and rows, not tensors (a codec is
given the places of float32 values).
"""

from __future__ import annotations

import gc
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ddrl.channels.board import Board, Command, CounterRow, Counters
from ddrl.channels.lane import Lane, LaneSet, MessageLane
from ddrl.channels.mailbox import Mailbox, MailboxReader
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import ConfigError
from ddrl.core.rows import ParameterLayout
from ddrl.distribution.codecs import make_codec
from ddrl.distribution.flows import TableReceiver, TableSender, UplinkReceiver, UplinkSender
from ddrl.distribution.links import Links
from ddrl.distribution.membership import (
    MAX_TEXT,
    TAG_BLOCK,
    TAG_TABLE,
    Confirm,
    Finished,
    Goodbye,
    Measure,
    MemberFailed,
    Membership,
    Message,
    NewPlan,
    Orders,
    Ready,
    Report,
    State,
    decode,
    decode_wish,
    encode,
)
from ddrl.distribution.models import MailboxInbox, ModelReceiver, Models, ModelSender, bases_kept
from ddrl.distribution.requests import Part
from ddrl.distribution.waits import Events, rest_seconds

# -- core --------------------------------------------------------------------------------------------------------------

UPLINK_BLOCK_BYTES = 1 << 18  # most experience that a relay sends to the root in one message
COUNT_PERIOD = 0.25  # s, between updates of the relay's own counters
IDLE_SLEEP = 1e-2  # s, longest: what waits for a time, as rows for their block, is no event
RELAYS_A_CORE = 3  # that may look so often; not the root, who plans and starts models
SHORT_SLEEP = 1e-3  # s, of the root, first after something moved: MPI may have read the next message with the last one
# s, where MPI wakes nobody: shortest, longest while models travel
BUSY_SLEEP = 2e-4
BUSY_MAX_SLEEP = 2e-3
LOOK_SHARE = 0.1  # longest sleep over the time since something moved, where MPI wakes nobody
TOLD = 0.5  # share of messages that MPI must have woken the relay for to be relied upon


def readers_needed(config: ClusterConfig) -> int:
    """Firm readers of its mailbox that a relay needs: versions under way, as many sealed ones still on their way to
    slower hosts, and bases."""
    return 2 * config.versions_in_flight + 2 + bases_kept(config)


def slots_needed(config: ClusterConfig) -> int:
    """Fewest slots of a mailbox: newest, one being written, those under way or being sent on, bases of codecs, and one
    pinned by rollouts."""
    return 2 * config.versions_in_flight + 4 + bases_kept(config)


def idle_sleep(links: Links | None) -> float:
    """Longest sleep [s] of a relay whom MPI wakes, or who has no model under way. Where very many share a machine, as
    emulated hosts do, their looks alone would else take its cores."""
    relays = 1.0 if links is None else len(links.up) / (links.machines * links.cores)
    return min(COUNT_PERIOD, IDLE_SLEEP * max(1.0, relays / RELAYS_A_CORE))


def longest_sleep(waited: float, idle: float, *, told: bool, resting: bool) -> float:
    """Longest sleep [s] of a relay, `waited` seconds after something moved. `idle`: its `idle_sleep`; `told`: whether
    MPI wakes it; `resting`: whether no model is under way.

    Where MPI wakes nobody, sleeps of one length between frequent models would set the models' own pace, with one sleep
    for each relay on their way: there the sleep grows with the time waited."""
    if told:
        return idle
    return rest_seconds(waited, LOOK_SHARE, idle if resting else BUSY_MAX_SLEEP, shortest=BUSY_SLEEP)


@dataclass(frozen=True)
class LocalHost:
    """What a relay uses of its own host.

    `readers`: `readers_needed` firm readers of the mailbox. `counters`: the relay's own row. `layout`: manifest of the
    model, for codecs that treat float32 values apart. `quiet`: whether no producer of this host will push
    another row. `in_use`: whether this host's rollouts all use that version or a newer one (closed loop: the next model
    leaves only then); None: not required."""

    mailbox: Mailbox
    readers: Sequence[MailboxReader]
    board: Board
    counters: CounterRow
    row_dtype: np.dtype[Any]
    layout: ParameterLayout | None = None
    quiet: Callable[[], bool] = lambda: True
    in_use: Callable[[int], bool] | None = None


class Flow(Part, Protocol):
    """What a relay moves beside models: experience, tables of counters."""

    def close(self) -> None:
        """Everything has ended everywhere: nothing stands any more."""
        ...


class Relay(ABC):
    """Base of `RootRelay` and `HostRelay`."""

    models: Models
    beside_period = 0.0  # s, between looks at all that is not a model

    def __init__(self, membership: Membership, config: ClusterConfig, local: LocalHost) -> None:
        if len(local.readers) < readers_needed(config):
            raise ConfigError(
                f"a relay needs {readers_needed(config)} readers of its mailbox (readers_needed), not "
                f"{len(local.readers)}"
            )
        self.hosts = membership.hosts
        self.rank = membership.rank
        self.finished = False
        self.problems: list[str] = []  # of experience, for the log; those of models stand in `models.problems`
        self._membership = membership
        self._post = membership.post
        self._local = local
        self._board = local.board
        self._inbox = MailboxInbox(local.mailbox, local.readers)
        self._flows: list[Flow] = []
        self._stopping = False
        self._next_counters = self._next_beside = 0.0
        self._events = Events(local.board.relay_bell)
        gc.freeze()  # what stands now need not be looked through again while models travel
        self._sleep = BUSY_SLEEP
        self._moved_at = 0.0
        self._slept = False  # of moves after a sleep, those that MPI announced
        self._woken = False
        self._share = 0.0

    @abstractmethod
    def _handle(self, rank: int, message: Message) -> None:
        """Act on a message."""

    @abstractmethod
    def _move(self) -> bool:
        """Everything but models: True if anything moved."""

    @abstractmethod
    def _figures(self) -> dict[str, float]:
        """Counters of this kind of relay."""

    def _keep(self, flow: Flow) -> None:
        self._flows.append(flow)
        self._membership.keep(flow)

    def progress(self) -> bool:
        """Do what can be done without waiting; True if anything moved. RelayFailed where another relay has failed."""
        if self.finished:
            return False
        now = time.monotonic()
        moved = False
        if now >= self._next_beside:
            self._next_beside = now + self.beside_period
            messages = self._membership.messages()
            for rank, message in messages:
                self._handle(rank, message)
            if self.finished:
                return True
            if now >= self._next_counters:
                self._next_counters = now + COUNT_PERIOD
                self._count()
            moved = self._move() or bool(messages)
        return self.models.progress() or moved  # last: what MPI reads for it meanwhile must not lie unseen

    def run(self) -> None:
        """Relay until the stop protocol has ended on this host."""
        while not self.finished:
            self.step()

    def step(self) -> None:
        """One `progress`, then sleep until MPI or the bell has something; where something moved, only those sleep whom
        MPI wakes.

        Where MPI wakes nobody (`Events`), look again at once, and then after sleeps that grow (`longest_sleep`). So
        does the root always: a model may leave now."""
        bell = self._board.relay_bell
        seen = bell.value
        if self.progress():
            self._moved_at = time.monotonic()
            if self._slept:  # how much of what moves announces itself
                self._slept = False
                self._share = self._share + 0.1 * (self._woken - self._share)
            self._sleep = SHORT_SLEEP if self._told else BUSY_SLEEP
            if not (self._told and self.rank):
                return
        executor = self.models.executor
        if executor is None or not self.rank:
            woken = self._events.wait(seen, self._sleep)
        else:
            woken = self._events.wait(seen, self._longest() if self._told else self._sleep, executor.wait)
        self._slept = True
        self._woken = woken
        self._sleep = min(self._sleep * 1.5, self._longest())

    @property
    def _told(self) -> bool:
        """Whether MPI wakes this relay."""
        return self._share > TOLD

    def _longest(self) -> float:
        idle = idle_sleep(self.models.links) if self.rank else IDLE_SLEEP
        waited = time.monotonic() - self._moved_at
        return longest_sleep(waited, idle, told=self._told, resting=self.models.resting)

    def _count(self) -> None:
        """Bring the counters up to date."""
        row = self._local.counters
        traffic = self.models.totals()
        newest = self._local.mailbox.newest
        figures = {
            "heartbeat": time.time(),
            "model_bytes_sent": traffic.bytes_sent,
            "model_bytes_received": traffic.bytes_received,
            "bytes_sent": traffic.bytes_sent + self._post.bytes_sent,
            "bytes_received": traffic.bytes_received + self._post.bytes_received,
            "versions_sealed": traffic.sealed,
            "checksum_failures": traffic.refused,
        }
        if newest >= 0:
            figures["policy_version"] = newest
        for name, value in self._figures().items():
            figures[name] = figures.get(name, 0.0) + value
        for name, value in figures.items():
            row[name].set(float(value))

    def _end(self) -> None:
        """Everything has ended everywhere: withdraw and be finished. The membership is left afterwards."""
        self._count()
        self.models.close()
        for flow in self._flows:
            flow.close()
            self._membership.drop(flow)
        self._flows = []
        self._events.close()
        self.finished = True


# -- host --------------------------------------------------------------------------------------------------------------
# The relay of every host but the trainer's: models in and on to others, this host's experience and counters up.
#
# It copies the command and the values of the root's board to this host's board.


QUIET_SECONDS = 10.0  # s after STOP for the producers of a host to fall silent


class Starter(Protocol):
    """Starts and ends this host's collectors. The trainer and it talk in lines, through the relays."""

    clock: str  # names this host's clock

    def write(self, line: bytes) -> None:
        """Hand it a line."""
        ...

    def read(self) -> list[bytes]:
        """What it has said since the last call; never waits. JobFailed where it has ended, and was not told to."""
        ...

    def end(self) -> None:
        """Tell it to end, and all collectors with it."""
        ...


class HostRelay(Relay):
    """See the module. Making one is collective over the membership.

    `lanes`: this host's. `table`: this host's counters, sent up. Where this host's command is FAIL, the root gets the
    text of `failure` and ends the job; rows not yet sent are left. `starter`: of this host's collectors, where it has
    any."""

    beside_period = SHORT_SLEEP  # models come first: chunks may be a tenth of that apart

    def __init__(
        self,
        membership: Membership,
        config: Config,
        local: LocalHost,
        *,
        lanes: LaneSet | None = None,
        table: Counters | None = None,
        failure: Callable[[], str] | None = None,
        starter: Starter | None = None,
        trace: bool = False,
    ) -> None:
        super().__init__(membership, config.cluster, local)
        self._failure = failure
        self._starter = starter
        self._blocks: UplinkSender | None = None
        if lanes is not None:
            period = max(2e-3, 5e-5 * self.hosts)
            self._blocks = UplinkSender(
                membership.control, TAG_BLOCK, lanes, local.row_dtype, UPLINK_BLOCK_BYTES, period=period
            )
            self._keep(self._blocks)
        self._tables: TableSender | None = None
        if table is not None:
            self._tables = TableSender(membership.control, TAG_TABLE, table)
            self._keep(self._tables)
        codec = make_codec(config, local.layout)
        self.models = self.receiver = ModelReceiver(
            membership, self._inbox, config, codec, local.in_use, trace, local.board.rollout_bell.ring
        )
        self._failure_at_root = self._sent_finished = False
        self._last_models: int | None = None  # that the root sends by the plan in force, known from STOP on
        self._stopped_at = 0.0

    def _handle(self, rank: int, message: Message) -> None:
        if isinstance(message, State):
            self._obey(message)
        elif isinstance(message, NewPlan):
            self.receiver.adopt(message)
        elif isinstance(message, Measure):
            self.receiver.remeasure()
        elif isinstance(message, Orders) and self._starter is not None:
            self._starter.write(message.line)
        elif isinstance(message, Goodbye):
            self._end()

    def _obey(self, state: State) -> None:
        self._board.values[: len(state.values)] = state.values
        if self._board.command not in (Command(state.command), Command.FAIL):
            self._board.command = Command(state.command)
        if state.command >= Command.STOP:
            self._stopping = True
            self._last_models = state.models
            if self._starter is not None:
                self._starter.end()
        self._failure_at_root = self._failure_at_root or state.command == Command.FAIL
        self.receiver.stopping = self._stopping

    def _move(self) -> bool:
        moved = False
        if self._blocks is not None and not self._failure_at_root:
            moved = self._blocks.progress(flush=self._stopping)
        if self._tables is not None:
            self._tables.progress()
        if self._starter is not None:
            for line in self._starter.read():
                self._post.send(0, Report(self.rank, line, self._starter.clock, time.monotonic()))
        self._send_failure()
        self._finish_up()
        return moved

    def _longest(self) -> float:
        waits = self._stopping or (self._blocks is not None and self._blocks.pending)
        return COUNT_PERIOD if self._told and not waits else super()._longest()

    def _send_failure(self) -> None:
        if not self._failure_at_root and self._board.command == Command.FAIL:
            self._failure_at_root = self._stopping = True
            text = self._failure() if self._failure is not None else f"host {self.rank} failed"
            self._post.send(0, MemberFailed(text[-MAX_TEXT:]))

    def _finish_up(self) -> None:
        if not self._stopping or self._sent_finished or self._last_models is None:
            return
        self._stopped_at = self._stopped_at or time.monotonic()
        if not self._failure_at_root:
            if not self._local.quiet() and time.monotonic() - self._stopped_at < QUIET_SECONDS:
                return
            if self._blocks is not None and self._blocks.pending:
                return
        if self._blocks is not None and not self._blocks.idle:
            return
        if self._tables is not None:
            if not self.receiver.ended(self._last_models):
                return
            self._count()  # the last table is exact: nothing more is received or passed on
            if not self._tables.finish():
                return
        self._sent_finished = True
        self._post.send(0, Finished(self._blocks.rows if self._blocks else 0, self._tables.sent if self._tables else 0))

    def _figures(self) -> dict[str, float]:
        figures: dict[str, float] = {"seal_seconds": self.receiver.seal_seconds}
        if self._blocks is not None:
            figures["bytes_sent"] = self._blocks.bytes_sent
            figures["rows_forwarded"] = self._blocks.rows
        return figures


# -- root --------------------------------------------------------------------------------------------------------------
# The relay beside the trainer: models out, experience of all hosts in, and the end of the job.
#
# Order of the end: the board's command is STOP -> the root sends it to all -> each relay drains its lanes, sends its
# last table and `Finished` -> the root, once every model has ended everywhere and every row stands in its lane, sends
# `Goodbye` -> all withdraw and leave together.


STATE_PERIOD = 0.1  # s, between reads of the root's board values
# s after STOP without any row taken by the trainer before rows are given up; a closed lane gives them up at once
DRAIN_SECONDS = 2.0


class RootRelay(Relay):
    """See the module. Making one is collective over the membership.

    `lanes`: one to the trainer for each other relay, in rank order. `mirrors`: a counters table for each other relay,
    as large as the one there, or none. A host's message that one of its processes has failed ends the job everywhere:
    its text goes to `on_failure`, and this host's command becomes FAIL. `orders`, `reports`: what the trainer says
    to the other hosts' starters of collectors, and they to it."""

    def __init__(
        self,
        membership: Membership,
        config: Config,
        local: LocalHost,
        *,
        lanes: Sequence[Lane],
        mirrors: Sequence[Counters] = (),
        on_failure: Callable[[str], None] | None = None,
        orders: MessageLane | None = None,
        reports: MessageLane | None = None,
        trace: bool = False,
    ) -> None:
        super().__init__(membership, config.cluster, local)
        if len(lanes) != self.hosts or len(mirrors) not in (0, self.hosts):
            raise ConfigError(
                f"the root relay needs a lane for each of the {self.hosts} other relays, not {len(lanes)}, and a table "
                f"for each or none, not {len(mirrors)}"
            )
        self._on_failure = on_failure
        self._orders = orders
        self._reports = reports
        self._unread: deque[bytes] = deque()  # reports for which there is no room yet
        self._blocks = UplinkReceiver(membership.control, TAG_BLOCK, lanes, local.row_dtype, UPLINK_BLOCK_BYTES)
        self._keep(self._blocks)
        self._tables = TableReceiver(membership.control, TAG_TABLE, mirrors)
        self._keep(self._tables)
        codec = make_codec(config, local.layout)
        self.models = self.sender = ModelSender(membership, self._inbox, config, codec, local.in_use, trace)
        self._finished: dict[int, Finished] = {}
        self._said_goodbye = False
        self._state: tuple[int, bytes] | None = None
        self._next_state = 0.0
        self._wishes_read = 0
        self._placed = 0
        self._placed_at = 0.0
        self._described_epoch = -1

    @property
    def rows_discarded(self) -> int:
        """Rows given up after STOP, because nobody drained them."""
        return self._blocks.discarded

    def _handle(self, rank: int, message: Message) -> None:
        if isinstance(message, Confirm):
            self.sender.confirmed(rank, message)
        elif isinstance(message, Ready):
            self.sender.stands(rank, message)
        elif isinstance(message, Finished):
            self._finished[rank] = message
        elif isinstance(message, Report):
            message.received = time.monotonic()
            self._unread.append(encode(message))
        elif isinstance(message, MemberFailed):
            if self._on_failure is not None:
                self._on_failure(message.text)
            self._board.command = Command.FAIL

    def _move(self) -> bool:
        moved = self._carry()
        moved = self._blocks.progress() or moved
        self._tables.progress()
        now = time.monotonic()
        self._send_state(now)
        self.sender.stopping = self._stopping
        if not self._stopping:
            return moved
        self._give_up_rows(now)
        if not self._said_goodbye and self._all_done():
            self._post.send_all(Goodbye())
            self._said_goodbye = moved = True
        if self._said_goodbye and self._post.idle:
            self._end()
        return moved

    def _carry(self) -> bool:
        """Pass on what the trainer and the starters of collectors say to each other; True if anything was said."""
        if self._orders is None or self._reports is None:
            return False
        moved = False
        for data in self._orders.pop():
            message = decode(data)
            if isinstance(message, Orders):
                self._post.send(message.host, message)
                moved = True
        while self._unread and self._reports.has_room(self._unread[0]):
            self._reports.push(self._unread.popleft(), 0.0)
            moved = True
        return moved

    def _send_state(self, now: float) -> None:
        """Send the board's command and values to all, and read the trainer's wish."""
        command = int(self._board.command)
        if self._state is not None and command == self._state[0] and now < self._next_state:
            return
        self._next_state = now + STATE_PERIOD
        values = np.asarray(self._board.values)
        state = (command, values.tobytes())
        if state != self._state:
            self._state = state
            self._post.send_all(State(command, values.tolist(), self.sender.started))
        wish = self._board.wish.read(self._wishes_read)
        if wish is not None:
            self._wishes_read = wish[0]
            self.sender.change(decode_wish(wish[1]).scheme)
        plan = self.sender.in_force
        if plan is not None and plan.epoch != self._described_epoch:
            self._described_epoch = plan.epoch
            self._board.plan.write(encode(plan))
            self._board.trainer_bell.ring()
        self._stopping = self._stopping or command >= Command.STOP

    def _all_done(self) -> bool:
        blocks = self._blocks
        if len(self._finished) < self.hosts or not self.sender.settled:
            return False
        if any(end.tables and self._tables.received(rank) < end.tables for rank, end in self._finished.items()):
            return False
        return blocks.rows >= sum(end.rows for end in self._finished.values()) and blocks.idle

    def _give_up_rows(self, now: float) -> None:
        """After STOP: if the trainer has not taken a row for DRAIN_SECONDS, it never will, and what waits for it must
        not hold up the end."""
        blocks = self._blocks
        if blocks.idle or blocks.placed != self._placed:
            self._placed = blocks.placed
            self._placed_at = now
        elif blocks.discarded or now - self._placed_at > DRAIN_SECONDS:
            if not blocks.discarded:
                self.problems.append("rows were given up after STOP, because the trainer no longer drains its lanes")
            blocks.discard()

    def _figures(self) -> dict[str, float]:
        figures: dict[str, float] = {"bytes_received": self._blocks.bytes_received, "rows_forwarded": self._blocks.rows}
        plan = self.sender.in_force
        if plan is not None:
            figures["plan_epoch"] = plan.epoch
            figures["plan_shards"] = plan.shards
            figures["plan_chunk_bytes"] = plan.chunk_bytes
            figures["plan_bound_seconds"] = math.nan if plan.bound_seconds is None else plan.bound_seconds
        return figures

"""The relay of every host but the trainer's: models in and on to others, this host's experience and counters up.

It copies the command and the values of the root's board to this host's board."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ddrl.channels.board import Command
from ddrl.channels.counters import Counters
from ddrl.channels.lane import LaneSet
from ddrl.core.config import Config
from ddrl.distribution.relay.control import (
    MAX_TEXT,
    Finished,
    Goodbye,
    Measure,
    MemberFailed,
    Message,
    NewPlan,
    Orders,
    Report,
    State,
)
from ddrl.distribution.relay.core import COUNT_PERIOD, SHORT_SLEEP, LocalHost, Relay
from ddrl.distribution.relay.membership import TAG_BLOCK, TAG_TABLE, Membership
from ddrl.distribution.relay.receiving import ModelReceiver
from ddrl.distribution.transport.codec import make_codec
from ddrl.distribution.transport.tables import TableSender
from ddrl.distribution.transport.uplink import UplinkSender

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
            block = config.cluster.uplink_block_bytes
            period = max(2e-3, 5e-5 * self.hosts)
            self._blocks = UplinkSender(membership.control, TAG_BLOCK, lanes, local.row_dtype, block, period=period)
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

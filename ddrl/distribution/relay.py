"""A relay: the process of a host that speaks MPI while the job runs; one loop over its models and its other duties.

`root_relay` composes the one beside the trainer, `host_relay` that of every other host. `Relay.progress` does what can
be done now; `run` repeats it and sleeps in between until MPI or the relay's bell wakes it, so an idle relay costs next
to nothing and never spins in MPI. A relay handles bytes and rows, not tensors (a codec is given the places of float32
values).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddrl.channels.board import Board, CounterRow, Counters
from ddrl.channels.lane import Lane, LaneSet, MessageLane
from ddrl.channels.mailbox import Mailbox, MailboxReader
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import ConfigError
from ddrl.core.rows import ParameterLayout
from ddrl.distribution.executor import Inbox
from ddrl.distribution.flows import (
    Duty,
    HostCommands,
    LinesIn,
    LinesOut,
    RootCommands,
    RowsIn,
    RowsUp,
    Starter,
    TablesIn,
    TablesUp,
)
from ddrl.distribution.links import Links
from ddrl.distribution.membership import Membership, Message
from ddrl.distribution.models import ModelReceiver, ModelSender, bases_kept
from ddrl.distribution.requests import Events, rest_seconds

UPLINK_BLOCK_BYTES = 1 << 18  # most experience that a relay sends to the root in one message
COUNT_PERIOD = 0.25  # between updates of the relay's own counters [s]
IDLE_SLEEP = 1e-2  # longest sleep [s]: what waits for a time, as rows for their block, is no event
RELAYS_A_CORE = 3  # that may poll so often; not the root, which plans and starts models
SHORT_SLEEP = 1e-3  # of the root, first after something moved [s]: MPI may have read the next message with the last one
BUSY_SLEEP = 2e-4  # shortest where MPI does not wake the relay [s]
BUSY_MAX_SLEEP = 2e-3  # longest while models travel where MPI does not wake the relay [s]
SLEEP_SHARE = 0.1  # longest sleep over the time since something moved, where MPI does not wake the relay
MIN_WAKE_SHARE = 0.5  # sleep long only if at least this share of messages arrived with an MPI wake-up


def readers_needed(config: ClusterConfig) -> int:
    """Firm readers of its mailbox that a relay needs: versions under way, as many sealed ones still on their way to
    slower hosts, and bases."""
    return 2 * config.versions_in_flight + 2 + bases_kept(config)


def slots_needed(config: ClusterConfig) -> int:
    """Fewest slots of a mailbox: newest, one being written, those under way or being sent on, bases of codecs, and one
    pinned by rollouts."""
    return 2 * config.versions_in_flight + 4 + bases_kept(config)


def idle_sleep(links: Links | None) -> float:
    """Longest sleep [s] of a relay that MPI wakes, or that has no model under way. Where very many share a machine, as
    emulated hosts do, their polls alone would otherwise take its cores."""
    relays = 1.0 if links is None else len(links.up) / (links.machines * links.cores)
    return min(COUNT_PERIOD, IDLE_SLEEP * max(1.0, relays / RELAYS_A_CORE))


def longest_sleep(waited: float, idle: float, *, woken: bool, resting: bool) -> float:
    """Longest sleep [s] of a relay, `waited` seconds after something moved. `idle`: its `idle_sleep`; `woken`: whether
    MPI wakes it; `resting`: whether no model is under way.

    Where MPI does not wake it, sleeps of one length between frequent models would set the models' own pace, with one
    sleep for each relay on their way: there the sleep grows with the time waited."""
    if woken:
        return idle
    return rest_seconds(waited, SLEEP_SHARE, idle if resting else BUSY_MAX_SLEEP, shortest=BUSY_SLEEP)


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

    def inbox(self, config: ClusterConfig) -> Inbox:
        """The mailbox as the executor uses it; ConfigError without enough readers."""
        if len(self.readers) < readers_needed(config):
            raise ConfigError(
                f"a relay needs {readers_needed(config)} readers of its mailbox (readers_needed), not "
                f"{len(self.readers)}"
            )
        return Inbox(self.mailbox, self.readers)


class Relay:
    """Models and duties of one host. `duty_period`: between calls of the duties [s]; models are served at every turn,
    for chunks may be a tenth of a millisecond apart."""

    def __init__(
        self,
        membership: Membership,
        local: LocalHost,
        models: ModelSender | ModelReceiver,
        duties: Sequence[Duty],
        duty_period: float,
    ) -> None:
        self.models = models
        self.duties = list(duties)
        self.finished = False
        self._membership = membership
        self._local = local
        self._duty_period = duty_period
        self._handlers = {kind: handler for part in (models, *duties) for kind, handler in part.handlers().items()}
        self._next_counters = 0.0
        self._next_duties = 0.0
        self._events = Events(local.board.relay_bell)
        gc.freeze()  # the collector need not search what exists by now while models travel
        self._sleep = BUSY_SLEEP
        self._moved_at = 0.0
        self._slept = False
        self._woken = False
        self._wake_share = 0.0  # of moves after a sleep, those that MPI announced

    @property
    def hosts(self) -> int:
        """Beside the root."""
        return self._membership.hosts

    @property
    def rank(self) -> int:
        """Among the relays; 0: the root."""
        return self._membership.rank

    def progress(self) -> bool:
        """Do what can be done without waiting; True if anything moved. RelayFailed where another relay has failed."""
        if self.finished:
            return False
        now = time.monotonic()
        moved = False
        if now >= self._next_duties:
            self._next_duties = now + self._duty_period
            messages = self._membership.receive()
            moved = bool(messages)
            for host, message in messages:
                if (handler := self._handlers.get(type(message))) is not None:
                    handler(host, message)
            if now >= self._next_counters or self.models.stopping:  # the last table of a host is exact
                self._next_counters = now + COUNT_PERIOD
                self._count()
            for duty in self.duties:
                moved = duty.progress() or moved
                if duty.done:
                    self._end()
                    return True
        return self.models.progress() or moved  # last: what MPI reads for it meanwhile must not lie unseen

    def run(self) -> None:
        """Relay until the stop protocol has ended on this host."""
        while not self.finished:
            self.step()

    def step(self) -> None:
        """One `progress`, then sleep until MPI or the bell has something; where something moved, only a relay that MPI
        wakes sleeps.

        Where MPI does not wake it (`Events`), it polls again at once, and then after sleeps that grow
        (`longest_sleep`). So does the root always: a model may leave now."""
        bell = self._local.board.relay_bell
        seen = bell.value
        if self.progress():
            self._moved_at = time.monotonic()
            if self._slept:
                self._slept = False
                self._wake_share += 0.1 * (self._woken - self._wake_share)
            self._sleep = SHORT_SLEEP if self._mpi_wakes else BUSY_SLEEP
            if not (self._mpi_wakes and self.rank):
                return
        executor = self.models.executor
        if executor is None or not self.rank:
            woken = self._events.wait(seen, self._sleep)
        else:
            seconds = self._longest() if self._mpi_wakes else self._sleep
            woken = self._events.wait(seen, seconds, executor.wait)
        self._slept = True
        self._woken = woken
        self._sleep = min(self._sleep * 1.5, self._longest())

    @property
    def _mpi_wakes(self) -> bool:
        return self._wake_share > MIN_WAKE_SHARE

    def _longest(self) -> float:
        """Longest sleep now [s]."""
        if self.rank and self._mpi_wakes and not any(duty.waiting for duty in self.duties):
            return COUNT_PERIOD
        idle = idle_sleep(self.models.links) if self.rank else IDLE_SLEEP
        waited = time.monotonic() - self._moved_at
        return longest_sleep(waited, idle, woken=self._mpi_wakes, resting=self.models.resting)

    def _count(self) -> None:
        """Bring the relay's own row of counters up to date."""
        traffic = self.models.totals()
        newest = self._local.mailbox.newest
        figures = {
            "heartbeat": time.time(),
            "model_bytes_sent": traffic.bytes_sent,
            "model_bytes_received": traffic.bytes_received,
            "bytes_sent": traffic.bytes_sent + self._membership.messages.bytes_sent,
            "bytes_received": traffic.bytes_received + self._membership.messages.bytes_received,
            "versions_sealed": traffic.sealed,
            "checksum_failures": traffic.refused,
        }
        if newest >= 0:
            figures["policy_version"] = newest
        for part in (self.models, *self.duties):
            for name, value in part.figures().items():
                figures[name] = figures.get(name, 0.0) + value
        for name, value in figures.items():
            self._local.counters[name].set(float(value))

    def reset(self, membership: Membership) -> None:
        """Continue with other relays, once all have left the old membership by `Membership.withdraw`, or those that
        live by `shrink`. Collective over the new one. Rows on their way arrive once, the newest version leaves
        again."""
        self._membership = membership
        for duty in self.duties:
            duty.reset(membership)
        self.models.reset(membership)

    def _end(self) -> None:
        """Everything has ended everywhere: withdraw and be finished. The membership is left afterwards."""
        self._count()
        self.models.close()
        for duty in self.duties:
            duty.close()
        self._events.close()
        self.finished = True


def root_relay(
    membership: Membership,
    config: Config,
    local: LocalHost,
    *,
    lanes: Sequence[Lane],
    mirrors: Sequence[Counters],
    on_failure: Callable[[str], None] | None = None,
    orders: MessageLane[Message] | None = None,
    reports: MessageLane[Message] | None = None,
    trace: bool = False,
) -> Relay:
    """The relay beside the trainer: models out, experience of all hosts in, and the end of the job. Collective.

    `lanes`, `mirrors`: of each other host in turn, for its rows and its table of counters. `on_failure` is given the
    text of a host's failure. `orders` go to the other hosts' starters of collectors, `reports` come from them."""
    hosts = membership.hosts
    if len(lanes) != hosts or len(mirrors) != hosts:
        raise ConfigError(
            f"the root relay needs a lane and a table for each of the {hosts} other relays, not {len(lanes)} and "
            f"{len(mirrors)}"
        )
    rows = RowsIn(membership, lanes, local.row_dtype, UPLINK_BLOCK_BYTES)
    # Before links are measured, which takes seconds.
    tables = TablesIn(membership, mirrors, local.counters, rows, config.cluster.host_limit)
    models = ModelSender(membership, config, local, trace, tables.all_answer)
    duties: list[Duty] = [
        rows,
        tables,
        RootCommands(membership, local.board, models, rows, on_failure),
    ]
    if orders is not None and reports is not None:
        duties.insert(0, LinesOut(membership, orders, reports))
    return Relay(membership, local, models, duties, 0.0)


def host_relay(
    membership: Membership,
    config: Config,
    local: LocalHost,
    *,
    lanes: LaneSet,
    table: Counters,
    failure: Callable[[], str] | None = None,
    starter: Starter | None = None,
    trace: bool = False,
) -> Relay:
    """The relay of every other host: models in and on to others, this host's experience and counters up. Collective.

    `lanes`: this host's. `table`: this host's counters, sent up. Where this host's command is FAIL, the root gets the
    text of `failure` and ends the job. `starter`: of this host's collectors, where it has any."""
    rows = RowsUp(membership, lanes, local.row_dtype, UPLINK_BLOCK_BYTES, max(2e-3, 5e-5 * membership.hosts))
    tables = TablesUp(membership, table, local.counters)
    duties: list[Duty] = [rows, tables]
    if starter is not None:
        duties.append(LinesIn(membership, starter))
    models = tables.models = ModelReceiver(membership, config, local, trace)
    commands = HostCommands(
        membership,
        local.board,
        models,
        rows,
        tables,
        starter,
        quiet=local.quiet,
        failure=failure,
    )
    return Relay(membership, local, models, [*duties, commands], SHORT_SLEEP)

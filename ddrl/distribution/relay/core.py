"""What both kinds of relay share: polling everything once, sleeping between polls, counters, and the end.

`progress` does what can be done now; `run` repeats it and sleeps between, until MPI or the relay's bell wakes it, so
an idle relay costs next to nothing and never spins in MPI. A relay handles bytes and rows, not tensors (a codec is
given the places of float32 values)."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ddrl.channels.board import Board
from ddrl.channels.counters import CounterRow
from ddrl.channels.mailbox import Mailbox, MailboxReader
from ddrl.core.config import ClusterConfig
from ddrl.core.errors import ConfigError
from ddrl.core.layouts import ParameterLayout
from ddrl.distribution.relay.control import Message
from ddrl.distribution.relay.membership import Membership
from ddrl.distribution.relay.models import Models, bases_kept
from ddrl.distribution.transport.events import Events
from ddrl.distribution.transport.inbox import MailboxInbox
from ddrl.distribution.transport.links import Links
from ddrl.distribution.transport.requests import Part
from ddrl.distribution.transport.waits import rest_seconds

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

"""What both kinds of relay share: polling everything once, sleeping between polls, counters, and the end.

`progress` does what can be done now; `run` repeats it and sleeps on the relay's bell between, so an idle relay costs
next to nothing and never spins in MPI. A relay handles bytes and rows, not tensors (a codec is given the places of
float32 values)."""

from __future__ import annotations

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
from ddrl.distribution.transport.inbox import MailboxInbox
from ddrl.distribution.transport.requests import Part

COUNT_PERIOD = 0.05  # s, between updates of the relay's own counters
# s, between two polls: shortest, longest while models travel, longest
BUSY_SLEEP, BUSY_MAX_SLEEP, IDLE_SLEEP = 2e-4, 2e-3, 1e-2
SLOW_SLEEP = 2e-2  # s, longest where links are slow: a small socket must not run empty
SOCKET_BYTES = 1 << 16


def readers_needed(config: ClusterConfig) -> int:
    """Firm readers of its mailbox that a relay needs: versions under way, as many sealed ones still on their way to
    slower hosts, and bases."""
    return 2 * config.versions_in_flight + 2 + bases_kept(config)


def slots_needed(config: ClusterConfig) -> int:
    """Fewest slots of a mailbox: newest, one being written, those under way or being sent on, bases of codecs, and one
    pinned by rollouts."""
    return 2 * config.versions_in_flight + 4 + bases_kept(config)


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

    def __init__(self, membership: Membership, config: ClusterConfig, local: LocalHost) -> None:
        if len(local.readers) < readers_needed(config):
            raise ConfigError(
                f"a relay needs {readers_needed(config)} readers of its mailbox (readers_needed), not "
                f"{len(local.readers)}"
            )
        self.hosts, self.rank = membership.hosts, membership.rank
        self.finished = False
        self.problems: list[str] = []  # of experience, for the log; those of models stand in `models.problems`
        self._membership, self._post, self._local, self._board = membership, membership.post, local, local.board
        self._inbox = MailboxInbox(local.mailbox, local.readers)
        self._flows: list[Flow] = []
        self._stopping = False
        self._next_counters = 0.0
        self._sleep, self._pace, self._moved_at = BUSY_SLEEP, BUSY_SLEEP, 0.0

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
        messages = self._membership.messages()
        for rank, message in messages:
            self._handle(rank, message)
        if self.finished:
            return True
        moved = self.models.progress() or bool(messages)
        moved = self._move() or moved
        now = time.monotonic()
        if now >= self._next_counters:
            self._next_counters = now + COUNT_PERIOD
            self._count()
        return moved

    def run(self) -> None:
        """Relay until the stop protocol has ended on this host."""
        while not self.finished:
            self.step()

    def step(self) -> None:
        """One `progress`; where nothing moved, sleep until the bell, or for about half the time that lately lay between
        two moves.

        Where many relays share a core, they poll less often and sleep between any two polls: else polling takes the
        time that moving needs."""
        bell, least = self._board.relay_bell, self._min_sleep()
        seen = bell.value
        moved = self.progress()
        if moved:
            now = time.monotonic()
            self._pace += 0.1 * (min(now - self._moved_at, SLOW_SLEEP) - self._pace)
            self._moved_at = now
            self._sleep = max(least, 0.5 * self._pace)
        if not self.finished and (not moved or least > BUSY_SLEEP):
            bell.wait(seen, least if moved else self._sleep)
            self._sleep = max(least, min(self._max_sleep(), self._sleep * 1.3))

    def _min_sleep(self) -> float:
        links = self.models.links
        return BUSY_SLEEP if links is None else max(BUSY_SLEEP, links.min_rest)

    def _max_sleep(self) -> float:
        """While models are under way: as long as a socket takes to fill up, for MPI reads sockets only when it is
        called."""
        if self.models.resting:
            return IDLE_SLEEP
        links = self.models.links
        return BUSY_MAX_SLEEP if links is None else min(SLOW_SLEEP, SOCKET_BYTES / links.down[self.rank])

    def _count(self) -> None:
        """Bring the counters up to date."""
        row, traffic, newest = self._local.counters, self.models.totals(), self._local.mailbox.newest
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
        self.finished = True

"""A plan: which piece of a model is sent from which host to which, in what order.

Made by `schemes`; run alike by `executor` (MPI) and `simulator` (modeled network). Host 0 is the root, the relay beside
the trainer, which has the whole model from the start; hosts 1..n are the others. A host may send what it has received;
of the messages that it may send, it sends the one with the lowest number first. So a plan needs no dependencies between
messages: they follow from who receives what. Imports no MPI.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import PlanError
from ddrl.core.rows import ALIGNMENT

Bytes = NDArray[np.uint8]

HEADER_BYTES = 24  # sent before each chunk: `chunks.HEADER`
MODEL_HEADER_BYTES = 96  # sent once a model, before the header of its first chunk: `chunks.MODEL_HEADER`


@dataclass(frozen=True)
class Plan:
    """The messages of one model of `nbytes` bytes to hosts 1..`hosts`.

    `bounds` [K + 1] cuts the model into K chunks. Message i carries the `count[i]` chunks from `first[i]` on, from host
    `source[i]` to host `target[i]`. Arrays are int64, one entry a message; the lowest message has precedence."""

    scheme: str
    hosts: int
    nbytes: int
    bounds: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]

    @classmethod
    def of(cls, scheme: str, hosts: int, bounds: Iterable[int], messages: Iterable[tuple[int, int, int, int]]) -> Plan:
        """A plan from (source, target, first chunk, chunks) in the order of precedence."""
        edges = np.asarray(list(bounds), np.int64)
        table = np.asarray(list(messages), np.int64).reshape(-1, 4)
        return cls(scheme, hosts, int(edges[-1]), edges, *np.ascontiguousarray(table.T))

    @property
    def chunks(self) -> int:
        """K."""
        return len(self.bounds) - 1

    @property
    def messages(self) -> int:
        """Number of messages a model."""
        return len(self.source)

    def payload(self) -> NDArray[np.int64]:
        """Model bytes of every message."""
        return self.bounds[self.first + self.count] - self.bounds[self.first]

    def senders(self) -> int:
        """The largest number of hosts that one host receives from; 0 without messages."""
        pairs = np.unique(self.source * (self.hosts + 1) + self.target)
        return int(np.bincount(pairs % (self.hosts + 1)).max(initial=0))

    def sent_by(self, host: int) -> NDArray[np.int64]:
        """Messages that `host` sends, in order of precedence."""
        return np.flatnonzero(self.source == host)

    def sent_to(self, host: int) -> NDArray[np.int64]:
        """Messages that `host` receives, in order of precedence."""
        return np.flatnonzero(self.target == host)

    def check(self) -> None:
        """Raise PlanError unless every host receives each byte exactly once and no host must send what it never gets.

        The second is checked by running the plan on unlimited links: a host can send a chunk once it has it, in
        whatever order messages arrive. If that run sends every message, no execution can deadlock. O(messages)."""
        edges = self.bounds
        if (
            edges[0] != 0
            or edges[-1] != self.nbytes
            or np.any(np.diff(edges) < 0)
            or (self.nbytes and np.any(np.diff(edges) == 0))
        ):
            raise PlanError(f"plan {self.scheme}: its chunks do not tile the model of {self.nbytes} bytes")
        if self.messages == 0:
            if self.hosts and self.nbytes:
                raise PlanError(f"plan {self.scheme}: {self.hosts} hosts wait for a model, but nobody sends one")
            return
        for name, column, low, high in (
            ("source", self.source, 0, self.hosts),
            ("target", self.target, 1, self.hosts),
            ("first", self.first, 0, self.chunks - 1),
            ("count", self.count, 1, self.chunks),
        ):
            if column.min() < low or column.max() > high:
                raise PlanError(f"plan {self.scheme}: a message's {name} lies outside {low}..{high}")
        if np.any(self.first + self.count > self.chunks) or np.any(self.source == self.target):
            raise PlanError(f"plan {self.scheme}: a message runs past the model's end or back to its sender")
        wanted = self._arrivals()
        if np.any(wanted != 1):
            host, chunk = (int(place[0]) for place in np.nonzero(wanted != 1))
            raise PlanError(
                f"plan {self.scheme}: host {host + 1} gets chunk {chunk} {int(wanted[host, chunk])} times, not once"
            )
        stuck = self._stuck()
        if stuck:
            raise PlanError(
                f"plan {self.scheme}: {stuck} messages are never sent, because their senders wait for one another"
            )

    def _arrivals(self) -> NDArray[np.int64]:
        """How often each chunk is sent to each host, [hosts, K]."""
        steps = np.zeros((self.hosts, self.chunks + 1), np.int64)
        np.add.at(steps, (self.target - 1, self.first), 1)
        np.add.at(steps, (self.target - 1, self.first + self.count), -1)
        return np.cumsum(steps, axis=1)[:, :-1]

    def waiters(self) -> dict[int, list[int]]:
        """Messages that their sender can send once it has received a chunk, by host * K + chunk. Those of the root are
        not among them: they wait for nothing."""
        waiting: dict[int, list[int]] = {}
        columns = (self.source.tolist(), self.first.tolist(), self.count.tolist())
        for message, (host, first, count) in enumerate(zip(*columns, strict=True)):
            if host:
                for chunk in range(first, first + count):
                    waiting.setdefault(host * self.chunks + chunk, []).append(message)
        return waiting

    def _stuck(self) -> int:
        """Messages left after everything that can be sent has been."""
        waiting = self.waiters()
        targets: list[int] = self.target.tolist()
        firsts: list[int] = self.first.tolist()
        counts: list[int] = self.count.tolist()
        missing = list(counts)
        ready: list[int] = self.sent_by(0).tolist()
        sent = 0
        while ready:
            message = ready.pop()
            sent += 1
            place = targets[message] * self.chunks + firsts[message]
            for received in range(place, place + counts[message]):
                for other in waiting.pop(received, ()):
                    missing[other] -= 1
                    if not missing[other]:
                        ready.append(other)
        return self.messages - sent


# -- boundaries of shards and chunks [bytes]: multiples of ALIGNMENT, except for the model's end


def cut_evenly(nbytes: int, parts: int) -> list[int]:
    """Boundaries of `parts` shards of a model, [parts + 1]; sizes differ by at most one alignment unit, the last may
    end short of one.

    Where the model has fewer units than parts, the first shards get one each and the others are empty.
    """
    if parts < 1:
        raise PlanError(f"a model cannot be cut into {parts} shards: at least 1 is needed")
    if nbytes < 0:
        raise PlanError(f"a model cannot have {nbytes} bytes")
    units = -(-nbytes // ALIGNMENT)
    base, extra = divmod(units, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(min(nbytes, bounds[-1] + ALIGNMENT * (base + (part < extra))))
    return bounds


def cut_by_weight(nbytes: int, weights: list[float]) -> list[int]:
    """Boundaries of one shard for each weight, sizes as near to proportional as alignment allows; a weight of 0 gives
    an empty shard."""
    total = sum(weights)
    if not weights or total <= 0 or min(weights) < 0:
        raise PlanError(f"shards need weights of at least 0, one of them positive, not {weights}")
    units = -(-nbytes // ALIGNMENT)
    seen = 0.0
    bounds = [0]
    for weight in weights:
        seen += weight
        bounds.append(min(nbytes, ALIGNMENT * round(units * seen / total)))
    bounds[-1] = nbytes
    return bounds


def cut_chunks(start: int, stop: int, chunk_bytes: int) -> list[int]:
    """Ends of the chunks of the shard [start, stop): nearly equal, none longer than `chunk_bytes` (0: one chunk); none
    for an empty shard."""
    if stop <= start:
        return []
    pieces = 1 if chunk_bytes <= 0 else -(-(stop - start) // max(ALIGNMENT, chunk_bytes - chunk_bytes % ALIGNMENT))
    return [start + end for end in cut_evenly(stop - start, pieces)[1:]]


def chunk_bounds(nbytes: int, chunk_bytes: int) -> list[int]:
    """Chunk boundaries of a whole model; an empty model is one empty chunk, so that its header is still sent."""
    return [0, *cut_chunks(0, nbytes, chunk_bytes)] if nbytes else [0, 0]

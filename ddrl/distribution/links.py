"""Measuring the links between relays: rates each way, latency, and what a message costs (the processor's part:
`processor`).

Collective over the relays' communicator, at the start and whenever the root asks again; it lasts about a second or two.
In each round every host sends to the one a certain number of places further on, which answers when it has everything; a
host's rate each way is the best of all rounds, so a slow partner does not count against it. Nobody spins while it
waits. Models must be at rest meanwhile.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddrl.distribution.chunks import Bytes
from ddrl.distribution.executor import Executor
from ddrl.distribution.plan import Plan
from ddrl.distribution.requests import COLLECTIVE_TAG, Exchange, Guard, Unguarded
from ddrl.distribution.schemes import make_plan
from ddrl.distribution.simulator import Network
from ddrl.distribution.waits import rest

if TYPE_CHECKING:
    from mpi4py import MPI


# -- processor ---------------------------------------------------------------------------------------------------------
# What a message and a byte cost the processor here: short models through the executor itself, on the links that are
# there.
#
# Collective over the relays, part of measuring the links. Two plans of the same trees carry a few models each, one of
# small messages and one of large ones; every host counts the processor time of its own thread in the polls that moved
# something, so that neither waiting for the wire nor a machine that others keep busy counts. What both cost a message
# gives a line: its intercept is a message's cost at either end, its slope a byte's. The least of several models counts,
# for what disturbs can only add.


BYTE_CPU = 1e-9  # s at each end, where links are too slow to measure it; fitted once to benchmarks.distribution
SMALL = 1 << 10  # bytes of payload
LARGE = 1 << 15
FANOUT = 3
MODELS = 4  # of each size; the first opens connections and is not counted
MESSAGES = 1 << 9  # that all hosts receive in one model, about
SECONDS = 0.025  # of a link's time that a model of large messages may take
MIN_BYTE = 1e-10  # s: 10 GB/s, which no checksum and copy together reach
MIN_LARGE_PIECES = 6  # large messages to a host from which a slope is taken


class _Memory:
    """A place for one model: what the executor asks of a slot, and of a version that is held."""

    def __init__(self, nbytes: int, free: list[_Memory]) -> None:
        self.version = 0
        self.checksum = 0
        self.time_ns = 0
        self.values = np.zeros(8)
        self.data: Bytes = np.zeros(nbytes, np.uint8)
        self._free = free

    def seal(self, version: int, values: NDArray[np.float64], checksum: int, time_ns: int, hold: bool) -> None:
        """Nobody reads it."""
        if not hold:
            self.abandon()

    def abandon(self) -> None:
        """Free for the next."""
        self._free.append(self)

    def share(self) -> _Memory:
        """The same."""
        return self

    def release(self) -> None:
        """It stays."""


class _Memories:
    """An inbox of two places, taken in turn."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[_Memory] = []
        self._free += [_Memory(nbytes, self._free) for _ in range(2)]

    def open(self, urgent: bool) -> _Memory | None:
        """A free place."""
        return self._free.pop(0) if self._free else None


def measure_processor(comm: MPI.Comm, rate: float, exchange: Exchange, guard: Guard) -> tuple[float, float]:
    """Seconds that a message, and a byte of it, cost the processor at either end; every rank returns the same.

    `rate`: of the links [bytes/s], the same on every rank. Where they are too slow for large messages in the time, a
    byte costs BYTE_CPU."""
    hosts = comm.size - 1
    count = max(8, min(64, MESSAGES // hosts))
    small = _message_seconds(
        comm, exchange, guard, make_plan("stripes", hosts, count * SMALL, fanout=FANOUT, chunk_bytes=SMALL)
    )
    count = min(count, int(rate * SECONDS / LARGE))
    if count < MIN_LARGE_PIECES:
        return max(0.0, small - BYTE_CPU * SMALL), BYTE_CPU
    large = _message_seconds(
        comm, exchange, guard, make_plan("stripes", hosts, count * LARGE, fanout=FANOUT, chunk_bytes=LARGE)
    )
    byte = max(MIN_BYTE, (large - small) / (LARGE - SMALL))
    return max(0.0, small - byte * SMALL), byte


def _message_seconds(comm: MPI.Comm, exchange: Exchange, guard: Guard, plan: Plan) -> float:
    """Processor seconds of a message at one end: of all hosts, over all messages' ends, in the cheapest model."""
    executor = Executor(comm, plan, _Memories(plan.nbytes) if comm.rank else None)
    guard.keep(executor)
    executor.open()
    held = _Memory(plan.nbytes, [])
    spent = np.zeros(MODELS)
    longest = max(5e-4, 2e-5 * comm.size)  # between polls: many relays on one machine must not poll all the time
    for model in range(MODELS):
        exchange.barrier()  # receives stand everywhere
        used = time.thread_time()
        if comm.rank == 0:
            held.version = model
            executor.start(held)
            spent[model] += time.thread_time() - used
        pause = 5e-5
        while not (executor.idle and (comm.rank == 0 or len(executor.reports) > model)):
            used = time.thread_time()
            if executor.progress():
                spent[model] += time.thread_time() - used
                pause = 5e-5
            else:
                guard.poll()
                time.sleep(pause)
                pause = min(longest, 1.5 * pause)
    exchange.barrier()
    executor.close()
    exchange.barrier()  # before anything else is sent by these tags
    guard.drop(executor)
    everywhere = exchange.reduce(spent, np.add)
    return float(everywhere[1:].min()) / (2 * plan.messages)


# -- links -------------------------------------------------------------------------------------------------------------

PIECE = 1 << 15  # bytes of a message in the rounds
ROUND_SECONDS = 0.06
WAKE_SECONDS = 2e-4  # from a message's arrival until its relay runs
# on one machine the kernel's packets cost its cores about as much again as the relays' own work
SHARED_CPU = 2.0
MIN_PIECES = 4  # pieces in a round
MAX_PIECES = 1 << 11
ROUNDS = 12  # partners of each host: at most, and where a slow link makes rounds long
LEAST_ROUNDS = 3
ROUNDS_SECONDS = 1.0  # s, after which there are no more rounds; where models wait
ANEW_SECONDS = 0.5
FRAME_BYTES = 40  # of TCP and IP, by packet
PACKET_BYTES = 1448
ALIKE = 1.35  # rates that differ from the middle one by less are taken as equal
LEAST_BURST = 1 << 10  # bytes
MOST_BURST = 1 << 18
BURST_TURNS = 4  # trips of each size, and s: at least
BURST_SECONDS = 0.03
LATENCY_TURNS = 6  # trips to a host: at least; s, for each relay there is
LATENCY_SECONDS = 3e-3
TAG = COLLECTIVE_TAG + 1


@dataclass(frozen=True)
class Links:
    """What was measured: rates [hosts + 1] in bytes/s of payload, root first; times in seconds. `machines`: distinct
    machines below the hosts.

    `message_seconds`, `byte_seconds`: of the processor, at both ends together. `burst`: bytes that an idle link lets
    through at once.
    """

    up: list[float]
    down: list[float]
    latency: float
    message_seconds: float
    machines: int
    cores: int
    byte_seconds: float
    burst: float = 0.0

    def network(self) -> Network:
        """For the simulator. Hosts that stand on one machine share its cores."""
        rates = [*self.up, *self.down[1:]]
        middle = statistics.median(rates)
        if max(rates) < ALIKE * middle and min(rates) > middle / ALIKE:  # what differs less is noise
            up = down = [middle] * len(self.up)
        else:
            up = self.up
            down = self.down
        shared = self.cores if self.machines == 1 and len(self.up) > 1 else 0
        message = 0.5 * self.message_seconds * (SHARED_CPU if shared else 1.0)
        return Network(
            up,
            down,
            latency=self.latency + WAKE_SECONDS,
            send_cpu=message,
            receive_cpu=message,
            cpu_byte=0.5 * self.byte_seconds,
            cores=shared,
            burst=self.burst,
        )


def measure_links(comm: MPI.Comm, guard: Guard | None = None, known: Links | None = None) -> Links:
    """Measure; every rank returns the same. `guard` raises where another relay fails meanwhile. `known`: what was
    measured before, the same at every rank: only rates and latency are measured anew, for a link that has changed
    changes nothing else."""
    size = comm.size
    if size == 1:
        return Links([math.inf], [math.inf], 0.0, 0.0, 1, os.cpu_count() or 1, 0.0)
    guard = guard or Unguarded()
    probe = _Probe(comm, guard)
    latency = probe.latency()
    probe.round(1, [MIN_PIECES] * size)  # opens connections and fills token buckets' debts
    limit = ROUNDS_SECONDS if known is None else ANEW_SECONDS
    rates, pieces = measure_rates(size, latency, lambda shift, counts: probe.gather(probe.round(shift, counts)), limit)
    fan = probe.fan_out(pieces)
    up = rates.up
    down = rates.down
    up[0] = max(up[0], fan)
    if known is not None:
        probe.close()
        return replace(known, up=up, down=down, latency=latency)
    machines = len(set(probe.gather(zlib.crc32(_machine().encode()))))
    rate = float(np.median([up, down]))
    burst = probe.burst(rate, latency)
    message, byte = measure_processor(comm, rate, probe, guard)
    probe.close()
    return Links(up, down, latency, 2 * message, machines, os.cpu_count() or 1, 2 * byte, burst)


def measure_rates(
    size: int,
    latency: float,
    timed: Callable[[int, Sequence[int]], Sequence[float]],
    limit: float = ROUNDS_SECONDS,
) -> tuple[Rates, int]:
    """Rates of all links, and the pieces that a middling one carries in a round. `timed`: plays a round (shift, pieces
    of each rank) and gives every rank's seconds, the same at every rank. `limit` [s], about."""
    pieces = MIN_PIECES
    rates = Rates(size, latency)
    shifts = list(range(1, size))
    if len(shifts) > ROUNDS:  # spread over near and far, the same on every rank
        few = ROUNDS if size <= 4 * ROUNDS else ROUNDS // 4
        shifts = sorted({round(1 + index * (size - 2) / (few - 1)) for index in range(few)})
    while True:  # how much fits into a round, roughly
        seconds = timed(shifts[0], [pieces] * size)
        middle = statistics.median(seconds)
        if middle > 0.3 * ROUND_SECONDS or pieces >= MAX_PIECES:
            break
        pieces = min(MAX_PIECES, pieces * 4)
    rates.add(shifts[0], [pieces] * size, seconds)
    spent = 0.0
    for done, shift in enumerate(shifts):
        if done >= LEAST_ROUNDS and spent > limit:
            break
        counts = [max(pieces, _fitting(rate)) for rate in rates.pairs(shift)]
        seconds = timed(shift, counts)
        rates.add(shift, counts, seconds)
        spent += max(seconds)
    return rates, _fitting(pieces * PIECE / max(middle, 1e-6))


def _fitting(rate: float) -> int:
    """Pieces that a link carries in a round, at a rate [bytes/s]."""
    return max(MIN_PIECES, min(MAX_PIECES, round(rate * ROUND_SECONDS / PIECE)))


class Rates:
    """What the rounds say of each host's link [bytes/s], the same at every rank.

    A host's rate each way is the best of its rounds, for a slow partner shall not count against it. Rounds that carried
    little count only where none carried more: in them the burst of an idle link makes it seem faster than it is."""

    def __init__(self, size: int, latency: float) -> None:
        self._size = size
        self._latency = latency
        self._up: list[list[tuple[int, float]]] = [[] for _ in range(size)]  # (pieces, rate) of each round
        self._down: list[list[tuple[int, float]]] = [[] for _ in range(size)]

    def add(self, shift: int, counts: Sequence[int], seconds: Sequence[float]) -> None:
        """A round in which each rank sent its count of pieces to the one `shift` places on, in its seconds."""
        for rank, (pieces, spent) in enumerate(zip(counts, seconds, strict=True)):
            seen = (pieces, pieces * PIECE / max(spent - 2 * self._latency, 0.5 * spent, 1e-9))
            self._up[rank].append(seen)
            self._down[(rank + shift) % self._size].append(seen)

    def pairs(self, shift: int) -> list[float]:
        """The rate at which each rank may reach the one `shift` places on, by all its rounds."""
        up, down = ([max(rate for _, rate in some) for some in seen] for seen in (self._up, self._down))
        return [min(up[rank], down[(rank + shift) % self._size]) for rank in range(self._size)]

    @property
    def up(self) -> list[float]:
        """Each rank's, of what it sends."""
        return [_best(seen) for seen in self._up]

    @property
    def down(self) -> list[float]:
        """Each rank's, of what it receives."""
        return [_best(seen) for seen in self._down]


def _best(seen: Sequence[tuple[int, float]]) -> float:
    enough = 0.5 * max(pieces for pieces, _ in seen)
    return max(rate for pieces, rate in seen if pieces >= enough)


def _machine() -> str:
    """Names the machine under a host, namespaces and containers seen through."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import platform

        return platform.node()


class _Probe(Exchange):
    """Rounds of messages on one communicator."""

    def __init__(self, comm: MPI.Comm, guard: Guard) -> None:
        super().__init__(comm, guard)
        self._out = np.zeros(PIECE, np.uint8)
        self._nothing = np.zeros(1, np.uint8)
        self._in = np.zeros((MAX_PIECES, PIECE), np.uint8)

    def latency(self) -> float:
        """Half the quickest round trip of an empty message between the root and each of a few hosts, the longest of
        them: what disturbs can only add."""
        found: list[float] = []
        nothing = np.zeros(1, np.uint8)
        for host in sorted({1, self.size // 2 or 1, self.size - 1}):
            self.barrier()
            times: list[float] = []
            last = np.zeros(1, np.uint8)
            end = time.perf_counter() + LATENCY_SECONDS * self.size
            while not last[0]:  # the longer it lasts, the less often all others look whether it is over
                if self.rank == 0:
                    last[0] = len(times) >= LATENCY_TURNS and time.perf_counter() > end
                    begun = time.perf_counter()
                    self.wait([self.send(last, host, TAG)])
                    self.wait([self.receive(nothing, host, TAG)])
                    times.append(0.5 * (time.perf_counter() - begun))
                elif self.rank == host:
                    self.wait([self.receive(last, 0, TAG)])
                    self.wait([self.send(nothing, 0, TAG)])
                else:
                    break
            found.append(min(times, default=0.0))
        return max(self.gather(max(found)))

    def round(self, shift: int, counts: Sequence[int]) -> float:
        """Everybody sends its count of pieces to the host `shift` places on; seconds until that host confirms that it
        has them all.

        Timed by the sender, so that a process that is late can only make a link seem slower, never faster.
        """
        from mpi4py import MPI

        size = self.size
        rank = self.rank
        source = (rank - shift) % size
        target = (rank + shift) % size
        done = np.zeros(1, np.uint8)
        self.barrier()
        receives = [self.receive(self._in[index], source, TAG + 2) for index in range(counts[source])]
        answer = self.receive(done, target, TAG + 4)
        begun = time.perf_counter()
        sends = [self.send(self._out, target, TAG + 2) for _ in range(counts[rank])]
        answered = False
        while not answer.Test():
            self.poll()
            if not answered and MPI.Request.Testall(receives):
                sends.append(self.send(self._nothing, source, TAG + 4))
                answered = True
            rest(begun)
        seconds = time.perf_counter() - begun
        self.wait(receives)
        if not answered:
            sends.append(self.send(self._nothing, source, TAG + 4))
        self.wait(sends)
        return seconds

    def fan_out(self, pieces: int) -> float:
        """Rate at which the root can send to up to 8 hosts at once [bytes/s]."""
        targets = range(1, min(9, self.size))
        share = max(2, pieces // 4)
        self.barrier()
        begun = time.perf_counter()
        if self.rank == 0:
            self.wait([self.send(self._out, host, TAG + 3) for _ in range(share) for host in targets])
        elif self.rank in targets:
            self.wait([self.receive(self._in[index], 0, TAG + 3) for index in range(share)])
        ended = time.perf_counter() - begun if self.rank in targets else 0.0
        slowest = max(self.gather(ended))
        return len(targets) * share * PIECE / max(slowest, 1e-9)

    def burst(self, rate: float, latency: float) -> float:
        """Bytes that an idle link lets through at once: the root sends more and more, each size a few times, until the
        quickest takes more than half as long as at `rate`. The size before that was between the burst and twice the
        burst; what it took is the rest at `rate`."""
        data = self._in.reshape(-1)
        answer = np.zeros(1, np.uint8)
        found = 0.0
        self.barrier()
        if self.rank == 0:
            data[0] = 1  # go on

            def quickest(size: int, least: float = BURST_SECONDS) -> float:
                seconds = list[float]()
                end = time.perf_counter() + least
                while len(seconds) < BURST_TURNS or time.perf_counter() < end:
                    time.sleep(min(0.1, 2 * size / rate))  # an idle token bucket refills meanwhile; no event tells when
                    begun = time.perf_counter()
                    self.wait([self.send(data[:size], 1, TAG + 5), self.receive(answer, 1, TAG + 5)])
                    seconds.append(time.perf_counter() - begun)
                return min(seconds)

            # While all others still look whether it is over trips take longer; the longer it lasts, the less they look.
            nothing = quickest(1, LATENCY_SECONDS * self.size)
            size = max(LEAST_BURST, int(4 * rate * latency))
            while size <= MOST_BURST:  # less than the first size would be lost in the noise
                seconds = max(0.0, quickest(size) - nothing)
                full = seconds > 0.5 * size / rate
                if not full or not found:
                    found = max(0.0, size - rate * seconds)
                if full:
                    break
                size *= 2
            data[0] = 0
            self.wait([self.send(data[:1], 1, TAG + 5)])
        elif self.rank == 1:
            while True:
                self.wait([self.receive(data[:MOST_BURST], 0, TAG + 5)])
                if not data[0]:
                    break
                self.wait([self.send(answer, 0, TAG + 5)])
        return max(self.gather(found))

"""Measuring the links between relays: rates each way, latency, bursts, and what a message costs the processor.

Collective over the relays, at the start and whenever the root asks again; it takes one or two seconds, in which no
model may be under way. In each round every host sends to the one a certain number of places further on, which answers
when it has everything; a host's rate each way is the best of all rounds, so a slow partner does not count against it.
Nobody spins while it waits.
"""

from __future__ import annotations

import os
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddrl.channels.mailbox import Mailbox
from ddrl.distribution.executor import Executor, Inbox
from ddrl.distribution.plan import Network, Plan
from ddrl.distribution.requests import COLLECTIVE_TAG, Exchange, Guard, rest
from ddrl.distribution.schemes import make_plan

if TYPE_CHECKING:
    from mpi4py import MPI


# -- processor ---------------------------------------------------------------------------------------------------------
# What a message and a byte cost the processor: a few short models are sent through the executor itself, over the real
# links.
#
# Two plans of the same trees carry the models, one of small messages and one of large ones. Every host counts the
# processor time of its own thread in the polls that moved something, so neither waiting for the wire nor other work on
# the machine counts. The two costs of a message give a line: its intercept is a message's cost at either end, its slope
# a byte's. The cheapest of several models counts, because disturbances only add; half of the models are sent some time
# after the others, for a disturbance lasts longer than a few models.


BYTE_CPU = 1e-9  # at each end, where links are too slow to measure it [s]; fitted once to benchmarks.distribution
SMALL = 1 << 10  # payload of a small message [bytes]
LARGE = 1 << 15  # payload of a large message [bytes]
FANOUT = 3
MODELS = 3  # of each size, each time; the first opens connections and is not counted
MESSAGES = 1 << 9  # that all hosts together receive in one model, about
SECONDS = 0.025  # longest time of a model of large messages on a link [s]
MIN_BYTE = 1e-10  # [s]: 10 GB/s, which no checksum and copy together reach
MIN_LARGE_PIECES = 6  # fewest large messages to a host from which a slope is taken


def processor_plans(hosts: int, rate: float) -> list[Plan]:
    """Of the models that show what a message costs: small messages; and large ones, where links of `rate` [bytes/s],
    the same on every rank, are fast enough for them."""
    count = max(8, min(64, MESSAGES // hosts))
    plans = [make_plan("stripes", hosts, count * SMALL, fanout=FANOUT, chunk_bytes=SMALL)]
    count = min(count, int(rate * SECONDS / LARGE))
    if count >= MIN_LARGE_PIECES:
        plans.append(make_plan("stripes", hosts, count * LARGE, fanout=FANOUT, chunk_bytes=LARGE))
    return plans


def processor_costs(small: float, large: float | None = None) -> tuple[float, float]:
    """Seconds that a message, and a byte of it, cost the processor at either end, by those of a small and a large
    message; where links are too slow for large ones, a byte costs BYTE_CPU."""
    byte = BYTE_CPU if large is None else max(MIN_BYTE, (large - small) / (LARGE - SMALL))
    return max(0.0, small - byte * SMALL), byte


def _message_seconds(probe: _Probe, plan: Plan) -> float:
    """Processor seconds of a message at one end, the same at every rank: the mean over all messages and both ends, in
    the cheapest model."""
    rank = probe.rank
    readers = 3
    mailbox = Mailbox.create(None, plan.nbytes, 5, readers)
    inbox = Inbox(mailbox, [mailbox.reader(index, firm=True) for index in range(readers)])
    executor = Executor(probe.comm, plan, inbox if rank else None)
    probe.guard.keep(executor)
    executor.open()
    model = np.zeros(plan.nbytes, np.uint8)
    spent = np.zeros(MODELS)
    longest = max(5e-4, 2e-5 * probe.size)  # between polls: many relays on one machine must not poll all the time
    for version in range(MODELS):
        probe.barrier()  # receives are posted everywhere
        if rank == 0:
            mailbox.publish(model, version)
            held = inbox.hold()
            used = time.thread_time()
            executor.start(held)
            spent[version] += time.thread_time() - used
        pause = 5e-5
        while not (executor.idle and (rank == 0 or len(executor.reports) > version)):
            used = time.thread_time()
            if executor.progress():
                spent[version] += time.thread_time() - used
                pause = 5e-5
            else:
                probe.poll()
                time.sleep(pause)
                pause = min(longest, 1.5 * pause)
    probe.barrier()
    executor.close()
    probe.barrier()  # before anything else is sent by these tags
    probe.guard.drop(executor)
    everywhere = probe.reduce(spent, np.add)
    return float(everywhere[1:].min()) / (2 * plan.messages)


# -- links -------------------------------------------------------------------------------------------------------------

PIECE = 1 << 15  # of a message in the rounds [bytes]
ROUND_SECONDS = 0.06
WAKE_SECONDS = 2e-4  # from a message's arrival until its relay runs
SHARED_CPU = 2.0  # on one machine the kernel's packets cost its cores about as much again as the relays' own work
MIN_PIECES = 4  # pieces in a round
MAX_PIECES = 1 << 11
ROUNDS = 12  # most partners of each host
MIN_ROUNDS = 3  # fewest, where a slow link makes rounds long
ROUNDS_SECONDS = 1.0  # after which no more rounds begin [s]
REMEASURE_SECONDS = 0.5  # the same where models wait [s]
ALIKE = 1.35  # rates that differ from the median by less than this factor are taken as equal
MIN_BURST = 1 << 10  # [bytes]
MAX_BURST = 1 << 18  # [bytes]
BURST_TURNS = 4  # fewest trips of each size
BURST_SECONDS = 0.03  # shortest time for them [s]
LATENCY_TURNS = 6  # fewest trips to a host
LATENCY_SECONDS = 3e-3  # shortest time for them, for each relay that there is [s]
TAG = COLLECTIVE_TAG + 1


@dataclass(frozen=True)
class Links:
    """What was measured: rates [hosts + 1] in bytes/s of payload, the root's first; times in seconds. `machines`:
    number of distinct machines, several hosts may be on one.

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
        """For the simulator. Hosts on one machine share its cores."""
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


def measure_links(comm: MPI.Comm, guard: Guard, known: Links | None = None) -> Links:
    """Measure; every rank returns the same. `guard` raises where another relay fails meanwhile. `known`: what was
    measured before, the same at every rank: only rates and latency are measured again, because a link that has changed
    changes nothing else."""
    size = comm.size
    probe = _Probe(comm, guard)
    latency = probe.latency()
    probe.round(1, [MIN_PIECES] * size)  # opens connections and uses up bursts
    limit = ROUNDS_SECONDS if known is None else REMEASURE_SECONDS
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
    plans = processor_plans(size - 1, rate)
    early = [_message_seconds(probe, plan) for plan in plans]
    burst = probe.burst(rate, latency)
    late = [_message_seconds(probe, plan) for plan in plans]  # some tenths of a second on: disturbances only add
    message, byte = processor_costs(*map(min, early, late))
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
        if done >= MIN_ROUNDS and spent > limit:
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
    """Each host's rates [bytes/s] as the rounds show them, the same at every rank.

    A host's rate each way is the best of its rounds, because a slow partner must not count against it. Rounds that
    carried little count only where none carried more: in them the burst of an idle link makes it seem faster."""

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
    """Timed messages on one communicator."""

    def __init__(self, comm: MPI.Comm, guard: Guard) -> None:
        super().__init__(comm, guard)
        self._out = np.zeros(PIECE, np.uint8)
        self._nothing = np.zeros(1, np.uint8)
        self._in = np.zeros((MAX_PIECES, PIECE), np.uint8)

    # -- trips: from the root to a host and back

    def _trip(self, host: int, nbytes: int) -> float:
        """Root: send `nbytes` to a host that answers trips; seconds until its answer is here."""
        data = self._in.reshape(-1)[:nbytes]
        data[0] = 1
        begun = time.perf_counter()
        self.wait([self.send(data, host, TAG), self.receive(self._nothing, host, TAG)])
        return time.perf_counter() - begun

    def _end_trips(self, host: int) -> None:
        self.wait([self.send(np.zeros(1, np.uint8), host, TAG)])

    def _answer_trips(self) -> None:
        """Another host: answer until the root ends the trips."""
        data = self._in.reshape(-1)[:MAX_BURST]
        while True:
            self.wait([self.receive(data, 0, TAG)])
            if not data[0]:
                return
            self.wait([self.send(self._nothing, 0, TAG)])

    def latency(self) -> float:
        """Half the quickest trip of a byte between the root and each of a few hosts, the longest of them: disturbances
        only add."""
        halves: list[float] = []
        for host in sorted({1, self.size // 2 or 1, self.size - 1}):
            self.barrier()
            if self.rank == 0:
                trips: list[float] = []
                # The longer it lasts, the less often all others poll whether it is over.
                end = time.perf_counter() + LATENCY_SECONDS * self.size
                while len(trips) < LATENCY_TURNS or time.perf_counter() < end:
                    trips.append(self._trip(host, 1))
                self._end_trips(host)
                halves.append(0.5 * min(trips))
            elif self.rank == host:
                self._answer_trips()
        return max(self.gather(max(halves, default=0.0)))

    def burst(self, rate: float, latency: float) -> float:
        """Bytes that an idle link lets through at once: the root sends more and more, each size a few times, until the
        quickest takes more than half as long as at `rate`. The size before that was between the burst and twice the
        burst; the time that it took belongs to the rest, which went at `rate`."""
        burst = 0.0
        self.barrier()
        if self.rank == 0:

            def quickest(size: int, least: float = BURST_SECONDS) -> float:
                trips: list[float] = []
                end = time.perf_counter() + least
                while len(trips) < BURST_TURNS or time.perf_counter() < end:
                    time.sleep(min(0.1, 2 * size / rate))  # an idle token bucket refills: no event announces it
                    trips.append(self._trip(1, size))
                return min(trips)

            nothing = quickest(1, LATENCY_SECONDS * self.size)  # as in `latency`
            size = max(MIN_BURST, int(4 * rate * latency))  # less would be lost in the noise
            full = False
            while size <= MAX_BURST and not full:
                seconds = max(0.0, quickest(size) - nothing)
                full = seconds > 0.5 * size / rate
                if not full or not burst:
                    burst = max(0.0, size - rate * seconds)
                size *= 2
            self._end_trips(1)
        elif self.rank == 1:
            self._answer_trips()
        return max(self.gather(burst))

    # -- rounds

    def round(self, shift: int, counts: Sequence[int]) -> float:
        """Every host sends its count of pieces to the host `shift` places on; seconds until that host confirms that it
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
        receives = [self.receive(self._in[index], source, TAG + 1) for index in range(counts[source])]
        answer = self.receive(done, target, TAG + 2)
        begun = time.perf_counter()
        sends = [self.send(self._out, target, TAG + 1) for _ in range(counts[rank])]
        answered = False
        while not answer.Test():
            self.poll()
            if not answered and MPI.Request.Testall(receives):
                sends.append(self.send(self._nothing, source, TAG + 2))
                answered = True
            rest(begun)
        seconds = time.perf_counter() - begun
        self.wait(receives)
        if not answered:
            sends.append(self.send(self._nothing, source, TAG + 2))
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

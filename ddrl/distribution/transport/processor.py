"""What a message and a byte cost the processor here: short models through the executor itself, on the links that are
there.

Collective over the relays, part of measuring the links. Two plans of the same trees carry a few models each, one of
small messages and one of large ones; every host counts the processor time of its own thread in the polls that moved
something, so that neither waiting for the wire nor a machine that others keep busy counts. What both cost a message
gives a line: its intercept is a message's cost at either end, its slope a byte's. The least of several models counts,
for what disturbs can only add."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.mailbox import checksum
from ddrl.distribution.plans.plan import Plan
from ddrl.distribution.plans.scheme import make_plan
from ddrl.distribution.transport.executor import Executor
from ddrl.distribution.transport.flights import Terms
from ddrl.distribution.transport.requests import Exchange, Guard
from ddrl.distribution.transport.shards import Bytes

if TYPE_CHECKING:
    from mpi4py import MPI

BYTE_CPU = 1e-9  # s at each end, where links are too slow to measure it; fitted once to benchmarks.distribution
SMALL = 1 << 10  # bytes of payload
LARGE = 1 << 15
FANOUT = 3
MODELS = 4  # of each size; the first opens connections and is not counted
MESSAGES = 1 << 9  # that all hosts receive in one model, about
SECONDS = 0.025  # of a link's time that a model of large messages may take
MIN_BYTE = 1e-10  # s: 10 GB/s, which no checksum and copy together reach
MIN_PIECES = 6  # large messages to a host from which a slope is taken


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

    def valid(self) -> bool:
        """Nobody overwrites it."""
        return True

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
    if count < MIN_PIECES:
        return max(0.0, small - BYTE_CPU * SMALL), BYTE_CPU
    large = _message_seconds(
        comm, exchange, guard, make_plan("stripes", hosts, count * LARGE, fanout=FANOUT, chunk_bytes=LARGE)
    )
    byte = max(MIN_BYTE, (large - small) / (LARGE - SMALL))
    return max(0.0, small - byte * SMALL), byte


def _message_seconds(comm: MPI.Comm, exchange: Exchange, guard: Guard, plan: Plan) -> float:
    """Processor seconds of a message at one end: of all hosts, over all messages' ends, in the cheapest model."""
    terms = Terms(versions_in_flight=1)
    executor = Executor(comm, plan, _Memories(plan.nbytes) if comm.rank else None, checksum, terms)
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

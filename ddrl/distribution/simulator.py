"""A discrete-event simulator that runs the executor's plans on a modeled network.

A host's link serves one message at a time each way. Sending occupies the sender's way up for `message_seconds` + bytes
/ up; the message then crosses in `latency` and occupies the receiver's way down, in order of arrival and no faster than
it arrives. A link that was idle lets `burst` bytes through at once, as shapers with a token bucket do. Each host's
relay spends `send_cpu` and `receive_cpu` (+ `cpu_byte` a byte) on a message, one at a time; where hosts are emulated on
one machine, all relays share its `cores`. The next message is chosen as by the executor: the lowest that can be sent,
old models first. Pure; O(messages log).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddrl.distribution.plan import HEADER_BYTES, Plan

# -- costs -------------------------------------------------------------------------------------------------------------
# Closed-form times of schemes on equal links, and the bound that no plan can beat.
#
# Symbols: n hosts beside the root, S bytes, B bytes/s each way of every link, a seconds a message. The formulas are the
# usual ones of the postal and pipelining literature.


def binomial_seconds(n: int, S: float, B: float, a: float) -> float:
    """ceil(log2(n + 1)) (a + S/B)."""
    return math.ceil(math.log2(n + 1)) * (a + S / B)


def sharded_seconds(n: int, S: float, B: float, a: float, m: int) -> float:
    """(m + n - 1) a + (1 + (n - 1)/m) S/B: whole shards to m relays, each forwarded to all others."""
    return (m + n - 1) * a + (1 + (n - 1) / m) * S / B


def best_relays(n: int, S: float, B: float, a: float) -> int:
    """m* = sqrt((n - 1) S / (a B)), at least 1 and at most n."""
    if n <= 1:
        return 1
    return max(1, min(n, round(math.sqrt((n - 1) * S / (a * B)) if a > 0 else n)))


def chain_seconds(n: int, S: float, B: float, a: float, chunks: int, b: float = 0.0) -> float:
    """k (a + S/(kB)) + (n - 1)(a + max(0, S/k - b)/B) with k chunks, of which an idle link lets b bytes through at
    once; (n + k - 1)(a + S/(kB)) without."""
    return chunks * (a + S / (chunks * B)) + (n - 1) * (a + max(0.0, S / chunks - b) / B)


def stripes_seconds(n: int, S: float, B: float, a: float, fanout: int, chunks: int) -> float:
    """(K + depth f)(a + S/(KB)): K chunks leave the root one by one, and the last passes `depth` hosts that serve f
    others each."""
    depth = max(1, math.ceil(math.log(max(2, n * (fanout - 1) / fanout + 1), fanout))) if fanout > 1 else n
    return (chunks + (depth - 1) * fanout + 1) * (a + S / (chunks * B))


def pipelined_shards_seconds(n: int, S: float, B: float, a: float, chunks: int, m: int | None = None) -> float:
    """(K max(1, (n - 1)/m) + n - 1)(a + S/(KB)): m relays (None: one on every host), K chunks forwarded as they arrive;
    tends to S/B max(1, (n - 1)/m)."""
    return (chunks * max(1.0, (n - 1) / (m or max(1, n))) + n - 1) * (a + S / (chunks * B))


def bound_seconds(n: int, S: float, B: float, a: float = 0.0) -> float:
    """max(S/B_root, S/B_down, n S / (B_root + sum B_up)) + a ceil(log2(n + 1)) for equal links."""
    return bound_unequal([B] * (n + 1), [B] * (n + 1), S, a)


def bound_unequal(up: Sequence[float], down: Sequence[float], S: float, a: float = 0.0) -> float:
    """The same for `up`, `down` [n + 1] in bytes/s, the root first."""
    n = len(up) - 1
    if n < 1:
        return 0.0
    return max(S / up[0], S / min(down[1:]), n * S / sum(up)) + a * math.ceil(math.log2(n + 1))


# -- simulator ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Links and costs; rates [hosts + 1] in bytes/s, the root's first, times in seconds."""

    up: Sequence[float]
    down: Sequence[float]
    latency: float = 0.0
    message_seconds: float = 0.0  # of the sender's link, a message
    send_cpu: float = 0.0
    receive_cpu: float = 0.0
    cpu_byte: float = 0.0  # s/byte, at each end
    cores: int = 0  # shared by all relays; 0: each has its own
    header_bytes: int = HEADER_BYTES  # of a chunk
    burst: float = 0.0  # bytes that an idle link lets through at once, each way

    @classmethod
    def equal(
        cls, hosts: int, rate: float, *, latency: float = 0.0, message_seconds: float = 0.0, header_bytes: int = 0
    ) -> Network:
        """`hosts` hosts and a root with the same rate each way, as in the cost model."""
        return cls([rate] * (hosts + 1), [rate] * (hosts + 1), latency, message_seconds, header_bytes=header_bytes)

    def bound(self, nbytes: int) -> float:
        """Least time in which any plan brings one model to all."""
        return bound_unequal(self.up, self.down, nbytes)


@dataclass(frozen=True)
class Simulation:
    """Times [s]: `started` and `finished` [models] (the root begins; the last host has confirmed), `host_finished`
    [models, hosts + 1]. `trace` [sends, 6], empty unless asked for: begin and end of the send, arrival, source, target,
    model * messages + message."""

    versions_in_flight: int

    started: NDArray[np.float64]
    finished: NDArray[np.float64]
    host_finished: NDArray[np.float64]
    trace: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """Of the first model, start to last host."""
        return float(self.finished[0] - self.started[0])

    @property
    def period(self) -> float:
        """Seconds between models in the steady state: the first ones find idle links, the last ones have them to
        themselves."""
        first = self.versions_in_flight - 1
        last = len(self.finished) - self.versions_in_flight
        if len(self.finished) < 2 or last <= first:
            return float((self.finished[-1] - self.started[0]) / len(self.finished))
        return float((self.finished[last] - self.finished[first]) / (last - first))


class _Run:
    """State of one simulation; hosts, chunks and messages by number."""

    def __init__(self, plan: Plan, network: Network, models: int, versions_in_flight: int, trace: bool) -> None:
        self.plan = plan
        self.network = network
        self.models = models
        self.in_flight = versions_in_flight
        self.size: list[int] = (plan.payload() + network.header_bytes * plan.count).tolist()
        self.source: list[int] = plan.source.tolist()
        self.target: list[int] = plan.target.tolist()
        self.first: list[int] = plan.first.tolist()
        self.count: list[int] = plan.count.tolist()
        hosts = plan.hosts + 1
        self.waiters = plan.waiters()
        self.from_root: list[int] = plan.sent_by(0).tolist()
        self.ready: list[list[int]] = [[] for _ in range(hosts)]
        self.sending = [False] * hosts
        # When a link's rate makes up for what it has carried; all have been idle before.
        self.up_free = [-math.inf] * hosts
        self.down_free = [-math.inf] * hosts
        self.cpu_free = [0.0] * hosts
        self.core_free: list[float] = [0.0] * network.cores
        self.missing: list[list[int]] = []
        wanted = np.bincount(plan.target, minlength=hosts).tolist()
        self.left = [list(wanted) for _ in range(models)]
        self.hosts_left = [plan.hosts] * models
        self.started = np.zeros(models)
        self.host_finished = np.zeros((models, hosts))
        self.confirmed = np.zeros(models)
        self.ended = 0
        self.events: list[tuple[float, int, int, int]] = []  # (time, kind, host, model * messages + message)
        self.trace: list[tuple[float, float, float, int, int, int]] | None = [] if trace else None

    def compute(self, host: int, now: float, seconds: float) -> float:
        """When work of `seconds` that host's relay could begin now will be done."""
        begin = max(now, self.cpu_free[host])
        if self.core_free:
            core = heapq.heappop(self.core_free)
            begin = max(begin, core)
            heapq.heappush(self.core_free, begin + seconds)
        self.cpu_free[host] = begin + seconds
        return begin + seconds

    def start(self, now: float) -> None:
        """The root begins every model that it may begin."""
        while len(self.missing) < self.models and len(self.missing) - self.ended < self.in_flight:
            model = len(self.missing)
            self.missing.append(list(self.count))
            self.started[model] = now
            for message in self.from_root:
                heapq.heappush(self.ready[0], model * len(self.source) + message)
            if not self.plan.hosts:
                self.hosts_left[model] = 0
                self.ended += 1
        self.send(0, now)

    def send(self, host: int, now: float) -> None:
        """Put the earliest ready message of an idle link on it."""
        if self.sending[host] or not self.ready[host]:
            return
        network = self.network
        key = heapq.heappop(self.ready[host])
        message = key % len(self.source)
        size = self.size[message]
        target = self.target[message]
        begin = (
            self.compute(host, now, network.send_cpu + network.cpu_byte * size)
            if network.send_cpu or network.cpu_byte
            else now
        )
        ahead = network.burst / network.up[host]
        self.up_free[host] = max(self.up_free[host], begin - ahead) + network.message_seconds + size / network.up[host]
        end = max(begin, self.up_free[host])
        first_byte = begin + network.message_seconds + network.latency
        ahead = network.burst / network.down[target]
        self.down_free[target] = max(first_byte - ahead, self.down_free[target]) + size / network.down[target]
        arrival = max(end + network.latency, self.down_free[target])
        self.sending[host] = True
        heapq.heappush(self.events, (end, 0, host, key))
        heapq.heappush(self.events, (arrival, 1, target, key))
        if self.trace is not None:
            self.trace.append((begin, end, arrival, host, target, key))

    def arrive(self, host: int, key: int, now: float) -> None:
        """A message has arrived at its target: what waited only for its chunks becomes ready."""
        model, message = divmod(key, len(self.source))
        missing = self.missing[model]
        for chunk in range(self.first[message], self.first[message] + self.count[message]):
            for other in self.waiters.get(host * self.plan.chunks + chunk, ()):
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(self.ready[host], model * len(self.source) + other)
        self.left[model][host] -= 1
        if not self.left[model][host]:
            self.host_finished[model, host] = now
            self.hosts_left[model] -= 1
            if not self.hosts_left[model]:
                heapq.heappush(self.events, (now + self.network.latency, 3, 0, model))
        self.send(host, now)

    def run(self) -> Simulation:
        network = self.network
        thinks = bool(network.receive_cpu or network.cpu_byte)
        self.start(0.0)
        while self.events:
            now, kind, host, key = heapq.heappop(self.events)
            if kind == 0:
                self.sending[host] = False
                self.send(host, now)
            elif kind == 1 and thinks:
                done = self.compute(
                    host, now, network.receive_cpu + network.cpu_byte * self.size[key % len(self.source)]
                )
                heapq.heappush(self.events, (done, 2, host, key))
            elif kind in (1, 2):
                self.arrive(host, key, now)
            else:
                self.ended += 1
                self.confirmed[key] = now
                self.start(now)
        trace = np.asarray(self.trace if self.trace else [], np.float64).reshape(-1, 6)
        return Simulation(self.in_flight, self.started, self.confirmed, self.host_finished, trace)


def simulate(
    plan: Plan, network: Network, *, models: int = 1, versions_in_flight: int = 1, trace: bool = False
) -> Simulation:
    """Send `models` models by `plan`, at most `versions_in_flight` at a time; 1: sealed loop, each after all have
    confirmed the last."""
    if len(network.up) != plan.hosts + 1 or len(network.down) != plan.hosts + 1:
        raise ValueError(f"the network has rates of {len(network.up)} hosts, the plan needs {plan.hosts + 1}")
    return _Run(plan, network, models, versions_in_flight, trace).run()

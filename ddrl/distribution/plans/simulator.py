"""A discrete-event simulator that runs the executor's plans on a modeled network.

A host's link serves one message at a time each way. Sending occupies the sender's way up for `message_seconds` + bytes
/ up; the message then crosses in `latency` and passes the receiver's way down, in order of arrival and no faster than
it comes in. A link that was idle lets `burst` bytes through at once, as shapers with a token bucket do. Each host's
relay spends `send_cpu` and `receive_cpu` (+ `cpu_byte` a byte) on a message, one at a time, and where hosts are
emulated on one machine all relays share its `cores`. Which message goes next is the executor's rule: the ready one that
stands earliest, old models first. Pure; O(messages log)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddrl.distribution.plans.costs import bound_unequal
from ddrl.distribution.plans.plan import HEADER_BYTES, Plan


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
    header_bytes: int = HEADER_BYTES  # a message bears, its share of frames included
    burst: float = 0.0  # bytes that an idle link lets through at once, each way

    @classmethod
    def equal(
        cls, hosts: int, rate: float, *, latency: float = 0.0, message_seconds: float = 0.0, header_bytes: int = 0
    ) -> Network:
        """`hosts` hosts and a root with the same rate each way, as in the cost model."""
        return cls([rate] * (hosts + 1), [rate] * (hosts + 1), latency, message_seconds, header_bytes=header_bytes)

    def scaled(self, factor: float) -> Network:
        """The same with all rates multiplied."""
        return replace(self, up=[rate * factor for rate in self.up], down=[rate * factor for rate in self.down])

    def bound(self, nbytes: int) -> float:
        """Least time in which any plan brings one model to all."""
        return bound_unequal(self.up, self.down, nbytes)


@dataclass(frozen=True)
class Simulation:
    """What came out: `started` and `finished` [models] in seconds (root begins; last host confirmed), `host_finished`
    [models, hosts + 1]."""

    versions_in_flight: int

    started: NDArray[np.float64]
    finished: NDArray[np.float64]
    host_finished: NDArray[np.float64]
    trace: NDArray[
        np.float64
    ]  # [sends, 6]: begin, end of the send, arrival, source, target, model * messages + message; empty unless asked

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
        self.waiters: dict[int, list[int]] = {}
        self.from_root: list[int] = []
        for message, host in enumerate(self.source):
            if host == 0:
                self.from_root.append(message)
                continue
            for chunk in range(self.first[message], self.first[message] + self.count[message]):
                self.waiters.setdefault(host * plan.chunks + chunk, []).append(message)
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
                self.ended = self.ended + 1
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
        """A message is whole at its target: wake what waited for its chunks, count it, and pass on."""
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

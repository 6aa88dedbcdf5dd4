"""Choosing a plan: from the settings, or, with cluster.scheme = "auto", from the measured links.

Pure: links go in as a `Network` (measured by `links`), a scheme by name with its settings comes out, so that every
relay can build the same plan for itself. Candidates are first ranked by the closed forms of the cost model, then the
best of them are run in the simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddrl.core.config import ClusterConfig
from ddrl.core.errors import ConfigError
from ddrl.distribution import costs
from ddrl.distribution.plan import HEADER_BYTES, Plan
from ddrl.distribution.schemes import SCHEMES, make_plan
from ddrl.distribution.simulator import Network, simulate

CHUNKS = (1 << 12, 1 << 13, 1 << 14, 20_000, 1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 20)  # bytes
FANOUTS = (2, 3, 4, 6, 8)
LAG_WEIGHT = 0.1  # of a model's own time beside the time between models
LAST_ROUND = 16  # candidates that are simulated
EVENTS = 50_000  # messages in one simulation, about
SEVERAL = 1.25  # rates that differ by less count as equal
CHUNKED = ("direct", "chain", "two_tree", "sharded", "weighted", "stripes")


@dataclass(frozen=True)
class Choice:
    """A scheme by name, with its settings; `seconds` is the time a model that the planner expects (0: not
    predicted)."""

    scheme: str
    parameters: dict[str, Any]
    seconds: float = 0.0


def choose(
    config: ClusterConfig, hosts: int, nbytes: int, network: Network | None = None, *, budget_seconds: float = 3.0
) -> Choice:
    """The scheme that the settings ask for, or for "auto" the best for `network` (None: equal links of 1 Gbit/s and 0.1
    ms)."""
    scheme, chunk = config.scheme, config.chunk_bytes
    network = network or Network.equal(hosts, 1.25e8, latency=1e-4, message_seconds=2e-5, header_bytes=HEADER_BYTES)
    if scheme == "auto":
        return choose_best(
            network,
            nbytes,
            config.versions_in_flight,
            relays=config.shards,
            chunk_bytes=chunk,
            budget_seconds=budget_seconds,
        )
    if scheme not in SCHEMES:
        raise ConfigError(f"cluster.scheme ({scheme!r}) must be one of auto, {', '.join(SCHEMES)}")
    parameters: dict[str, Any] = {}
    if scheme == "sharded":
        if config.shards > hosts:
            raise ConfigError(
                f"cluster.shards ({config.shards}) exceeds the {hosts} relays beside the root: lower it, or start "
                "more hosts"
            )
        if config.shards:
            parameters["relays"] = config.shards
    if scheme in ("weighted", "postal"):
        parameters["up"] = list(network.up)
    if scheme == "postal":
        parameters |= {
            "down": list(network.down),
            "message_seconds": network.message_seconds,
            "latency": network.latency,
        }
    if chunk and scheme in CHUNKED:
        parameters["chunk_bytes"] = chunk
    return Choice(scheme, parameters)


def choose_best(
    network: Network,
    nbytes: int,
    versions_in_flight: int,
    *,
    relays: int = 0,
    chunk_bytes: int = 0,
    budget_seconds: float = math.inf,
) -> Choice:
    """The candidate with the least simulated time between models; where several are alike, the one whose models arrive
    soonest.

    `relays` and `chunk_bytes` other than 0 are kept as asked. The ranking goes on until `budget_seconds` are spent,
    best guesses first, and looks at one candidate at least."""
    hosts = len(network.up) - 1
    if hosts < 1 or nbytes < 1:
        return Choice("direct", {})
    begun, best, least, down = time.monotonic(), Choice("direct", {}), math.inf, float(np.median(network.down))
    if relays:
        ranked = [
            candidate
            for candidate in candidates(network, nbytes, chunk_bytes, versions_in_flight)
            if candidate.scheme == "sharded"
        ]
        ranked = [
            Choice("sharded", {**candidate.parameters, "relays": min(relays, hosts)}, candidate.seconds)
            for candidate in ranked
        ]
    else:
        ranked = list(candidates(network, nbytes, chunk_bytes, versions_in_flight))
    for candidate in sorted(ranked, key=lambda candidate: candidate.seconds)[:LAST_ROUND]:
        plan = make_plan(candidate.scheme, hosts, nbytes, **candidate.parameters)
        period, lag = _run(plan, network, versions_in_flight)
        cost = period + LAG_WEIGHT * lag
        if (
            versions_in_flight > 1
        ):  # where versions follow one another, what comes from several hosts at once waits in one queue
            cost += plan.senders() * float(plan.payload().max(initial=0)) / down
        if cost < least:
            best, least = Choice(candidate.scheme, candidate.parameters, period), cost
        if time.monotonic() - begun > budget_seconds:
            break
    return best


def predict(choice: Choice, network: Network, nbytes: int, versions_in_flight: int) -> float:
    """Simulated seconds a model: alone where one travels at a time, else between models in the steady state."""
    return _run(
        make_plan(choice.scheme, len(network.up) - 1, nbytes, **choice.parameters), network, versions_in_flight
    )[0]


def _run(plan: Plan, network: Network, versions_in_flight: int) -> tuple[float, float]:
    """Seconds between models, and of the first one; few models where a model is many messages."""
    models = 1
    if versions_in_flight > 1:
        models = max(2 * versions_in_flight + 1, min(3 * versions_in_flight + 2, EVENTS // max(1, plan.messages)))
    result = simulate(plan, network, models=models, versions_in_flight=versions_in_flight)
    return result.period, result.seconds


def candidates(network: Network, nbytes: int, chunk_bytes: int = 0, versions_in_flight: int = 1) -> Iterator[Choice]:
    """What is worth a look, with the time that the closed forms give it (unequal links: by the bound and the slowest
    link).

    A chain is slow to fill, but each host has one sender only; where versions follow one another, that it fills slowly
    hardly counts."""
    hosts = len(network.up) - 1
    rate = min(float(np.median(network.up)), float(np.median(network.down)))
    a = network.message_seconds + network.send_cpu + network.receive_cpu + network.latency / 8
    unequal = max(network.up) > SEVERAL * min(network.up)
    bound = network.bound(nbytes)
    floor = max(0.0, bound - costs.bound_seconds(hosts, nbytes, rate))  # what unequal links add to every scheme
    yield Choice("binomial", {}, floor + costs.binomial_seconds(hosts, nbytes, rate, a + network.latency))
    yield Choice(
        "postal",
        {
            "up": list(network.up),
            "down": list(network.down),
            "latency": network.latency,
            "message_seconds": network.message_seconds + network.send_cpu + network.receive_cpu,
        },
        floor + 0.99 * costs.binomial_seconds(hosts, nbytes, rate, a + network.latency),
    )
    sizes = [chunk_bytes] if chunk_bytes else [size for size in CHUNKS if nbytes / 512 <= size < nbytes] or [nbytes]
    for size in sizes:
        chunks = -(-nbytes // size)
        for fanout in FANOUTS:
            if fanout > hosts:
                continue
            seconds = floor + costs.stripes_seconds(hosts, nbytes, rate, a, fanout, chunks)
            yield Choice("stripes", {"fanout": fanout, "chunk_bytes": size}, seconds)
            if unequal and chunks >= fanout:
                yield Choice(
                    "stripes",
                    {"fanout": fanout, "chunk_bytes": size, "budgets": budgets(network, fanout)},
                    0.95 * seconds,
                )
        if versions_in_flight > 1 and 1 < hosts <= 64:
            filling = costs.chain_seconds(hosts, nbytes, rate, a, chunks)
            yield Choice(
                "chain",
                {"chunk_bytes": size},
                floor + (nbytes / rate + chunks * a + LAG_WEIGHT * filling) / (1 + LAG_WEIGHT),
            )
        if hosts <= 64:
            seconds = floor + costs.pipelined_shards_seconds(
                hosts, nbytes, rate, a, max(chunks, min(hosts, nbytes // 64 or 1))
            )
            yield Choice("sharded", {"chunk_bytes": size}, seconds)
            if unequal:
                yield Choice("weighted", {"up": list(network.up), "chunk_bytes": size}, 0.9 * seconds)


def budgets(network: Network, fanout: int) -> list[float]:
    """Children that each host should serve over all stripes, in proportion to what its link can send, [hosts]."""
    hosts = len(network.up) - 1
    share = hosts * fanout / sum(network.up)
    return [float(round(rate * share)) for rate in network.up[1:]]

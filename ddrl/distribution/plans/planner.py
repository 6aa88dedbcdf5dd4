"""Choosing a plan: by the scheme that the settings name; "auto" takes the best proposal of all schemes for the links.

Pure: links go in as a `Network` (measured by `transport.links`), a scheme with its parameters comes out, so that every
relay can build the same plan for itself. Proposals are first ranked by the closed forms of the cost model, then the
best of them are run in the simulator."""

from __future__ import annotations

import math
import time

import numpy as np

from ddrl.core.config import Config
from ddrl.core.settings import plugin_settings
from ddrl.distribution.plan import HEADER_BYTES, Plan
from ddrl.distribution.plans.scheme import LAG_WEIGHT, Choice, Situation, candidates, load_scheme, make_plan
from ddrl.distribution.simulator import Network, simulate

LAST_ROUND = 16  # proposals that are simulated, beside the best one of each scheme
EVENTS = 20_000  # messages in one simulation, about
# of a model's time that a host with very many senders loses by TCP, which the simulator does not know; fitted to
# benchmarks.distribution.tuned
SENDERS_COST = 0.05


def choose(config: Config, hosts: int, nbytes: int, network: Network | None = None) -> Choice:
    """What cluster.scheme asks for, for models of `nbytes` to `hosts` hosts. `network` None: equal links of 1 Gbit/s
    and 0.1 ms. Raises ConfigError where the settings cannot be followed."""
    scheme = load_scheme(config.cluster.scheme)
    cluster = config.cluster
    situation = Situation(
        network or usual_network(hosts), nbytes, cluster.versions_in_flight, cluster.shards, cluster.chunk_bytes
    )
    return scheme.choose(plugin_settings(config, "cluster", scheme), situation)


def usual_network(hosts: int) -> Network:
    """Equal links, where none were measured."""
    return Network.equal(hosts, 1.25e8, latency=1e-4, message_seconds=2e-5, header_bytes=HEADER_BYTES)


def choose_best(situation: Situation, *, budget_seconds: float = math.inf) -> Choice:
    """The proposal with the least simulated time between models; where several are alike, the one whose models arrive
    soonest.

    The ranking goes on until `budget_seconds` are spent, best guesses first; at least one proposal is simulated."""
    hosts = situation.hosts
    nbytes = situation.nbytes
    network = situation.network
    best = Choice("direct", {})
    least = math.inf
    begun = time.monotonic()
    if hosts < 1 or nbytes < 1:
        return best
    down = float(np.median(network.down))
    for candidate in _last_round(situation):
        plan = make_plan(candidate.scheme, hosts, nbytes, **candidate.parameters)
        period, lag = _run(plan, network, situation.versions_in_flight)
        cost = (period + LAG_WEIGHT * lag) * (1 + SENDERS_COST * (1 - 1 / max(1, plan.senders())))
        if situation.versions_in_flight > 1:  # what comes from several hosts at once waits in one queue
            cost += (plan.senders() - 1) * float(plan.payload().max(initial=0)) / down
        if cost < least:
            best = Choice(candidate.scheme, candidate.parameters, period)
            least = cost
        if time.monotonic() - begun > budget_seconds:
            break
    return best


def _last_round(situation: Situation) -> list[Choice]:
    ranked = sorted(candidates(situation), key=lambda candidate: candidate.seconds)
    schemes: set[str] = set()
    last: list[Choice] = []
    for place, candidate in enumerate(ranked):
        if place < LAST_ROUND or candidate.scheme not in schemes:
            last.append(candidate)
        schemes.add(candidate.scheme)
    return last


def predict(choice: Choice, network: Network, nbytes: int, versions_in_flight: int) -> float:
    """Simulated seconds a model: alone where one travels at a time, else between models in the steady state."""
    plan = make_plan(choice.scheme, len(network.up) - 1, nbytes, **choice.parameters)
    return _run(plan, network, versions_in_flight)[0]


def _run(plan: Plan, network: Network, versions_in_flight: int) -> tuple[float, float]:
    """Seconds between models, and of the first one; few models where a model is many messages."""
    models = 1
    if versions_in_flight > 1:
        models = max(2 * versions_in_flight + 1, min(3 * versions_in_flight + 2, EVENTS // max(1, plan.messages)))
    result = simulate(plan, network, models=models, versions_in_flight=versions_in_flight)
    return result.period, result.seconds

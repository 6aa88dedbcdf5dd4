"""Kinds of simulated clusters: how the speeds of their nodes change from iteration to iteration.

Node times are affine, t_i(b) = slow_i (a_i + b / v_i) jitter + communication_i; a kind gives slow_i [K, C, N], 1 at
full speed. Everything is drawn before a simulation begins, so that every sizer meets the same noise.

static      nothing changes.
drifting    log slow is a random walk between 1 and 6: background load that comes and goes.
bursty      each second node or so is slowed 1.5 to 5 times, at random, for 3 to 12 iterations on average; nodes differ
            in how often.
periodic    half the nodes are slowed 1.5 to 4 times for part of a fixed period of 8 to 40 iterations (cron jobs,
            backups).
capped      static, but memory caps up to half the nodes below their share.
lasting     each node is slowed or freed once, for good.
transient   single slow iterations, 1.5 to 5 times (garbage collection, a lost packet).
wave        a sine of log slow with a period of 20 to 60 iterations: smooth, where `periodic` jumps.
racks       bursts that hit a whole third of the nodes together.
cron        periodic with longer periods, 41 to 90, shorter and deeper slow-downs, and starts late by an iteration at
            times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ddrl.balance.cluster import Cluster, Truth
from ddrl.balance.sizes import Floats


@dataclass(frozen=True)
class Scenario:
    """C clusters of N nodes over K iterations, with all their noise.

    overhead [C, N] [s] and speed [C, N] [samples/s] at slow 1; communication [C, N] [s]: the gradient's way, which no
    slow-down stretches; slow, jitter [K, C, N]; noise_scale [K, C] [samples]."""

    kind: str
    cluster: Cluster
    overhead: Floats
    speed: Floats
    communication: Floats
    slow: Floats
    jitter: Floats
    noise_scale: Floats

    @property
    def iterations(self) -> int:
        """K."""
        return len(self.slow)

    def truth(self, iteration: int) -> Truth:
        """Affine times of an iteration, without jitter."""
        slow = self.slow[iteration]
        return Truth(self.overhead * slow + self.communication, self.speed / slow)


def _ones(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    return np.ones(shape)


def _drifting(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    steps = rng.normal(0.0, rng.uniform(0.02, 0.1, (1, shape[1], 1)), shape)
    steps[0] = rng.uniform(0.0, math.log(6.0), shape[1:])
    top = 2 * math.log(6.0)
    walk = np.cumsum(steps, 0) % top  # reflected at 0 and log 6
    return np.exp(np.minimum(walk, top - walk))


def _switches(start: Floats, end: Floats, rng: Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Two-state chains [K, ...] that begin a burst with probability `start` an iteration and leave it with `end`."""
    draws = rng.random(shape)
    states = np.zeros((shape[0] + 1, *shape[1:]), np.bool_)
    for iteration, draw in enumerate(draws):
        states[iteration + 1] = np.where(states[iteration], draw >= end, draw < start)
    return states[1:]


def _bursty(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    prone = rng.random(shape[1:]) < 0.5
    start = np.where(prone, rng.uniform(0.01, 0.08, shape[1:]), 0.0)
    slow = _switches(start, 1.0 / rng.uniform(3.0, 12.0, shape[1:]), rng, shape)
    return np.where(slow, rng.uniform(1.5, 5.0, shape[1:]), 1.0)


def _periodic(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    prone = rng.random(shape[1:]) < 0.5
    period = rng.integers(8, 41, shape[1:])
    on = np.maximum(2, np.rint(period * rng.uniform(0.2, 0.5, shape[1:])))
    at = (np.arange(shape[0])[:, None, None] + rng.integers(0, 40, shape[1:])) % period
    return np.where(prone & (at < on), rng.uniform(1.5, 4.0, shape[1:]), 1.0)


def _lasting(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    before = np.where(rng.random(shape[1:]) < 0.3, rng.uniform(1.5, 4.0, shape[1:]), 1.0)
    after = np.where(before > 1.0, 1.0, rng.uniform(1.5, 4.0, shape[1:]))
    change = rng.integers(1, shape[0], shape[1:])
    return np.where(np.arange(shape[0])[:, None, None] < change, before, after)


def _transient(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    hit = rng.random(shape) < rng.uniform(0.0, 0.04, shape[1:])
    return np.where(hit, rng.uniform(1.5, 5.0, shape), 1.0)


def _wave(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    height = np.log(rng.uniform(1.2, 3.0, shape[1:]))
    turn = np.arange(shape[0])[:, None, None] / rng.uniform(20.0, 60.0, shape[1:]) + rng.random(shape[1:])
    return np.exp(height * 0.5 * (1 + np.sin(2 * np.pi * turn)))


def _racks(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    k, c, n = shape
    slow = _switches(rng.uniform(0.01, 0.05, (c, 3)), 1.0 / rng.uniform(3.0, 12.0, (c, 3)), rng, (k, c, 3))
    rack = rng.integers(0, 3, (c, n))
    hit = np.take_along_axis(slow, np.broadcast_to(rack, (k, c, n)), 2)
    return np.where(hit, rng.uniform(1.5, 4.0, (c, n)), 1.0)


def _cron(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    prone = rng.random(shape[1:]) < 0.5
    period = rng.integers(41, 91, shape[1:])
    on = np.maximum(2, np.rint(period * rng.uniform(0.05, 0.3, shape[1:])))
    at = np.arange(shape[0])[:, None, None] + rng.integers(0, 90, shape[1:])
    late = rng.integers(0, 2, (4 + shape[0] // 41, *shape[1:]))  # of each turn
    delay = np.take_along_axis(late, at // period, 0)
    phase = at % period
    return np.where(prone & (phase >= delay) & (phase < on + delay), rng.uniform(2.0, 6.0, shape[1:]), 1.0)


KINDS: dict[str, Callable[[Generator, tuple[int, int, int]], Floats]] = {
    "static": _ones,
    "drifting": _drifting,
    "bursty": _bursty,
    "periodic": _periodic,
    "capped": _ones,
    "lasting": _lasting,
    "transient": _transient,
    "wave": _wave,
    "racks": _racks,
    "cron": _cron,
}


def make_scenario(
    kind: str, clusters: int, nodes: int, iterations: int, seed: int, *, jitter: float = 0.05, information: float = 0.1
) -> Scenario:
    """Random clusters of a kind: speeds differ 8 times; overhead is 2 to 20 % of an iteration, communication 1 to 5 %.

    `information`: relative error of the speeds that model information gives. The same arguments give the same noise.
    """
    rng = np.random.default_rng((seed, list(KINDS).index(kind), clusters, nodes))
    shape = (clusters, nodes)
    speed = 100.0 * 8.0 ** rng.random(shape)
    total = nodes * rng.integers(32, 129, clusters)
    ideal = (total / speed.sum(-1))[:, None]  # seconds of an iteration without overhead
    caps = np.broadcast_to(total[:, None], shape)
    if kind == "capped":
        share = total[:, None] * speed / speed.sum(-1, keepdims=True)
        bound = np.where(rng.random(shape) < 0.5, rng.uniform(0.3, 0.9, shape), 4.0)
        bound[:, 0] = 4.0  # one node at least can take what the others cannot
        caps = np.maximum(1, share * bound).astype(np.int64)
        caps[:, 0] += np.maximum(0, total - caps.sum(-1))
    known = speed * rng.lognormal(0.0, information, shape)
    cluster = Cluster.of(total, known, caps)
    scale = rng.uniform(0.2, 4.0, clusters) * total
    return Scenario(
        kind,
        cluster,
        ideal * rng.uniform(0.02, 0.2, shape),
        speed,
        ideal * rng.uniform(0.01, 0.05, shape),
        KINDS[kind](rng, (iterations, *shape)),
        rng.lognormal(-0.5 * jitter**2, jitter, (iterations, *shape)),
        scale * np.linspace(0.5, 2.0, iterations)[:, None],  # the noise scale grows while a model is trained
    )


def slow_down(scenario: Scenario, node: int, begin: int, end: int, factor: float) -> Scenario:
    """The same scenario where `node` of every cluster is `factor` times slower from iteration `begin` until `end`."""
    slow = scenario.slow.copy()
    slow[begin:end, :, node] *= factor
    return replace(scenario, slow=slow)

"""A simulator of synchronous data-parallel iterations on unequal nodes, many clusters at once.

Disturbances keep the time of a clock (a node is slow for seconds, whatever its micro-batches are) or, as the special
case that older kinds are, of iterations.

Departures from real processes: a coordinator that awaits the first K of N drops every later gradient (staleness
threshold 0), and the late node begins its next micro-batch once it is done (Chen et al. 2016, backup workers). Gradient
norms follow E|g_b|^2 = |G|^2 (1 + phi / b) (McCandlish et al. 2018, appendix A).
"""

# pyright: basic
# What numpy's `where` returns of such arrays has no complete type.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ddrl.balance import sizers
from ddrl.balance.ddqn import OBJECTIVES, rewards
from ddrl.balance.sizers import Sizer
from ddrl.balance.sizes import Cluster, Observation, Sizes, balanced_sizes
from ddrl.core.specs import Floats

# -- clusters ----------------------------------------------------------------------------------------------------------
# Node times are affine, t_i(b) = slow_i (a_i + b / v_i) jitter + communication_i. A kind of cluster gives slow_i
# [K, C, N], 1 at full speed, of iterations or of steps of the clock; a node that is slowed or freed within an iteration
# computes on at its new speed. Everything is drawn before a simulation begins: every sizer meets the same noise.


@dataclass(frozen=True)
class Truth:
    """Affine times as they truly are, without jitter: overhead [..., N] [s], speed [..., N] [samples/s]."""

    overhead: Floats
    speed: Floats


@dataclass(frozen=True)
class Revealed(Observation):
    """What a sizer sees, and the truth of the observed iteration and of the next one, which oracles alone read."""

    before: Truth
    now: Truth


@dataclass(frozen=True)
class Scenario:
    """C clusters of N nodes over K iterations, with all their noise.

    overhead [C, N] [s] and speed [C, N] [samples/s] at slow 1; communication [C, N] [s]: the gradient's way, which no
    slow-down stretches; jitter [K, C, N]; noise_scale [K, C] [samples]; slow [K, C, N] of iterations or, with `step`
    [C] [s], [G, C, N] of G steps of the clock, after which it begins again."""

    kind: str
    cluster: Cluster
    overhead: Floats
    speed: Floats
    communication: Floats
    slow: Floats
    jitter: Floats
    noise_scale: Floats
    step: Floats | None = None

    @property
    def iterations(self) -> int:
        """K."""
        return len(self.jitter)

    def stretched(self, iteration: int, begin: Floats, work: Floats) -> Floats:
        """Seconds [..., C, N] that `work` [..., C, N] [s at full speed] takes in an iteration, begun at `begin` [C, N]
        [s] on the clock. O(log G) for each node."""
        if self.step is None:
            return self.slow[iteration] * work
        step = self.step[:, None]
        goal = self._done_at(begin) + work
        lap, rest = np.divmod(goal, self._done[-1])
        low = np.zeros(goal.shape, np.int64)
        high = np.full(goal.shape, len(self.slow))
        for _ in range(len(self.slow).bit_length()):  # done[low] <= rest < done[high]
            middle = (low + high) // 2
            below = self._at(self._done, middle) <= rest
            low = np.where(below, middle, low)
            high = np.where(below, high, middle)
        end = low * step + (rest - self._at(self._done, low)) * self._at(self.slow, low)
        return lap * len(self.slow) * step + end - begin

    def slowness(self, iteration: int, begin: Floats) -> Floats:
        """[C, N]: how many times longer than at full speed each node takes in an iteration that is balanced to end
        everywhere at once, overheads aside."""
        slow = self.stretched(iteration, begin, np.ones_like(self.speed))
        if self.step is None:
            return slow
        for _ in range(3):  # a longer iteration meets other slow-downs
            seconds = (self.cluster.total / (self.speed / slow).sum(-1))[:, None]
            slow = seconds / (self._done_at(begin + seconds) - self._done_at(begin))
        return slow

    def truth(self, slow: Floats) -> Truth:
        """Affine times, without jitter, of nodes that are `slow` [C, N]."""
        return Truth(self.overhead * slow + self.communication, self.speed / slow)

    @cached_property
    def _done(self) -> Floats:
        """[G + 1, C, N]: what a node computes [s at full speed] from the clock's start to the start of each step."""
        assert self.step is not None
        done = np.zeros((len(self.slow) + 1, *self.speed.shape))
        np.cumsum(self.step[:, None] / self.slow, 0, out=done[1:])
        return done

    def _done_at(self, clock: Floats) -> Floats:
        """The same, until `clock` [C, N] [s]."""
        assert self.step is not None
        lap, at = np.divmod(clock / self.step[:, None], len(self.slow))
        whole = np.minimum(at.astype(np.int64), len(self.slow) - 1)
        part = (at - whole) * self.step[:, None] / self._at(self.slow, whole)
        return lap * self._done[-1] + self._at(self._done, whole) + part

    def _at(self, values: Floats, index: NDArray[np.int64]) -> Floats:
        """values [G, C, N] at an index [..., C, N] of each node."""
        clusters, nodes = self.speed.shape
        return values[index, np.arange(clusters)[:, None], np.arange(nodes)]


def _ones(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    return np.ones(shape)


def _drifting(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Background load that rises and falls: log slow is a random walk between 1 and 6."""
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
    """About every second node is slowed 1.5 to 5 times, at random, for 3 to 12 iterations on average; nodes differ in
    how often."""
    prone = rng.random(shape[1:]) < 0.5
    start = np.where(prone, rng.uniform(0.01, 0.08, shape[1:]), 0.0)
    slow = _switches(start, 1.0 / rng.uniform(3.0, 12.0, shape[1:]), rng, shape)
    return np.where(slow, rng.uniform(1.5, 5.0, shape[1:]), 1.0)


def _periodic(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Half the nodes are slowed 1.5 to 4 times for part of a fixed period of 8 to 40 iterations (cron, backups)."""
    prone = rng.random(shape[1:]) < 0.5
    period = rng.integers(8, 41, shape[1:])
    on = np.maximum(2, np.rint(period * rng.uniform(0.2, 0.5, shape[1:])))
    at = (np.arange(shape[0])[:, None, None] + rng.integers(0, 40, shape[1:])) % period
    return np.where(prone & (at < on), rng.uniform(1.5, 4.0, shape[1:]), 1.0)


def _lasting(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Each node is slowed or freed once, for good."""
    before = np.where(rng.random(shape[1:]) < 0.3, rng.uniform(1.5, 4.0, shape[1:]), 1.0)
    after = np.where(before > 1.0, 1.0, rng.uniform(1.5, 4.0, shape[1:]))
    change = rng.integers(1, shape[0], shape[1:])
    return np.where(np.arange(shape[0])[:, None, None] < change, before, after)


def _transient(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Single slow iterations, 1.5 to 5 times (garbage collection, a lost packet)."""
    hit = rng.random(shape) < rng.uniform(0.0, 0.04, shape[1:])
    return np.where(hit, rng.uniform(1.5, 5.0, shape), 1.0)


def _wave(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """A sine of log slow with a period of 20 to 60 iterations: smooth, where `periodic` jumps."""
    height = np.log(rng.uniform(1.2, 3.0, shape[1:]))
    turn = np.arange(shape[0])[:, None, None] / rng.uniform(20.0, 60.0, shape[1:]) + rng.random(shape[1:])
    return np.exp(height * 0.5 * (1 + np.sin(2 * np.pi * turn)))


def _racks(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Bursts that hit a third of the nodes together."""
    k, c, n = shape
    slow = _switches(rng.uniform(0.01, 0.05, (c, 3)), 1.0 / rng.uniform(3.0, 12.0, (c, 3)), rng, (k, c, 3))
    rack = rng.integers(0, 3, (c, n))
    hit = np.take_along_axis(slow, np.broadcast_to(rack, (k, c, n)), 2)
    return np.where(hit, rng.uniform(1.5, 4.0, (c, n)), 1.0)


def _cron(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Periodic with longer periods, 41 to 90, shorter and deeper slow-downs, some of which start an
    iteration late."""
    prone = rng.random(shape[1:]) < 0.5
    period = rng.integers(41, 91, shape[1:])
    on = np.maximum(2, np.rint(period * rng.uniform(0.05, 0.3, shape[1:])))
    at = np.arange(shape[0])[:, None, None] + rng.integers(0, 90, shape[1:])
    late = rng.integers(0, 2, (4 + shape[0] // 41, *shape[1:]))  # of each turn
    delay = np.take_along_axis(late, at // period, 0)
    phase = at % period
    return np.where(prone & (phase >= delay) & (phase < on + delay), rng.uniform(2.0, 6.0, shape[1:]), 1.0)


# -- by the clock: laws of [G, C, N] steps, STEPS of them to an iteration at full speed -------------------------------

STEPS = 4
LAPS = 2  # length of a law, in times the K iterations at full speed


def _clock_periodic(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """`periodic` in time: half the nodes are slowed 1.5 to 4 times for part of a fixed period, as long as 8 to 40
    iterations at full speed."""
    prone = rng.random(shape[1:]) < 0.5
    period = STEPS * rng.uniform(8.0, 41.0, shape[1:])
    at = np.arange(shape[0])[:, None, None] / period + rng.random(shape[1:])
    slow = prone & (at % 1.0 < rng.uniform(0.2, 0.5, shape[1:]))
    return np.where(slow, rng.uniform(1.5, 4.0, shape[1:]), 1.0)


def _clock_bursty(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """`bursty` in time."""
    prone = rng.random(shape[1:]) < 0.5
    start = np.where(prone, rng.uniform(0.01, 0.08, shape[1:]), 0.0) / STEPS
    slow = _switches(start, 1.0 / (STEPS * rng.uniform(3.0, 12.0, shape[1:])), rng, shape)
    return np.where(slow, rng.uniform(1.5, 5.0, shape[1:]), 1.0)


def _clock_cron(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """`cron` in time: a job at a fixed period of 41 to 90 iterations at full speed, each time up to one of them late,
    for 5 to 30 % of it."""
    prone = rng.random(shape[1:]) < 0.5
    period = STEPS * rng.uniform(41.0, 91.0, shape[1:])
    turn, phase = np.divmod(np.arange(shape[0])[:, None, None] + period * rng.random(shape[1:]), period)
    late = STEPS * rng.random((2 + shape[0] // (41 * STEPS), *shape[1:]))
    late = np.take_along_axis(late, turn.astype(np.int64), 0)
    slow = prone & (phase >= late) & (phase < late + period * rng.uniform(0.05, 0.3, shape[1:]))
    return np.where(slow, rng.uniform(2.0, 6.0, shape[1:]), 1.0)


def _clock_neighbours(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Other tenants on every second machine: they arrive at random and stay for 5 to 40 iterations at full speed on
    average; each takes as much of the processor as half of the node, at most six times slower in all."""
    prone = rng.random(shape[1:]) < 0.5
    stay = STEPS * rng.uniform(5.0, 40.0, shape[1:])
    arrival = np.where(prone, rng.uniform(0.1, 1.0, shape[1:]) / stay, 0.0)
    tenants = rng.poisson(arrival * stay)
    slow = np.empty(shape)
    for step in range(shape[0]):
        tenants = rng.binomial(tenants, np.exp(-1.0 / stay)) + rng.poisson(arrival)
        slow[step] = np.minimum(1.0 + 0.5 * tenants, 6.0)
    return slow


def _clock_throttling(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Half the nodes overheat after 10 to 40 iterations at full speed and compute 1.3 to 2.5 times slower until they
    have cooled, 3 to 15 later; each stay differs from its usual length by a tenth."""
    usual = STEPS * np.stack([rng.uniform(10.0, 40.0, shape[1:]), rng.uniform(3.0, 15.0, shape[1:])])
    hot = rng.random(shape[1:]) < 0.5
    prone = rng.random(shape[1:]) < 0.5
    left = rng.random(shape[1:]) * np.where(hot, usual[1], usual[0])
    states = np.empty(shape, np.bool_)
    for step in range(shape[0]):
        ended = left <= 0
        hot ^= ended
        length = np.where(hot, usual[1], usual[0]) * rng.lognormal(0.0, 0.1, shape[1:])
        left = np.where(ended, length, left) - 1.0
        states[step] = hot
    return np.where(prone & states, rng.uniform(1.3, 2.5, shape[1:]), 1.0)


def _clock_mixed(rng: Generator, shape: tuple[int, int, int]) -> Floats:
    """Clusters of unknown and changing kind: each has two of the laws above, the second after as many steps as 40 to
    110 iterations at full speed."""
    laws = np.stack(
        [law(rng, shape) for law in (_clock_periodic, _clock_bursty, _clock_cron, _clock_neighbours, _clock_throttling)]
    )
    first, second = rng.permuted(np.tile(np.arange(len(laws)), (shape[1], 1)), axis=1)[:, :2].T
    clusters = np.arange(shape[1])
    before = np.arange(shape[0])[:, None, None] < STEPS * rng.integers(40, 111, (shape[1], 1))
    return np.where(before, laws[first, :, clusters].swapaxes(0, 1), laws[second, :, clusters].swapaxes(0, 1))


BY_CLOCK: dict[str, Callable[[Generator, tuple[int, int, int]], Floats]] = {
    "clock periodic": _clock_periodic,
    "clock bursty": _clock_bursty,
    "clock cron": _clock_cron,
    "neighbours": _clock_neighbours,
    "throttling": _clock_throttling,
    "mixed": _clock_mixed,
}
KINDS: dict[str, Callable[[Generator, tuple[int, int, int]], Floats]] = {
    "static": _ones,
    "drifting": _drifting,
    "bursty": _bursty,
    "periodic": _periodic,
    "capped": _ones,  # memory caps up to half the nodes below their share (`make_scenario`)
    "lasting": _lasting,
    "transient": _transient,
    "wave": _wave,
    "racks": _racks,
    "cron": _cron,
    **BY_CLOCK,
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
    by_clock = kind in BY_CLOCK
    steps = LAPS * STEPS * iterations if by_clock else iterations
    return Scenario(
        kind,
        cluster,
        ideal * rng.uniform(0.02, 0.2, shape),
        speed,
        ideal * rng.uniform(0.01, 0.05, shape),
        KINDS[kind](rng, (steps, *shape)),
        rng.lognormal(-0.5 * jitter**2, jitter, (iterations, *shape)),
        scale * np.linspace(0.5, 2.0, iterations)[:, None],  # the noise scale grows while a model is trained
        ideal[:, 0] / STEPS if by_clock else None,
    )


def slow_down(scenario: Scenario, node: int, begin: int, end: int, factor: float) -> Scenario:
    """The same scenario where `node` of every cluster is `factor` times slower from iteration (or step of the clock)
    `begin` until `end`."""
    slow = scenario.slow.copy()
    slow[begin:end, :, node] *= factor
    return replace(scenario, slow=slow)


# -- iterations --------------------------------------------------------------------------------------------------------


def times(scenario: Scenario, iteration: int, sizes: NDArray[np.int64] | Floats, begin: Floats | float = 0.0) -> Floats:
    """Seconds [..., C, N] that micro-batches of `sizes` take in an iteration, with their jitter, begun at `begin`
    [C, N] on the clock."""
    work = scenario.jitter[iteration] * (scenario.overhead + sizes / scenario.speed)
    begin = np.broadcast_to(begin, scenario.speed.shape)
    seconds = scenario.stretched(iteration, begin, work) + scenario.communication
    return np.where(sizes > 0, seconds, 0.0)


def awaited(finish: Floats, first: NDArray[np.int64] | None) -> Floats:
    """When the first K [...] of N gradients are there [...]; None: all."""
    if first is None:
        return finish.max(-1)
    place = np.broadcast_to(np.asarray(first) - 1, finish.shape[:-1])[..., None]
    return np.take_along_axis(np.sort(finish, -1), place, -1)[..., 0]


class Simulation:
    """One scenario, iteration by iteration; it knows the truth, which only oracles read."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.iteration = 0
        self.clock = np.zeros(len(scenario.overhead))  # seconds since the start [C]
        self.busy = np.zeros(scenario.overhead.shape)  # seconds until a late node can begin [C, N]
        self._late_sizes = np.zeros(scenario.overhead.shape, np.int64)
        self._late_seconds = np.zeros(scenario.overhead.shape)
        self.reference = scenario.cluster.total / scenario.speed.sum(-1)  # [C] [s]

    def blank(self) -> Revealed:
        """What a sizer sees before the first iteration: oracles know the first one's truth."""
        truth = self._truth()
        return Revealed(**vars(Observation.blank(self.scenario.cluster)), before=truth, now=truth)

    def _truth(self) -> Truth:
        """Of the coming iteration."""
        scenario = self.scenario
        iteration = min(self.iteration, scenario.iterations - 1)
        return scenario.truth(scenario.slowness(iteration, self._begin()))

    def _begin(self) -> Floats:
        """When each node can begin [C, N] on the clock."""
        return self.clock[:, None] + self.busy

    def times(self, sizes: NDArray[np.int64] | Floats) -> Floats:
        """Each node's own seconds [..., C, N] in the coming iteration if it gets `sizes`."""
        return times(self.scenario, self.iteration, sizes, self._begin())

    def reward(
        self, sizes: NDArray[np.int64] | Floats, first: NDArray[np.int64] | None, work: Floats | None = None
    ) -> Floats:
        """The vector reward [..., C, 4] that the coming iteration would give; nothing moves on. `work`: its `times`."""
        finish = self.busy + (self.times(sizes) if work is None else work)
        phi = self.scenario.noise_scale[self.iteration]
        total = self.scenario.cluster.total.astype(np.float64)
        return rewards(awaited(finish, first), self.reference, finish, sizes, total, phi)

    def step(
        self, sizes: Sizes, first: NDArray[np.int64] | None = None, work: Floats | None = None
    ) -> tuple[Floats, Revealed]:
        """One iteration: seconds [C] until the coordinator makes its update, and what it then knows."""
        scenario = self.scenario
        k = self.iteration
        work = self.times(sizes) if work is None else work
        finish = self.busy + work
        seconds = awaited(finish, first)
        end = seconds[:, None] * (1 + 1e-12)
        began = self.busy <= end
        accepted = finish <= end
        old = (self.busy > 0) & (self.busy <= end)
        late = old & ~accepted  # its gradient of an earlier iteration is what came
        phi = scenario.noise_scale[k][:, None]
        shown = np.where(late, self._late_sizes, sizes)
        signal = 1.0 / np.sqrt(1.0 + phi / np.maximum(shown, 1))
        wobble = scenario.jitter[k]
        before = self._truth()
        if scenario.step is not None:  # as slow as they were over what they computed
            full = scenario.jitter[k] * (scenario.overhead + sizes / scenario.speed)
            before = scenario.truth((work - scenario.communication) / full)
        self._late_sizes = np.where(began & ~accepted, sizes, self._late_sizes)
        shown_seconds = np.where(late, self._late_seconds, work)
        self._late_seconds = np.where(began & ~accepted, work, self._late_seconds)
        self.busy = np.where(began, np.maximum(finish - seconds[:, None], 0.0), self.busy - seconds[:, None])
        self.busy[accepted] = 0.0
        self.clock = self.clock + seconds
        self.iteration += 1
        return seconds, Revealed(
            sizes=shown,
            seconds=shown_seconds,
            received=accepted | late,
            norm=wobble / signal,
            cosine=signal * np.where(late, 0.9, 1.0),
            loss=np.broadcast_to(1.0 / (1.0 + 0.01 * k), sizes.shape) * wobble,
            staleness=np.where(accepted, 0.0, 1.0),
            dropped=~accepted,
            noise_scale=phi[:, 0],
            before=before,
            now=self._truth(),
        )


# -- oracles and courses -----------------------------------------------------------------------------------------------


class Causal(Sizer):
    """The optimum under the true speeds of the iteration that has just ended: the measure of all sizers, since nothing
    that reacts can be earlier."""

    name: ClassVar[str] = "causal"

    def __init__(self, cluster: Cluster, settings: None) -> None:
        self._cluster = cluster

    def truth(self, observation: Revealed) -> Truth:
        """The speeds that this oracle knows."""
        return observation.before

    def propose(self, observation: Observation) -> Sizes:
        assert isinstance(observation, Revealed)
        truth = self.truth(observation)
        cluster = self._cluster
        return balanced_sizes(cluster.total, truth.overhead, truth.speed, cluster.min_size, cluster.max_size)


class Clairvoyant(Causal):
    """The optimum under the true speeds of the next iteration, without its jitter."""

    name: ClassVar[str] = "clairvoyant"

    def truth(self, observation: Revealed) -> Truth:
        return observation.now


ORACLES = {kind.name: f"{__name__}:{kind.__name__}" for kind in (Causal, Clairvoyant)}


def make_sizer(name: str, cluster: Cluster, settings: Mapping[str, Any] | None = None) -> Sizer:
    """A sizer of the library by its name, or an oracle by its own."""
    return sizers.make_sizer(ORACLES.get(name, name), cluster, settings)


@dataclass(frozen=True)
class Course:
    """What one sizer did on a scenario: seconds [K, C], vector rewards [K, C, 4], sizes [K, C, N] and each node's own
    seconds [K, C, N]."""

    seconds: Floats
    rewards: Floats
    sizes: Sizes
    node_seconds: Floats

    def means(self, skip: int = 0) -> dict[str, float]:
        """Mean of each objective over clusters and iterations after the first `skip`."""
        return dict(zip(OBJECTIVES, map(float, self.rewards[skip:].mean((0, 1))), strict=True))


def simulate(scenario: Scenario, sizer: Sizer, first: NDArray[np.int64] | None = None) -> Course:
    """Run `sizer` (made for scenario.cluster) over the whole scenario; `first` is K where the sizer leaves it alone."""
    simulation = Simulation(scenario)
    k = scenario.iterations
    (c, n) = scenario.overhead.shape
    seconds = np.empty((k, c))
    vectors = np.empty((k, c, len(OBJECTIVES)))
    all_sizes = np.empty((k, c, n), np.int64)
    node_seconds = np.empty((k, c, n))
    observation = simulation.blank()
    for iteration in range(k):
        sizes = sizer.propose(observation)
        own = sizer.first()
        own = first if own is None else own
        node_seconds[iteration] = work = simulation.times(sizes)
        vectors[iteration] = simulation.reward(sizes, own, work)
        seconds[iteration], observation = simulation.step(sizes, own, work)
        all_sizes[iteration] = sizes
    return Course(seconds, vectors, all_sizes, node_seconds)


def regret(course: Course, causal: Course, skip: int = 0) -> Floats:
    """(T - T_causal) / T_causal [C] of mean iteration times after the first `skip` iterations, on the same noise."""
    reference = causal.seconds[skip:].mean(0)
    return (course.seconds[skip:].mean(0) - reference) / reference

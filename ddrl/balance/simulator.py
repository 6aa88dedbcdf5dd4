"""A simulator of synchronous data-parallel iterations on unequal nodes, many clusters at once.

Departures from real processes: a coordinator that awaits the first K of N drops every later gradient (staleness
threshold 0), and the late node begins its next micro-batch once it is done (Chen et al. 2016, backup workers). Gradient
norms follow E|g_b|^2 = |G|^2 (1 + phi / b) (McCandlish et al. 2018, appendix A)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddrl.balance.cluster import Observation
from ddrl.balance.kinds import Scenario
from ddrl.balance.objectives import OBJECTIVES, rewards
from ddrl.balance.sizer import Sizer
from ddrl.balance.sizes import Floats, Sizes


def times(scenario: Scenario, iteration: int, sizes: NDArray[np.int64] | Floats) -> Floats:
    """Seconds [..., C, N] that micro-batches of `sizes` take in an iteration, with their jitter."""
    work = scenario.slow[iteration] * scenario.jitter[iteration] * (scenario.overhead + sizes / scenario.speed)
    return np.where(sizes > 0, work + scenario.communication, 0.0)


def awaited(finish: Floats, first: NDArray[np.int64] | None) -> Floats:
    """When the first K [...] of N gradients are there [...]; None: all."""
    if first is None:
        return finish.max(-1)
    place = np.broadcast_to(np.asarray(first) - 1, finish.shape[:-1])[..., None]
    return np.take_along_axis(np.sort(finish, -1), place, -1)[..., 0]


class Simulation:
    """One scenario, iteration by iteration; it knows the truth and tells oracles alone."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.iteration = 0
        self.busy = np.zeros(scenario.overhead.shape)  # seconds until a late node can begin [C, N]
        self._late_sizes = np.zeros(scenario.overhead.shape, np.int64)
        self._late_seconds = np.zeros(scenario.overhead.shape)
        self.reference = scenario.cluster.total / scenario.speed.sum(-1)  # [C] [s]

    def blank(self) -> Observation:
        """What a sizer sees before the first iteration: oracles know the first one's truth."""
        blank = Observation.blank(self.scenario.cluster)
        truth = self.scenario.truth(0)
        return replace(blank, before=truth, now=truth)

    def finish(self, sizes: NDArray[np.int64] | Floats) -> Floats:
        """When each node ends in the coming iteration [..., C, N] if it gets `sizes`."""
        return self.busy + times(self.scenario, self.iteration, sizes)

    def reward(self, sizes: NDArray[np.int64] | Floats, first: NDArray[np.int64] | None) -> Floats:
        """The vector reward [..., C, 4] that the coming iteration would give; nothing moves on."""
        finish = self.finish(sizes)
        phi = self.scenario.noise_scale[self.iteration]
        total = self.scenario.cluster.total.astype(np.float64)
        return rewards(awaited(finish, first), self.reference, finish, sizes, total, phi)

    def step(self, sizes: Sizes, first: NDArray[np.int64] | None = None) -> tuple[Floats, Observation]:
        """One iteration: seconds [C] until the coordinator goes on, and what it then knows."""
        scenario = self.scenario
        k = self.iteration
        work = times(scenario, k, sizes)
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
        observation = Observation(
            sizes=shown,
            seconds=np.where(late, self._late_seconds, work),
            received=accepted | late,
            norm=wobble / signal,
            cosine=signal * np.where(late, 0.9, 1.0),
            loss=np.broadcast_to(1.0 / (1.0 + 0.01 * k), sizes.shape) * wobble,
            staleness=np.where(accepted, 0.0, 1.0),
            dropped=~accepted,
            noise_scale=phi[:, 0],
            before=scenario.truth(k),
            now=scenario.truth(min(k + 1, scenario.iterations - 1)),
        )
        self._late_sizes = np.where(began & ~accepted, sizes, self._late_sizes)
        self._late_seconds = np.where(began & ~accepted, work, self._late_seconds)
        self.busy = np.where(began, np.maximum(finish - seconds[:, None], 0.0), self.busy - seconds[:, None])
        self.busy[accepted] = 0.0
        self.iteration += 1
        return seconds, observation


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
        vectors[iteration] = simulation.reward(sizes, own)
        node_seconds[iteration] = times(scenario, iteration, sizes)
        seconds[iteration], observation = simulation.step(sizes, own)
        all_sizes[iteration] = sizes
    return Course(seconds, vectors, all_sizes, node_seconds)


def regret(course: Course, causal: Course, skip: int = 0) -> Floats:
    """(T - T_causal) / T_causal [C] of mean iteration times after the first `skip` iterations, on the same noise."""
    reference = causal.seconds[skip:].mean(0)
    return (course.seconds[skip:].mean(0) - reference) / reference

"""Sizers: each proposes the next iteration's micro-batch sizes from the times of the last; `Balancer` wraps one for a
program's own training loop.

A sizer is a plug-in (`core.plugins`): a class of this module with a `name`, or package.module:Class. `equal`, `static`,
`last_value`, `ema` and `controller` are rules of others, `affine` is the default; `rhythm`, `hedge` and `both` expect
slow-downs by what a node did before, without training, `ddqn` is the learned one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddrl.balance.ddqn import (
    OBJECTIVES,
    RULES,
    SHIPPED,
    NodeState,
    ValueNetwork,
    apply_actions,
    best_actions,
    best_of,
    check_weights,
    first_of,
    rewards,
    sizes_under,
)
from ddrl.balance.sizes import (
    AffineFilter,
    Cluster,
    FilterSettings,
    Observation,
    Sizes,
    balanced_sizes,
    fractions_at,
    proportional_sizes,
    water_level,
)
from ddrl.core import plugins
from ddrl.core.config import Config, setting
from ddrl.core.errors import ConfigError
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Ints

PACKAGE = "ddrl.balance.sizers"
DEFAULT = "affine"


class Sizer:
    """Base of all sizers. One that reads more of an observation than times also has `reads_gradients = True`."""

    name: ClassVar[str]

    def __init__(self, cluster: Cluster, settings: Any) -> None:
        """For `cluster`; `settings`: of the sizer's own table."""

    def propose(self, observation: Observation) -> Sizes:
        """Sizes [..., N], each within the cluster's bounds, that sum to its batch. Called once an iteration, first
        with a blank observation."""
        raise NotImplementedError

    def first(self) -> Ints | None:
        """K [...]: how many gradients the coordinator awaits in the iteration just proposed; None: all. A sizer gives K
        from its first sizes on, or never."""
        return None


def make_sizer(name: str, cluster: Cluster, settings: Mapping[str, Any] | None = None) -> Sizer:
    """The sizer `name` for `cluster`; `settings`: its own table. ConfigError for an unknown name or setting."""
    kind = plugins.load("balance.sizer", PACKAGE, name)
    table = {f"balance.{kind.name}": dict(settings or {})}
    return kind(cluster, plugin_settings(Config(tables=table), "balance", kind))


class NoiseScale:
    """The gradient noise scale phi = tr(Sigma) / |G|^2 [samples] from the gradients of a batch's parts (McCandlish et
    al. 2018, appendix A.1); 0 before the first update.

    E|g_b|^2 = |G|^2 + tr(Sigma) / b for b samples: the nodes' parts and the whole batch give two equations. Their
    solutions are averaged over iterations before the division; one rate for both, so the ratio needs no correction."""

    RATE: ClassVar[float] = 0.1  # of the averages

    def __init__(self) -> None:
        self._signal = self._noise = 0.0

    def update(self, sizes: Sizes, norm: ArrayLike, mean_norm: float) -> float:
        """Add an iteration and return the estimate. norm [N]: of each part's gradient, of sizes [N] above 0."""
        squares = np.square(np.asarray(norm, np.float64))
        whole = float(sizes.sum())
        if len(sizes) > 1 and np.isfinite([*squares, mean_norm]).all():
            noise = float(squares.mean() - mean_norm**2) / float((1.0 / sizes).mean() - 1.0 / whole)
            self._noise += self.RATE * (noise - self._noise)
            self._signal += self.RATE * (mean_norm**2 - noise / whole - self._signal)
        return self.value

    @property
    def value(self) -> float:
        """phi [samples], at most 1e6."""
        return 0.0 if self._noise <= 0 else self._noise / max(self._signal, 1e-6 * self._noise)


class Balancer:
    """Sizes for one's own training loop: every process holds one and gives it the same times, so all agree without a
    coordinator.

        balancer = Balancer(total=256, nodes=4)
        ... each process computes balancer.sizes[rank] samples; times are gathered ...
        balancer.update(seconds)
    """

    def __init__(
        self,
        total: int,
        nodes: int,
        sizer: str = DEFAULT,
        *,
        speed: ArrayLike | None = None,
        max_size: ArrayLike | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.cluster = Cluster.of(total, np.ones(nodes) if speed is None else speed, max_size)
        self._sizer = make_sizer(sizer, self.cluster, settings)
        self._noise_scale = NoiseScale()
        self.sizes = self._sizer.propose(Observation.blank(self.cluster))

    @property
    def weights(self) -> np.ndarray:
        """b_i / B [N]: the factor of each node's mean gradient, so that the sum is the whole batch's mean gradient."""
        return self.sizes / self.cluster.total

    def update(
        self,
        seconds: ArrayLike,
        received: ArrayLike | None = None,
        *,
        norm: ArrayLike | None = None,
        cosine: ArrayLike | None = None,
        loss: ArrayLike | None = None,
    ) -> Sizes:
        """The next sizes [N], from each node's seconds for the last ones.

        Of each node's gradient, all three or none: its norm, its cosine to the weighted mean of all, its mean loss;
        only sizer = "ddqn" reads them. ConfigError for values that cannot be."""
        gradients: dict[str, ArrayLike] = {}
        if norm is not None and cosine is not None and loss is not None:
            mean_norm = float(np.asarray(norm) * np.asarray(cosine) @ self.weights)  # <g_i, g> / |g|, weighted
            noise_scale = self._noise_scale.update(self.sizes, norm, mean_norm)
            gradients = {"norm": norm, "cosine": cosine, "loss": loss, "noise_scale": noise_scale}
        elif any(values is not None for values in (norm, cosine, loss)):
            raise ConfigError("norm, cosine and loss of the gradients are given together, or none of them")
        self.sizes = self._sizer.propose(Observation.of(self.cluster, self.sizes, seconds, received, **gradients))
        return self.sizes


# -- rules without a model of times ------------------------------------------------------------------------------------


class Static(Sizer):
    """In proportion to the speeds c_i p_i that model information gives before the first iteration, for good:
    b_i = B c_i p_i / sum c p."""

    name: ClassVar[str] = "static"

    def __init__(self, cluster: Cluster, settings: None) -> None:
        self._sizes = proportional_sizes(cluster.total, cluster.speed, cluster.min_size, cluster.max_size)

    def propose(self, observation: Observation) -> Sizes:
        return self._sizes


class Equal(Static):
    """B / N samples for every node, as far as memory allows: what DistributedDataParallel does."""

    name: ClassVar[str] = "equal"

    def __init__(self, cluster: Cluster, settings: None) -> None:
        super().__init__(replace(cluster, speed=np.ones_like(cluster.speed)), settings)


@dataclass(frozen=True)
class EmaSettings:
    """Settings of `ema`."""

    rate: float = setting(0.2, "", "Share of the newest throughput in the average.", gt=0, le=1)


class Ema(Sizer):
    """In proportion to an exponential average of each node's throughput b_i / t_i (LB-BSP: Chen et al., SoCC 2020). The
    first time received replaces the speed of model information."""

    name: ClassVar[str] = "ema"
    Settings = EmaSettings

    def __init__(self, cluster: Cluster, settings: EmaSettings) -> None:
        self._cluster = cluster
        self._rate = settings.rate
        self._speed = cluster.speed.copy()
        self._measured = np.zeros(cluster.speed.shape, np.bool_)

    def propose(self, observation: Observation) -> Sizes:
        received = observation.received & (observation.sizes > 0)
        throughput = observation.sizes / np.where(received, observation.seconds, 1.0)
        if not self._measured.all():
            # Until a node was measured, its speed of model information is scaled to the measured nodes' unit.
            known = received | self._measured
            speed = np.where(received, throughput, self._speed)
            share = np.where(known, speed, 0.0).sum(-1, keepdims=True)
            prior = np.where(known, self._cluster.speed, 0.0).sum(-1, keepdims=True)
            unit = np.where(prior > 0, share / np.where(prior > 0, prior, 1.0), 1.0)
            self._speed = np.where(known, self._speed, self._cluster.speed * unit)
        rate = np.where(self._measured, self._rate, 1.0)
        self._speed = np.where(received, self._speed + rate * (throughput - self._speed), self._speed)
        self._measured |= received
        cluster = self._cluster
        return proportional_sizes(cluster.total, self._speed, cluster.min_size, cluster.max_size)


class LastValue(Ema):
    """In proportion to the newest throughput alone: follows fastest, and is as noisy as one iteration."""

    name: ClassVar[str] = "last_value"
    Settings = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, cluster: Cluster, settings: None) -> None:
        super().__init__(cluster, EmaSettings(rate=1.0))


DEAD_BAND = 0.05  # relative time error of a node below which `controller` keeps its size


@dataclass(frozen=True)
class ControllerSettings:
    """Settings of `controller`."""

    gain: float = setting(0.5, "", "Share of the measured time error that one iteration corrects.", gt=0, le=1)


class Controller(Sizer):
    """A proportional controller on each node's time error (OmniLearn: Tyagi and Sharma, 2025).

    Node i computes b_i / t_i samples/s, so T_mean - t_i seconds of error are worth gain b_i (T_mean - t_i) / t_i
    samples. A dead band keeps the sizes while all times are close together."""

    name: ClassVar[str] = "controller"
    Settings = ControllerSettings

    def __init__(self, cluster: Cluster, settings: ControllerSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._share = cluster.speed.copy()  # real-valued sizes, up to a factor

    def propose(self, observation: Observation) -> Sizes:
        received = observation.received & (observation.sizes > 0)
        cluster = self._cluster
        if received.any():
            seconds = np.where(received, observation.seconds, 1.0)
            count = np.maximum(received.sum(-1, keepdims=True), 1)
            mean = np.where(received, seconds, 0.0).sum(-1, keepdims=True) / count
            error = np.where(received, (mean - seconds) / seconds, 0.0)
            error = np.where(np.abs(error) > DEAD_BAND, error, 0.0)
            self._share = self._share * (1 + self._settings.gain * error)  # error > -1: a share stays positive
        none = np.zeros_like(self._share)
        level = water_level(cluster.total, none, self._share, cluster.min_size, cluster.max_size)
        # What memory caps is kept as capped: a share that grew beyond its cap would shrink too late.
        self._share = fractions_at(level, none, self._share, cluster.min_size, cluster.max_size)
        return proportional_sizes(cluster.total, self._share, cluster.min_size, cluster.max_size)


# -- affine times ------------------------------------------------------------------------------------------------------


class Affine(Sizer):
    """Affine times by a Kalman filter with a jump test, and the exact integer optimum under them (Cannikin: Nie et al.
    2024, arXiv 2402.05302, which fits by least squares)."""

    name: ClassVar[str] = "affine"
    Settings = FilterSettings

    def __init__(self, cluster: Cluster, settings: FilterSettings) -> None:
        self._cluster = cluster
        self._filter = AffineFilter(cluster, settings)

    def propose(self, observation: Observation) -> Sizes:
        self._filter.update(observation)
        cluster = self._cluster
        return balanced_sizes(
            cluster.total, self._filter.overhead, self._filter.speed, cluster.min_size, cluster.max_size
        )


# -- rules that expect slow-downs --------------------------------------------------------------------------------------


class Rhythm(Sizer):
    """The affine filter, and a rhythm: a node whose present state, slow or fast, has lasted exactly as long as its last
    whole stay in that state is taken to switch in the next iteration."""

    name: ClassVar[str] = "rhythm"
    Settings = FilterSettings

    def __init__(self, cluster: Cluster, settings: FilterSettings) -> None:
        self._state = NodeState(cluster, settings)

    def propose(self, observation: Observation) -> Sizes:
        self._state.update(observation.times_alone())
        return sizes_under(self._state, self._state.rules[RULES.index(self.name)])


@dataclass(frozen=True)
class HedgeSettings(FilterSettings):
    """Settings of `hedge`: the filter's, and its strength."""

    strength: float = setting(
        2.0, "", "How many times the mean slow-down to come is added to a fast node's expected time.", ge=0
    )


class Hedge(Rhythm):
    """The affine filter, with a reserve for chance: a fast node is taken to need longer by `strength` times the rate of
    its jumps times the size of its falls."""

    name: ClassVar[str] = "hedge"
    Settings = HedgeSettings

    def __init__(self, cluster: Cluster, settings: HedgeSettings) -> None:
        self._state = NodeState(cluster, settings, settings.strength)


class Choice(Sizer):
    """In each cluster the one of `affine`, `rhythm`, `hedge` and further candidates whose sizes would have earned most
    so far beside the filter's, in a discounted average, each above its margin. `weights` [4] or [..., 4] of the
    objectives.

    Each iteration shows what other sizes would have given: a node that took t for b samples would have taken
    t (a + b' w) / (a + b w) for b'. Time saved counts in seconds, not by its share of each iteration: slow iterations
    are what there is to gain."""

    reads_gradients = False

    def __init__(
        self,
        cluster: Cluster,
        settings: HedgeSettings,
        weights: NDArray[np.floating[Any]],
        trust: float,
        margins: tuple[float, ...],
    ) -> None:
        self._margins = margins
        self.state = NodeState(cluster, settings, settings.strength)
        self._weights = weights
        self._trust = trust
        self._filter_time = np.zeros(cluster.total.shape)  # average seconds of an iteration by the filter's sizes
        self._earned = np.zeros((len(margins), *cluster.total.shape))
        self._sizes: Sizes | None = None  # the last ones of every candidate [R, ..., N]

    @property
    def chosen(self) -> Ints:
        """The candidate whose sizes are used now in each cluster [...]; 0: the filter."""
        return best_of(self._earned, self._margins)

    def propose(self, observation: Observation) -> Sizes:
        observation = observation if self.reads_gradients else observation.times_alone()
        self.state.update(observation)
        if self._sizes is not None and observation.received.any():
            self._earn(observation, self._sizes)
        self.state.choose(self._earned[: len(RULES)], self._margins[: len(RULES)])
        self._sizes = np.stack(self._candidates(observation))
        return np.take_along_axis(self._sizes, self.chosen[None, ..., None], 0)[0]

    def _earn(self, observation: Observation, sizes: Sizes) -> None:
        """Take in what `sizes` [R, ..., N] would have given in the observed iteration, over the gradients received."""
        track = self.state.filter
        alike = observation.seconds / (track.overhead + np.maximum(observation.sizes, 1) / track.speed)
        finish = np.where(observation.received, alike * (track.overhead + sizes / track.speed), 0.0)
        seconds = finish.max(-1)
        self._filter_time += np.where(self._filter_time > 0, self._trust, 1.0) * (seconds[0] - self._filter_time)
        reference = np.maximum(self._filter_time, 1e-12)
        total = self.state.cluster.total.astype(np.float64)
        vectors = rewards(seconds, reference, finish, sizes, total, observation.noise_scale)
        gained = (vectors * self._weights).sum(-1)
        self._earned += self._trust * (gained - gained[0] - self._earned)

    def _candidates(self, observation: Observation) -> list[Sizes]:
        """Sizes [..., N] of each."""
        return [sizes_under(self.state, slowness) for slowness in self.state.rules]


RULE_TRUST = 0.02  # share of the newest iteration in what each candidate earned
RULE_GAIN = 0.003  # iterations that a rule must save on average beside the filter's sizes to be used


@dataclass(frozen=True)
class BothSettings(HedgeSettings):
    """Settings of `both`: those of the rules, and of the choice between them."""

    trust: float = setting(RULE_TRUST, "", "Share of the newest iteration in what each rule earned.", gt=0, le=1)
    margin: float = setting(
        RULE_GAIN, "iterations", "What a rule must have saved on average beside the filter's sizes to be used.", ge=0
    )


class Both(Choice):
    """In each cluster the one of `affine`, `rhythm` and `hedge` whose sizes would have saved most time so far."""

    name: ClassVar[str] = "both"
    Settings = BothSettings

    def __init__(self, cluster: Cluster, settings: BothSettings) -> None:
        margins = (0.0, settings.margin, settings.margin)
        super().__init__(cluster, settings, np.eye(len(OBJECTIVES))[0], settings.trust, margins)


# -- the learned sizer -------------------------------------------------------------------------------------------------


AGENT_GAIN = 0.005  # iterations that the agent's sizes must save on average beside the filter's to be used
RHYTHM_GAIN = 0.01  # the same of `rhythm`: half of hedge's, for where a rhythm holds each late iteration is dear
AGENT = len(RULES)  # its place among the candidates


@dataclass(frozen=True)
class DdqnSettings(HedgeSettings):
    """Settings of `ddqn`: those of the rules, and the agent's."""

    weights: list[float] = setting(
        [1.0, 0.0, 0.0, 0.0], "", "Weights of time, statistical efficiency, dropped share and imbalance; they sum to 1."
    )
    margin: float = setting(
        0.02,
        "iterations",
        "What an action must promise, and hedge have saved on average, to be used.",
        ge=0,
    )
    trust: float = setting(
        RULE_TRUST, "", "Share of the newest iteration in what each candidate earned; 0: always the agent.", ge=0, le=1
    )
    choose_first: bool = setting(False, "", "Also choose K, how many of the N gradients are awaited.")
    gradients: bool = setting(
        True, "", "Whether norms, cosines and losses of gradients are read, where they are known."
    )
    network: str = setting("", "path", "Its safetensors file; empty: the one that ships.")


class Ddqn(Choice):
    """The rules of `both`, and a double DQN: each node's action keeps the size that the best-known rule of this cluster
    gives it, multiplies that, or chooses another regime, each rule's among them; a further action chooses K of N where
    `choose_first`. Action = argmax of the objectives' weighted values.

    In each cluster the agent's sizes are used while no rule's would have earned more. So where training did not prepare
    it, this sizer is the best of the rules. Trained in the simulator by `python -m benchmarks.microbatch --train`;
    inference is numpy."""

    name: ClassVar[str] = "ddqn"
    Settings = DdqnSettings

    def __init__(self, cluster: Cluster, settings: DdqnSettings) -> None:
        weights = check_weights(settings.weights).astype(np.float32)
        margins = (0.0, min(RHYTHM_GAIN, settings.margin), settings.margin, AGENT_GAIN)
        super().__init__(cluster, settings, weights, settings.trust or RULE_TRUST, margins)
        self._settings = settings
        self.reads_gradients = settings.gradients
        self._network = ValueNetwork.load(Path(settings.network) if settings.network else SHIPPED)
        shape = cluster.speed.shape
        self._first = np.full(shape[:-1], cluster.nodes) if settings.choose_first else None
        self.actions = np.zeros(shape, np.int64)

    @property
    def chosen(self) -> Ints:
        """See `Choice`; with `trust` = 0 always the agent."""
        chosen = super().chosen
        return chosen if self._settings.trust else np.full_like(chosen, AGENT)

    def _candidates(self, observation: Observation) -> list[Sizes]:
        state = self.state
        if observation.received.any():
            values = self._network(state.features(), state.context(self._weights))
            self.actions = best_actions(values.nodes @ self._weights, self._settings.margin)
            if self._first is not None:
                chosen = best_actions(values.first @ self._weights, self._settings.margin)
                self._first = first_of(chosen, state.cluster.nodes)
        return [*super()._candidates(observation), apply_actions(state, self.actions)]

    def first(self) -> Ints | None:
        return self._first

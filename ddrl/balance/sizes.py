"""Integer micro-batch sizes that sum to the batch exactly, what sizers are given (a cluster, then
observations), and the filter of each node's time.

Two rules share one water level. Proportional sizes are b_i = clip(lambda w_i, min_i, max_i), where lambda spreads what
clipping leaves over, rounded by largest remainder. Balanced sizes minimise the slowest node's time for affine times
t_i(b) = overhead_i + b / speed_i: without bounds T* = (B + sum v_i a_i) / sum v_i over the active set and
b_i = v_i (T* - a_i); the integers are the exact optimum (a node without samples costs nothing).

All arrays are [..., N]: nodes on the last axis, any number of independent clusters before it. O(N log N) a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ddrl.core.config import setting
from ddrl.core.errors import ConfigError
from ddrl.core.specs import Array, Flags, Floats, Ints

Sizes = Ints

SLACK = 1e-9  # relative; above the rounding of sums of float64, far below one sample


def memory_limit(memory: ArrayLike, fixed: float, per_sample: float) -> Sizes:
    """Largest micro-batch [samples] of nodes with `memory` [..., N] [bytes] where the model takes `fixed` and each
    sample `per_sample` bytes; ConfigError where not one sample fits."""
    memory = np.asarray(memory, np.float64)
    if not (np.isfinite(per_sample) and per_sample > 0):
        raise ConfigError(f"bytes a sample ({per_sample}) must be positive")
    limit = np.floor((memory - fixed) / per_sample)
    if not (limit >= 1).all():
        node = int(np.argwhere(~(limit >= 1))[0][-1])
        raise ConfigError(
            f"node {node}: its memory ({memory[..., node].min():g} bytes) holds the model ({fixed:g}) but not one "
            f"sample ({per_sample:g}): leave the node out, or make the model smaller"
        )
    return limit.astype(np.int64)


def model_speed(
    operation_rate: ArrayLike, operations: float, byte_rate: ArrayLike = np.inf, sample_bytes: float = 0.0
) -> Floats:
    """c_i p_i [..., N] [samples/s] before anything was measured: rates of the nodes [operations/s, bytes/s] over the
    operations and bytes of a sample, the slower of the two (roofline; Williams et al. 2009). A dense network takes
    about 6 operations a parameter and sample, forward and backward (Kaplan et al. 2020). ConfigError for a rate or a
    count that cannot be."""
    rate = np.asarray(operation_rate, np.float64)
    check_positive("rate", rate)
    if not (np.isfinite(operations) and operations > 0 and np.isfinite(sample_bytes) and sample_bytes >= 0):
        raise ConfigError(f"operations ({operations:g}) and bytes ({sample_bytes:g}) of a sample cannot be")
    speed = 1.0 / np.maximum(operations / rate, sample_bytes / np.asarray(byte_rate, np.float64))
    check_positive("speed", speed)
    return speed


def check_bounds(total: ArrayLike, lower: Ints, upper: Ints) -> None:
    """ConfigError unless `total` [...] samples can be cut into sizes between `lower` and `upper` [..., N]."""
    total = np.asarray(total)
    nodes = lower.shape[-1]
    if nodes < 1:
        raise ConfigError("a batch cannot be cut for no nodes")
    if (total < lower.sum(-1)).any():
        raise ConfigError(
            f"the batch ({int(total.min())} samples) is below what {nodes} nodes take at least "
            f"({int(lower.sum(-1).max())}): raise the batch, or use fewer nodes"
        )
    if (lower > upper).any():
        node = int(np.argwhere(lower > upper)[0][-1])
        raise ConfigError(
            f"node {node}: its largest micro-batch ({int(upper[..., node].min())}) is below its smallest "
            f"({int(lower[..., node].max())})"
        )
    if (total > upper.sum(-1)).any():
        raise ConfigError(
            f"the batch ({int(total.max())} samples) exceeds what all {nodes} nodes hold together "
            f"({int(upper.sum(-1).min())}): lower the batch, or add memory or nodes"
        )


def check_positive(name: str, values: Floats) -> None:
    """ConfigError unless all are finite and positive, naming the node."""
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        where = tuple(np.argwhere(bad)[0])
        raise ConfigError(f"node {where[-1]}: its {name} is {values[where]}: it must be finite and positive")


def water_level(total: ArrayLike, overhead: Floats, speed: Floats, lower: Sizes, upper: Sizes) -> Floats:
    """The level T [...] at which sum_i clip(speed_i (T - overhead_i), lower_i, upper_i) = total.

    The sum is piecewise linear in T: its corners are sorted and the piece that holds `total` is solved."""
    corners = np.concatenate([overhead + lower / speed, overhead + upper / speed], -1)
    order = np.argsort(corners, -1)
    corners = np.take_along_axis(corners, order, -1)
    slope = np.cumsum(np.take_along_axis(np.concatenate([speed, -speed], -1), order, -1), -1)
    steps = slope[..., :-1] * np.diff(corners, axis=-1)
    begin = lower.sum(-1, keepdims=True)
    filled = np.concatenate([np.broadcast_to(begin, (*steps.shape[:-1], 1)), begin + np.cumsum(steps, -1)], -1)
    piece = np.maximum((filled <= np.asarray(total)[..., None]).sum(-1, keepdims=True) - 1, 0)
    level = np.take_along_axis(corners, piece, -1)
    # Sums of +speed and -speed lose small speeds beside large ones: the piece is found by them, then solved afresh.
    at = np.clip(speed * (level - overhead), lower, upper).sum(-1)
    growing = (overhead + lower / speed <= level) & (level < overhead + upper / speed)
    rate = np.where(growing, speed, 0.0).sum(-1)
    return level[..., 0] + np.where(rate > 0, (np.asarray(total) - at) / np.where(rate > 0, rate, 1.0), 0.0)


def fractions_at(level: Floats, overhead: Floats, speed: Floats, lower: Sizes, upper: Sizes) -> Floats:
    """Real-valued sizes [..., N] at a water level [...]."""
    return np.clip(speed * (level[..., None] - overhead), lower, upper)


def proportional_sizes(total: ArrayLike, weight: Floats, lower: Sizes, upper: Sizes) -> Sizes:
    """b_i = clip(lambda weight_i, lower_i, upper_i) with sum `total`, rounded by largest remainder.

    Raises ConfigError for bounds that cannot hold and for weights that are not finite and positive."""
    check_bounds(total, lower, upper)
    check_positive("weight", weight)
    none = np.zeros_like(weight)
    exact = fractions_at(water_level(total, none, weight, lower, upper), none, weight, lower, upper)
    sizes = np.floor(exact + SLACK * np.asarray(total)[..., None]).astype(np.int64)
    sizes = np.clip(sizes, lower, upper)
    remainder = np.where(sizes < upper, exact - sizes, -np.inf)
    left = np.asarray(total) - sizes.sum(-1)
    return sizes + (_rank(-remainder) < left[..., None])


def balanced_sizes(total: ArrayLike, overhead: Floats, speed: Floats, lower: Sizes, upper: Sizes) -> Sizes:
    """The integers [..., N] with sum `total` that minimise the slowest node's overhead_i + b_i / speed_i.

    Whole samples below the real-valued level T* are kept: no optimum is lower. The remaining ones, at most one a node,
    go one by one to the node that ends first with one more: units of all nodes in order of their end times.
    Raises ConfigError for bounds that cannot hold, speeds that are not positive, overheads below 0."""
    check_bounds(total, lower, upper)
    check_positive("speed", speed)
    if not (np.isfinite(overhead) & (overhead >= 0)).all():
        raise ConfigError("a node's overhead must be finite and at least 0 s")
    level = water_level(total, overhead, speed, lower, upper)
    whole = np.floor(speed * (level[..., None] - overhead) - SLACK * np.asarray(total)[..., None])
    sizes = np.clip(whole, lower, upper).astype(np.int64)
    left = (np.asarray(total) - sizes.sum(-1))[..., None]
    ends = np.where(sizes < upper, overhead + (sizes + 1) / speed, np.inf)
    reach = np.take_along_axis(np.sort(ends, -1), np.clip(left - 1, 0, ends.shape[-1] - 1), -1)
    # No optimum ends after `reach` (one more for each of the `left` earliest), so few units of a node compete.
    room = np.clip(np.floor(speed * (reach - overhead) + SLACK) - sizes + 1, 0, upper - sizes)
    units = np.arange(1, int(room.max(initial=0)) + 1)
    ends = np.where(
        units <= (upper - sizes)[..., None], overhead[..., None] + (sizes[..., None] + units) / speed[..., None], np.inf
    )
    flat = ends.reshape(*ends.shape[:-2], -1)
    return sizes + (_rank(flat) < left).reshape(ends.shape).sum(-1)


def _rank(values: Floats) -> Ints:
    """Place of each value in ascending order along the last axis; equal values by position."""
    order = np.argsort(values, -1, kind="stable")
    ranks = np.empty(order.shape, np.int64)
    np.put_along_axis(ranks, order, np.arange(values.shape[-1], dtype=np.int64), -1)
    return ranks


# -- what sizers are given ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Nodes that share one batch.

    total: samples of a batch [...]. speed: c_i p_i [..., N] [samples/s] from model information (operations and bytes a
    sample beside the node's rates); only ratios matter to most sizers. min_size, max_size: samples [..., N]."""

    total: Ints
    speed: Floats
    min_size: Sizes
    max_size: Sizes

    @staticmethod
    def of(total: ArrayLike, speed: ArrayLike, max_size: ArrayLike | None = None, min_size: int = 1) -> Cluster:
        """Checked; without `max_size` memory holds the whole batch. Raises ConfigError with the node and the reason."""
        rates = np.asarray(speed, np.float64)
        totals = np.broadcast_to(np.asarray(total, np.int64), rates.shape[:-1])
        if rates.ndim < 1:
            raise ConfigError("a cluster needs one speed a node")
        lower = np.full(rates.shape, min_size, np.int64)
        limit = totals[..., None] if max_size is None else np.minimum(np.asarray(max_size, np.int64), totals[..., None])
        upper = np.broadcast_to(limit, rates.shape)
        check_positive("speed", rates)
        check_bounds(totals, lower, upper)
        return Cluster(totals, rates, lower, upper)

    @property
    def nodes(self) -> int:
        """N."""
        return self.speed.shape[-1]

    def without(self, node: int) -> Cluster:
        """The cluster after `node` died. ConfigError where the others cannot hold the batch."""
        keep = np.delete(np.arange(self.nodes), node)
        return Cluster.of(self.total, self.speed[..., keep], self.max_size[..., keep], int(self.min_size.min()))


@dataclass(frozen=True)
class Observation:
    """One iteration as measured by what collects gradients: a trainer, `Balancer`, a simulator.

    sizes [samples], seconds [s] from a node's start to its gradient, `received` where seconds are known. Of the
    gradients: norm, cosine to the mean gradient, mean loss, staleness [versions], dropped (bool). `noise_scale` is
    phi = tr(Sigma) / |G|^2 [samples] (McCandlish et al. 2018)."""

    sizes: Sizes
    seconds: Floats
    received: Flags
    norm: Floats
    cosine: Floats
    loss: Floats
    staleness: Floats
    dropped: Flags
    noise_scale: Floats

    @staticmethod
    def blank(cluster: Cluster) -> Observation:
        """Before the first iteration: nothing received."""
        none = np.zeros(cluster.speed.shape)
        no = np.zeros(cluster.speed.shape, np.bool_)
        sizes = np.zeros(cluster.speed.shape, np.int64)
        noise_scale = np.zeros(cluster.speed.shape[:-1])
        return Observation(sizes, none, no, none, none, none, none, no, noise_scale)

    def times_alone(self) -> Observation:
        """The same without the gradients' norms, cosines, losses and noise scale."""
        none = np.zeros_like(self.norm)
        scale = np.zeros_like(self.noise_scale)
        return replace(self, norm=none, cosine=none, loss=none, noise_scale=scale)

    @staticmethod
    def of(
        cluster: Cluster, sizes: Sizes, seconds: ArrayLike, received: ArrayLike | None = None, **gradients: ArrayLike
    ) -> Observation:
        """From sizes and times, and optionally of the gradients norm, cosine, loss, staleness, dropped [..., N] and
        noise_scale [...]. ConfigError for a received time that is zero, negative, NaN or infinite."""
        times = np.asarray(seconds, np.float64)
        if times.shape != cluster.speed.shape:
            raise ConfigError(f"times of {list(times.shape)} nodes were given for a cluster of {cluster.nodes}")
        known = np.ones(times.shape, np.bool_) if received is None else np.asarray(received, np.bool_)
        check_positive("time [s]", np.where(known, times, 1.0))
        blank = Observation.blank(cluster)
        statistics: dict[str, Array] = {}
        for name, values in gradients.items():
            like: Array = getattr(blank, name)
            given = np.asarray(values, like.dtype)
            if given.shape != like.shape or not np.isfinite(given).all():
                raise ConfigError(f"{name} {given.tolist()}: {list(like.shape)} finite values are needed")
            statistics[name] = given
        return replace(blank, sizes=sizes, seconds=np.where(known, times, 0.0), received=known, **statistics)


# -- a filter of node times --------------------------------------------------------------------------------------------
# A Kalman filter of each node's affine time t(b) = overhead + b / speed, with a jump test.
#
# State x = (overhead, seconds a sample). A slowed node takes longer in both, so drift and jumps scale x as a whole:
# process noise is q^2 x x', and an innovation beyond `jump` standard deviations multiplies x by t / predicted.
# Measurement noise is log-normal jitter, (jitter predicted)^2. A filter that follows as fast as it should has white
# innovations: each node's q rises while its successive innovations agree in sign, and falls while they alternate (after
# Mehra 1970). Its jitter rises while innovations are larger than they should be, and falls while they are smaller: the
# first ones, when little is known, move it most.

DRIFTS = (0.003, 0.5)  # least and greatest drift of a node
JITTERS = (0.01, 1.0)  # least and greatest jitter of a node
MEAN_SIZE = (2.0 / np.pi) ** 0.5  # of a standard normal number
LEAST_SHARE = 0.1  # of a node's time that its samples take


@dataclass(frozen=True)
class FilterSettings:
    """What the filter expects of nodes."""

    jitter: float = setting(
        0.05, "", "Relative standard deviation of one time around its mean, at the start.", gt=0, le=1
    )
    jitter_learning: float = setting(
        0.03, "", "How fast each node's own jitter is learned from its innovations; 0: kept.", ge=0, le=1
    )
    drift: float = setting(0.02, "", "Relative change of a node's speed in one iteration, at the start.", gt=0, le=0.5)
    learning: float = setting(0.2, "", "How fast each node's own drift is learned from its innovations; 0: kept.", ge=0)
    jump: float = setting(4.0, "", "Standard deviations beyond which a time counts as a change of speed.", gt=0)


class AffineFilter:
    """One filter a node.

    After each update: `overhead` [s], `speed` [samples/s], `predicted` [s] for the observed sizes before the update,
    `innovation` log(t / predicted) (0 where nothing was received), `jumped` bool; `drift`, the relative change of each
    node's speed in one iteration, and `jitter`, the relative standard deviation of its times, as learned."""

    def __init__(self, cluster: Cluster, settings: FilterSettings) -> None:
        shape = cluster.speed.shape
        self._settings = settings
        self._x = np.stack([np.zeros(shape), 1.0 / cluster.speed], -1)  # state [..., N, 2]
        self._p = np.zeros((*shape, 2, 2))  # its covariance
        self._measured = np.zeros(shape, np.bool_)
        self._innovations = np.zeros(shape)  # how many there were
        self._last = np.zeros(shape)  # the last innovation, in standard deviations
        self.drift: Floats = np.full(shape, settings.drift)
        self.jitter: Floats = np.full(shape, settings.jitter)
        self.predicted: Floats = np.zeros(shape)
        self.innovation: Floats = np.zeros(shape)
        self.jumped = np.zeros(shape, np.bool_)

    @property
    def overhead(self) -> Floats:
        """[..., N] [s]."""
        return self._x[..., 0]

    @property
    def speed(self) -> Floats:
        """[..., N] [samples/s]."""
        return 1.0 / self._x[..., 1]

    def update(self, observation: Observation) -> None:
        """Take one iteration in; nodes whose time was not received keep their estimate."""
        settings = self._settings
        sizes = observation.sizes
        received = observation.received & (sizes > 0)
        seconds = np.where(received, observation.seconds, 1.0)
        expected = received & self._measured
        self._begin(received, seconds, sizes)
        x = self._x
        h = np.stack([np.ones(sizes.shape), np.maximum(sizes, 1)], -1)  # t = h x
        p = self._p + (self.drift**2)[..., None, None] * _square(x)
        predicted = (h * x).sum(-1)
        ph = (p * h[..., None, :]).sum(-1)
        deviation = np.sqrt(np.maximum((h * ph).sum(-1), 0.0) + (self.jitter * predicted) ** 2)
        error = seconds - predicted
        # Jumps are judged in logarithms: a node four times as fast is as far off as one four times as slow.
        log_error = np.log(seconds / predicted)
        surprise = np.abs(log_error) * predicted / deviation
        jumped = received & (surprise > settings.jump)
        follow = received & ~jumped
        gain = np.where(follow[..., None], ph / (deviation**2)[..., None], 0.0)
        scale = np.where(jumped, seconds / predicted, 1.0)
        self._x = (x + gain * error[..., None]) * scale[..., None]
        overhead = np.maximum(self._x[..., 0], 0.0)
        # Sizes answer to times, so for a node that slows while it gets fewer samples, samples seem to cost nothing.
        least = LEAST_SHARE / (1.0 - LEAST_SHARE) * overhead / h[..., 1]
        per_sample = np.where(received, np.maximum(self._x[..., 1], least), self._x[..., 1])
        self._x = np.stack([overhead, per_sample], -1)
        # The new level is known from one time only: as uncertain as its jitter, on top of the scaled shape.
        level = np.where(jumped, self.jitter**2, 0.0)[..., None, None]
        p = p - gain[..., :, None] * ph[..., None, :]
        p = (scale**2)[..., None, None] * p + level * _square(self._x)
        # Rounding makes the two halves differ, jumps multiply that, and variances would become negative.
        self._p = 0.5 * (p + p.swapaxes(-1, -2))
        white = np.where(follow, error / deviation, 0.0)
        self.drift = np.clip(self.drift * np.exp(settings.learning * np.clip(white * self._last, -2.0, 2.0)), *DRIFTS)
        self._last = np.where(received, white, self._last)
        self._learn_jitter(expected, surprise)
        self.jumped = jumped
        self.predicted = predicted
        self.innovation = np.where(received, log_error, 0.0)

    def _learn_jitter(self, expected: Flags, size: Floats) -> None:
        """Take in the sizes of innovations, in standard deviations, of nodes whose times were `expected`. None counts
        for more than three times the mean size, or a change of speed would be taken for jitter."""
        learning = self._settings.jitter_learning
        if learning:
            self._innovations = self._innovations + expected
            rate = np.where(expected, np.maximum(learning, 1.0 / (2.0 + self._innovations)), 0.0)
            off = np.minimum(size / MEAN_SIZE, 3.0) - 1.0
            self.jitter = np.clip(self.jitter * np.exp(rate * off), *JITTERS)

    def _begin(self, received: Flags, seconds: Floats, sizes: Sizes) -> None:
        """A node's first time sets its unit: a tenth of it is taken for overhead, with the doubt that deserves."""
        first = received & ~self._measured
        if first.any():
            overhead = np.where(first, 0.1 * seconds, self._x[..., 0])
            per_sample = np.where(first, 0.9 * seconds / np.maximum(sizes, 1), self._x[..., 1])
            # Nodes that were not measured yet are scaled to the unit of those that were.
            unit = np.where(first, per_sample / self._x[..., 1], 0.0).sum(-1, keepdims=True)
            unit = unit / np.maximum(first.sum(-1, keepdims=True), 1)
            apart = ~received & ~self._measured & (unit > 0)
            per_sample = np.where(apart, per_sample * unit, per_sample)
            self._x = np.stack([overhead, per_sample], -1)
            doubt = np.stack([np.ones(sizes.shape), -1.0 / np.maximum(sizes, 1)], -1) * (0.1 * seconds)[..., None]
            p = _square(doubt)
            p[..., 1, 1] += (self.jitter * per_sample) ** 2
            self._p = np.where(first[..., None, None], p, self._p)
            self._measured = self._measured | first


def _square(x: Floats) -> Floats:
    """x x' [..., 2, 2] of vectors [..., 2]."""
    return x[..., :, None] * x[..., None, :]

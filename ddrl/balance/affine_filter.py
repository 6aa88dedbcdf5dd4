"""A Kalman filter of each node's affine time t(b) = overhead + b / speed, with a jump test.

State x = (overhead, seconds a sample). A slowed node takes longer in both, so drift and jumps scale x as a whole:
process noise is q^2 x x', and an innovation beyond `jump` standard deviations multiplies x by t / predicted.
Measurement noise is log-normal jitter, (jitter predicted)^2. A filter that follows as fast as it should has white
innovations: each node's q rises while its successive innovations agree in sign, and falls while they alternate (after
Mehra 1970). Its jitter rises while innovations are larger than they should be, and falls while they are smaller: the
first ones, when little is known, move it most. Arrays [..., N]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddrl.balance.sizes import Cluster, Floats, Observation, Sizes
from ddrl.core.config import setting

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
        deviation = np.sqrt((h * ph).sum(-1) + (self.jitter * predicted) ** 2)
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
        self._p = (scale**2)[..., None, None] * p + level * _square(self._x)
        white = np.where(follow, error / deviation, 0.0)
        self.drift = np.clip(self.drift * np.exp(settings.learning * np.clip(white * self._last, -2.0, 2.0)), *DRIFTS)
        self._last = np.where(received, white, self._last)
        self._learn_jitter(expected, surprise)
        self.jumped = jumped
        self.predicted = predicted
        self.innovation = np.where(received, log_error, 0.0)

    def _learn_jitter(self, expected: NDArray[np.bool_], size: Floats) -> None:
        """Take in the sizes of innovations, in standard deviations, of nodes whose times were `expected`. None counts
        for more than three times the mean size, or a change of speed would be taken for jitter."""
        learning = self._settings.jitter_learning
        if learning:
            self._innovations = self._innovations + expected
            rate = np.where(expected, np.maximum(learning, 1.0 / (2.0 + self._innovations)), 0.0)
            off = np.minimum(size / MEAN_SIZE, 3.0) - 1.0
            self.jitter = np.clip(self.jitter * np.exp(rate * off), *JITTERS)

    def _begin(self, received: NDArray[np.bool_], seconds: Floats, sizes: Sizes) -> None:
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

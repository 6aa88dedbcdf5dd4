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

from ddrl.balance.sizes import Cluster, Floats, Observation
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
    `innovation` log(t / predicted) (0 where nothing was received), `jumped` bool."""

    def __init__(self, cluster: Cluster, settings: FilterSettings) -> None:
        self._settings = settings
        self._a = np.zeros(cluster.speed.shape)  # overhead
        self._w = 1.0 / cluster.speed  # seconds a sample
        self._measured = np.zeros(cluster.speed.shape, np.bool_)
        self._paa: Floats = np.zeros(cluster.speed.shape)  # covariance of overhead and seconds a sample
        self._paw: Floats = self._paa
        self._pww: Floats = self._paa
        self._drift = np.full(cluster.speed.shape, settings.drift)
        self._jitter = np.full(cluster.speed.shape, settings.jitter)
        self._innovations = np.zeros(cluster.speed.shape)  # how many there were
        self._last = np.zeros(cluster.speed.shape)  # the last innovation, in standard deviations
        self.predicted = self.innovation = np.zeros(cluster.speed.shape)
        self.jumped = np.zeros(cluster.speed.shape, np.bool_)

    @property
    def overhead(self) -> Floats:
        """[..., N] [s]."""
        return self._a

    @property
    def speed(self) -> Floats:
        """[..., N] [samples/s]."""
        return 1.0 / self._w

    @property
    def drift(self) -> Floats:
        """Relative change of each node's speed in one iteration [..., N], as learned."""
        return self._drift

    @property
    def jitter(self) -> Floats:
        """Relative standard deviation of each node's times [..., N], as learned."""
        return self._jitter

    def update(self, observation: Observation) -> None:
        """Take one iteration in; nodes whose time was not received keep their estimate."""
        settings = self._settings
        b = observation.sizes
        received = observation.received & (b > 0)
        seconds = np.where(received, observation.seconds, 1.0)
        expected = received & self._measured
        self._begin(received, seconds, b)
        a = self._a
        w = self._w
        b = np.maximum(b, 1).astype(np.float64)
        predicted = a + b * w
        q = self._drift**2
        paa = self._paa + q * a * a
        paw = self._paw + q * a * w
        pww = self._pww + q * w * w
        noise = (self._jitter * predicted) ** 2
        spread = paa + 2 * b * paw + b * b * pww + noise
        error = seconds - predicted
        # Jumps are judged in logarithms: a node four times as fast is as far off as one four times as slow.
        log_error = np.log(seconds / predicted)
        jumped = received & (np.abs(log_error) * predicted > settings.jump * np.sqrt(spread))
        gain_a = (paa + b * paw) / spread
        gain_w = (paw + b * pww) / spread
        follow = received & ~jumped
        scale = np.where(jumped, seconds / predicted, 1.0)
        new_a = np.where(follow, np.maximum(a + gain_a * error, 0.0), a * scale)
        new_w = np.where(follow, w + gain_w * error, w * scale)
        # Sizes answer to times, so a node that slows while it gets fewer samples looks as if samples cost nothing.
        least = LEAST_SHARE / (1.0 - LEAST_SHARE) * new_a / b
        new_w = np.where(received, np.maximum(new_w, least), new_w)
        shrink = np.where(follow, 1.0, 0.0)
        paa, paw, pww = (
            paa - shrink * gain_a * (paa + b * paw),
            paw - shrink * gain_a * (paw + b * pww),
            pww - shrink * gain_w * (paw + b * pww),
        )
        # The new level is known from one time only: as uncertain as its jitter, on top of the scaled shape.
        level = np.where(jumped, self._jitter**2, 0.0)
        square = scale * scale
        self._paa = square * paa + level * new_a * new_a
        self._paw = square * paw + level * new_a * new_w
        self._pww = square * pww + level * new_w * new_w
        white = np.where(follow, error / np.sqrt(spread), 0.0)
        self._drift = np.clip(self._drift * np.exp(settings.learning * np.clip(white * self._last, -2.0, 2.0)), *DRIFTS)
        self._last = np.where(received, white, self._last)
        self._learn_jitter(expected, np.abs(log_error) * predicted / np.sqrt(spread))
        self._a = new_a
        self._w = new_w
        self.jumped = jumped
        self.predicted = predicted
        self.innovation = np.where(received, log_error, 0.0)

    def _learn_jitter(self, expected: np.ndarray, size: Floats) -> None:
        """Take in the sizes of innovations, in standard deviations, of nodes whose times were `expected`. None counts
        for more than three times the mean size, or a change of speed would be taken for jitter."""
        learning = self._settings.jitter_learning
        if learning:
            self._innovations = self._innovations + expected
            rate = np.where(expected, np.maximum(learning, 1.0 / (2.0 + self._innovations)), 0.0)
            off = np.minimum(size / MEAN_SIZE, 3.0) - 1.0
            self._jitter = np.clip(self._jitter * np.exp(rate * off), *JITTERS)

    def _begin(self, received: np.ndarray, seconds: Floats, b: np.ndarray) -> None:
        """A node's first time sets its unit: a tenth of it is taken for overhead, with the doubt that deserves."""
        first = received & ~self._measured
        if first.any():
            known = np.where(first, seconds, 0.0)
            size = np.where(first, b, 1)
            unit = np.where(first, 0.9 * known / size / self._w, 0.0).sum(-1, keepdims=True)
            unit = unit / np.maximum(first.sum(-1, keepdims=True), 1)
            apart = ~received & ~self._measured & (unit > 0)
            self._w = np.where(first, 0.9 * known / size, np.where(apart, self._w * unit, self._w))
            self._a = np.where(first, 0.1 * known, self._a)
            self._paa = np.where(first, (0.1 * known) ** 2, self._paa)
            self._paw = np.where(first, -((0.1 * known) ** 2) / size, self._paw)
            self._pww = np.where(first, (0.1 * known / size) ** 2 + (self._jitter * self._w) ** 2, self._pww)
            self._measured = self._measured | first

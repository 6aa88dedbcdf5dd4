"""A proportional controller on the time error of each node (OmniLearn: Tyagi and Sharma, 2025).

Node i computes b_i / t_i samples/s, so T_mean - t_i seconds of error are worth gain b_i (T_mean - t_i) / t_i samples.
A dead band keeps sizes where they are while all times lie close together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.sizer import AwaitsAll
from ddrl.balance.sizes import Sizes, fractions_at, proportional_sizes, water_level
from ddrl.core.config import setting


@dataclass(frozen=True)
class ControllerSettings:
    """The controller's constants."""

    gain: float = setting(0.5, "", "Share of the measured time error that one iteration corrects.", gt=0, le=1)
    dead_band: float = setting(0.05, "", "Relative time error below which a node's size stays.", ge=0, le=1)


class Controller(AwaitsAll):
    """Moves each size against its node's time error."""

    name: ClassVar[str] = "controller"
    Settings = ControllerSettings

    def __init__(self, cluster: Cluster, settings: ControllerSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._share = cluster.speed.copy()  # real-valued sizes, up to a factor

    def propose(self, observation: Observation) -> Sizes:
        """The corrected sizes."""
        received = observation.received & (observation.sizes > 0)
        cluster = self._cluster
        if received.any():
            seconds = np.where(received, observation.seconds, 1.0)
            count = np.maximum(received.sum(-1, keepdims=True), 1)
            mean = np.where(received, seconds, 0.0).sum(-1, keepdims=True) / count
            error = np.where(received, (mean - seconds) / seconds, 0.0)
            error = np.where(np.abs(error) > self._settings.dead_band, error, 0.0)
            self._share = self._share * (1 + self._settings.gain * error)  # error > -1: a share stays positive
        none = np.zeros_like(self._share)
        level = water_level(cluster.total, none, self._share, cluster.min_size, cluster.max_size)
        # What memory caps is kept as capped: a share that grew beyond its cap would not come back when it should.
        self._share = fractions_at(level, none, self._share, cluster.min_size, cluster.max_size)
        return proportional_sizes(cluster.total, self._share, cluster.min_size, cluster.max_size)

"""In proportion to an exponential average of each node's throughput b_i / t_i (LB-BSP: Chen et al., SoCC 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.sizer import AwaitsAll
from ddrl.balance.sizes import Sizes, proportional_sizes
from ddrl.core.config import setting


@dataclass(frozen=True)
class EmaSettings:
    """How fast it follows."""

    rate: float = setting(0.2, "", "Share of the newest throughput in the average.", gt=0, le=1)


class Ema(AwaitsAll):
    """The first time received replaces the speed of model information, later ones are averaged."""

    name: ClassVar[str] = "ema"
    Settings = EmaSettings

    def __init__(self, cluster: Cluster, settings: EmaSettings) -> None:
        self._cluster = cluster
        self._rate = settings.rate
        self._speed = cluster.speed.copy()
        self._measured = np.zeros(cluster.speed.shape, np.bool_)

    def propose(self, observation: Observation) -> Sizes:
        """Proportional to the average."""
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

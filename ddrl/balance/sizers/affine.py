"""Affine times by a filter with a jump test, and the exact integer optimum under them (Cannikin: Nie et al. 2024,
arXiv 2402.05302, whose least-squares fit is a Kalman filter here)."""

from __future__ import annotations

from typing import ClassVar

from ddrl.balance.affine_filter import AffineFilter, FilterSettings
from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.sizer import AwaitsAll
from ddrl.balance.sizes import Sizes, balanced_sizes


class Affine(AwaitsAll):
    """Filter, then water-filling."""

    name: ClassVar[str] = "affine"
    Settings = FilterSettings

    def __init__(self, cluster: Cluster, settings: FilterSettings) -> None:
        self._cluster = cluster
        self._filter = AffineFilter(cluster, settings)

    def propose(self, observation: Observation) -> Sizes:
        """The sizes whose predicted times are equal."""
        self._filter.update(observation)
        cluster = self._cluster
        return balanced_sizes(
            cluster.total, self._filter.overhead, self._filter.speed, cluster.min_size, cluster.max_size
        )

"""In proportion to the speeds that model information gives, once and for all: b_i = B c_i p_i / sum c p."""

from __future__ import annotations

from typing import ClassVar

from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.sizer import AwaitsAll
from ddrl.balance.sizes import Sizes, proportional_sizes


class Static(AwaitsAll):
    """Proportional to the speeds given before the first iteration."""

    name: ClassVar[str] = "static"

    def __init__(self, cluster: Cluster, settings: None) -> None:
        self._sizes = proportional_sizes(cluster.total, cluster.speed, cluster.min_size, cluster.max_size)

    def propose(self, observation: Observation) -> Sizes:
        """Always the same."""
        return self._sizes

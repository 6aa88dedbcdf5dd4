"""The same size for every node, as far as memory allows: what DistributedDataParallel does."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.sizer import AwaitsAll
from ddrl.balance.sizes import Sizes, proportional_sizes


class Equal(AwaitsAll):
    """B / N samples each."""

    name: ClassVar[str] = "equal"

    def __init__(self, cluster: Cluster, settings: None) -> None:
        ones = np.ones_like(cluster.speed)
        self._sizes = proportional_sizes(cluster.total, ones, cluster.min_size, cluster.max_size)

    def propose(self, observation: Observation) -> Sizes:
        """Always the same."""
        return self._sizes

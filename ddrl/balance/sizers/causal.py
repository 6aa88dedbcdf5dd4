"""The causal oracle: the optimum under the true speeds of the iteration that just ended. The measure of all sizers:
nothing that reacts can be earlier."""

from __future__ import annotations

from typing import ClassVar

from ddrl.balance.cluster import Cluster, Observation, Truth
from ddrl.balance.sizer import AwaitsAll
from ddrl.balance.sizes import Sizes, balanced_sizes
from ddrl.core.errors import ConfigError


class Causal(AwaitsAll):
    """Knows the previous iteration's true speeds; only a simulator can tell it."""

    name: ClassVar[str] = "causal"

    def __init__(self, cluster: Cluster, settings: None) -> None:
        self._cluster = cluster

    def truth(self, observation: Observation) -> Truth | None:
        """What this oracle knows of an observation."""
        return observation.before

    def propose(self, observation: Observation) -> Sizes:
        """The optimum; ConfigError outside a simulator."""
        truth = self.truth(observation)
        cluster = self._cluster
        if truth is None:
            raise ConfigError(f"balance.sizer = {self.name}: true speeds are known in a simulator only; choose affine")
        return balanced_sizes(cluster.total, truth.overhead, truth.speed, cluster.min_size, cluster.max_size)

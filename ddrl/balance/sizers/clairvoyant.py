"""The clairvoyant oracle: the optimum under the true speeds of the iteration to come, its jitter excepted."""

from __future__ import annotations

from typing import ClassVar

from ddrl.balance.cluster import Observation, Truth
from ddrl.balance.sizers.causal import Causal


class Clairvoyant(Causal):
    """Knows the next iteration's true speeds."""

    name: ClassVar[str] = "clairvoyant"

    def truth(self, observation: Observation) -> Truth | None:
        """Of the iteration to come."""
        return observation.now

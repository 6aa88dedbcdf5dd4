"""Adaptive pacing: duals that follow the rate which the REMAINING demand needs. A baseline, and a prior of policies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddrl.envs.admix.contracts import Contracts
from ddrl.envs.admix.delivery import estimate_rate

Floats = NDArray[np.float64]
UNKNOWN = -1.0  # what was due at the last decision, where there was none


class Pacing:
    """alpha_j += step p_j (needed - delivered since the last decision) / d_j, in [0, p_j], for n days.

    Needed is what the remaining demand asks of the part of the play curve that has passed:
    (d_j - delivered) (curve step) / (curve left)."""

    def __init__(self, contracts: Contracts, step: float, count: int) -> None:
        self._demand = np.maximum(contracts.demand, 1)
        self._penalty = contracts.penalty
        self._step = step
        self._past_rate = contracts.billed_rate
        # [3, n, C]: alpha [currency]; what was due and delivered at the last decision, as shares of the demand
        self.state = np.zeros((3, count, contracts.count))

    def begin(self, day: int, alpha: Floats, *, midway: bool = False) -> None:
        """A new day in place `day`, from duals [C]; one that begins midway keeps them for its first decision."""
        self.state[:, day] = np.stack([alpha, np.full_like(alpha, UNKNOWN if midway else 0.0), np.zeros_like(alpha)])

    def decide(self, due: Floats, estimate: Floats, seen_billed: Floats, seen_shown: Floats) -> Floats:
        """One step. Given [n, C] impressions due, billed as estimated, and those of known billing: the worth [currency]
        of one more impression of each contract [n, C], the billed rate as estimated times alpha."""
        alpha, past_due, past_delivered = self.state
        due = due / self._demand
        delivered = estimate / self._demand
        past_due = np.where(past_due == UNKNOWN, due, past_due)
        needed = (1 - past_delivered) * (due - past_due) / np.maximum(1 - past_due, 1e-3)
        change = self._step * self._penalty * (needed - (delivered - past_delivered))
        self.state = np.stack([np.clip(alpha + change, 0, self._penalty), due, delivered])
        return estimate_rate(seen_billed, seen_shown, self._past_rate) * self.state[0]

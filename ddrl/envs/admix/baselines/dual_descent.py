"""Dual descent, warm-started: alpha steps along the subgradient of the dual, due less delivered.

Balseiro, Lu and Mirrokni (2020), "Dual mirror descent for online allocation problems", with the Euclidean distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.core.fields import setting
from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class DualDescent:
    """alpha_j += step p_j (what came due - what was delivered since the last block) / d_j, in [0, p_j]."""

    name: ClassVar[str] = "dual_descent"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"step": (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)}

    @dataclass(frozen=True)
    class Settings:
        """The step."""

        step: float = setting(0.5, "1", "Change of alpha / p for a whole demand of difference.", ge=0)

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        contracts = outlook.contracts
        self._step = settings.step
        self._demand = np.maximum(contracts.demand, 1)
        self._penalty = contracts.penalty
        self._alpha = outlook.yesterday_alpha.copy()
        self._missing = np.zeros_like(self._alpha)

    def decide(self, feedback: Feedback) -> Decision:
        """One step of the descent."""
        missing = feedback.due - feedback.estimate / self._demand
        change = self._step * self._penalty * (missing - self._missing)
        self._alpha = np.clip(self._alpha + change, 0, self._penalty)
        self._missing = missing
        return Decision(feedback.rate * self._alpha)

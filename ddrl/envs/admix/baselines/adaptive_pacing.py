"""Adaptive pacing: alpha follows the rate that the REMAINING demand needs, warm-started from yesterday's duals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.core.fields import setting
from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class AdaptivePacing:
    """alpha_j += step p_j (needed - delivered since the last block) / d_j, in [0, p_j].

    Needed is what the remaining demand asks of the part of the play curve that has passed:
    (d_j - delivered) (curve step) / (curve left)."""

    name: ClassVar[str] = "adaptive_pacing"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"step": (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)}

    @dataclass(frozen=True)
    class Settings:
        """The step."""

        step: float = setting(0.5, "1", "Change of alpha / p for a whole demand of difference.", ge=0)

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        contracts = outlook.contracts
        self._step, self._demand, self._penalty = settings.step, np.maximum(contracts.demand, 1), contracts.penalty
        self._alpha = outlook.yesterday_alpha.copy()
        self._due = np.zeros_like(self._alpha)
        self._delivered = np.zeros_like(self._alpha)

    def decide(self, feedback: Feedback) -> Decision:
        """One step towards the remaining rate."""
        delivered = feedback.estimate / self._demand
        needed = (1 - self._delivered) * (feedback.due - self._due) / np.maximum(1 - self._due, 1e-3)
        change = self._step * self._penalty * (needed - (delivered - self._delivered))
        self._alpha = np.clip(self._alpha + change, 0, self._penalty)
        self._due, self._delivered = feedback.due, delivered
        return Decision(feedback.rate * self._alpha)

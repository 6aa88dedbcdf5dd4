"""Adaptive pacing: alpha follows the rate that the REMAINING demand needs, warm-started from yesterday's duals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddrl.core.fields import setting
from ddrl.envs.admix.pacing import Pacing
from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class AdaptivePacing:
    """See `Pacing`."""

    name: ClassVar[str] = "adaptive_pacing"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"step": (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)}

    @dataclass(frozen=True)
    class Settings:
        """The step."""

        step: float = setting(0.5, "1", "Change of alpha / p for a whole demand of difference.", ge=0)

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        self._demand = outlook.contracts.demand
        self._pacing = Pacing(outlook.contracts, settings.step, len(outlook.yesterday_alpha))
        for day, alpha in enumerate(outlook.yesterday_alpha):
            self._pacing.begin(day, alpha)

    def decide(self, feedback: Feedback) -> Decision:
        """One step towards the remaining rate."""
        due = feedback.due * self._demand
        return Decision(self._pacing.decide(due, feedback.estimate, feedback.seen_billed, feedback.seen_shown))

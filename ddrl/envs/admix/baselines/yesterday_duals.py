"""Yesterday's duals: the optimum of the last log, served unchanged today."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class YesterdayDuals:
    """alpha of yesterday's linear program, all day; the billed rate is today's estimate."""

    name: ClassVar[str] = "yesterday_duals"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {}

    @dataclass(frozen=True)
    class Settings:
        """Nothing to set."""

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        self._alpha = outlook.yesterday_alpha

    def decide(self, feedback: Feedback) -> Decision:
        """r_j alpha_j."""
        return Decision(feedback.rate * self._alpha)

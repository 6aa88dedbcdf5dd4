"""The duals of the day itself, fixed: an oracle, and the most that any fixed alpha can reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddrl.core.errors import EnvError
from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class Hindsight:
    """Loses to the optimum only by ties, and by billing that turned out other than its rate."""

    name: ClassVar[str] = "hindsight"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {}
    knows_the_day: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Nothing to set."""

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        if outlook.hindsight_alpha is None:
            raise EnvError("hindsight: needs the duals of the day itself (Outlook.hindsight_alpha)")
        self._alpha = outlook.hindsight_alpha

    def decide(self, feedback: Feedback) -> Decision:
        """r_j alpha_j."""
        return Decision(feedback.rate * self._alpha)

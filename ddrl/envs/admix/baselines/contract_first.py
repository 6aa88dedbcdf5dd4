"""Contract first: while a contract of the queue still needs impressions, the one furthest behind is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.envs.admix.replay import Decision, Feedback, Outlook

ABOVE_ALL_BIDS = 1e3  # currency for one impression


class ContractFirst:
    """Bids get what contracts leave."""

    name: ClassVar[str] = "contract_first"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {}

    @dataclass(frozen=True)
    class Settings:
        """Nothing to set."""

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        self._demand = outlook.contracts.demand

    def decide(self, feedback: Feedback) -> Decision:
        """The larger the share of the demand that is missing by now, the higher the score."""
        delivered = feedback.estimate / np.maximum(self._demand, 1)
        bonus = ABOVE_ALL_BIDS * (2 + np.clip(feedback.due - delivered, -1, 1))
        return Decision(np.where(delivered < 1, bonus, -np.inf))

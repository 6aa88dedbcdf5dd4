"""Bids alone: no contract is ever shown. The zero of the normalised scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class BidOnly:
    """Every contract misses its whole demand."""

    name: ClassVar[str] = "bid_only"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {}

    @dataclass(frozen=True)
    class Settings:
        """Nothing to set."""

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        self._bonus = np.full(outlook.yesterday_alpha.shape, -np.inf)

    def decide(self, feedback: Feedback) -> Decision:
        """No contract."""
        return Decision(self._bonus)

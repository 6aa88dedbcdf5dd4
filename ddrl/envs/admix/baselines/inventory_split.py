"""Inventory split in advance: contract j takes each request of its supply with probability theta_j, before any bid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.core.fields import setting
from ddrl.envs.admix.baselines.contract_first import ABOVE_ALL_BIDS
from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class InventorySplit:
    """theta_j = d_j / S_j of the forecast's supply-demand graph, or its shares in the order of scarcity."""

    name: ClassVar[str] = "inventory_split"
    grid: ClassVar[dict[str, tuple[str, ...]]] = {"theta": ("split", "water")}

    @dataclass(frozen=True)
    class Settings:
        """How the graph is read."""

        theta: str = setting("split", "", "split: d_j / S_j; water: by scarcity.", choices=("split", "water"))

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        self._demand = outlook.contracts.demand
        self._theta = np.stack([getattr(inventory, settings.theta)() for inventory in outlook.inventories])

    def decide(self, feedback: Feedback) -> Decision:
        """Contracts that need impressions stand above all bids when they may play."""
        return Decision(np.where(feedback.estimate < self._demand, ABOVE_ALL_BIDS, -np.inf), self._theta)

"""P = rank^-alpha / sum rank^-alpha (Schaul et al. 2016, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddrl.core.config import setting
from ddrl.replay.selectors import Common, KernelSelector


@dataclass(frozen=True)
class Settings:
    """The table [replay.rank_based]."""

    stratified: bool = setting(False, "", "Cut the mass into one part a draw: less spread between batches.")


class RankBased(KernelSelector):
    """P = rank^-alpha / sum rank^-alpha (Schaul et al. 2016, section 3.3)."""

    name = "rank_based"
    kind = "rank_based"
    uses_priorities = True
    Settings: ClassVar[type] = Settings

    def kernel_options(self, settings: Settings, common: Common) -> dict[str, float]:
        """The options of the kernel's selector."""
        return {
            "priority_exponent": common.priority_exponent,
            "importance_exponent": common.importance_exponent,
            "stratified": settings.stratified,
        }

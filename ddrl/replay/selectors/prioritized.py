"""P = p^alpha / sum p^alpha (Schaul et al. 2016, eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddrl.core.config import setting
from ddrl.replay.selectors import Common, KernelSelector


@dataclass(frozen=True)
class Settings:
    """The table [replay.prioritized]."""

    stratified: bool = setting(False, "", "Cut the mass into one part a draw: less spread between batches.")


class Prioritized(KernelSelector):
    """P = p^alpha / sum p^alpha (Schaul et al. 2016, eq. 1)."""

    name = "prioritized"
    kind = "prioritized"
    uses_priorities = True
    Settings: ClassVar[type] = Settings

    def kernel_options(self, settings: Settings, common: Common) -> dict[str, float]:
        """The options of the kernel's selector."""
        return {
            "priority_exponent": common.priority_exponent,
            "importance_exponent": common.importance_exponent,
            "stratified": settings.stratified,
        }

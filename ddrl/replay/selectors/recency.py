"""P halves with every half_life picks made later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddrl.core.config import setting
from ddrl.replay.selectors import Common, KernelSelector


@dataclass(frozen=True)
class Settings:
    """The table [replay.recency]."""

    half_life: float = setting(10_000.0, "picks", "Picks made later that halve the probability of one.", gt=0)
    stratified: bool = setting(False, "", "Cut the mass into one part a draw: less spread between batches.")


class Recency(KernelSelector):
    """P halves with every half_life picks made later."""

    name = "recency"
    uses_priorities = False
    Settings: ClassVar[type] = Settings

    def kernel_options(self, settings: Settings, common: Common) -> dict[str, float]:
        """The options of the kernel's selector."""
        return {
            "half_life": settings.half_life,
            "importance_exponent": common.importance_exponent,
            "stratified": settings.stratified,
        }

"""Every pick alike."""

from __future__ import annotations

from ddrl.replay.selectors import Common, KernelSelector


class Uniform(KernelSelector):
    """Every pick alike."""

    name = "uniform"
    uses_priorities = False

    def kernel_options(self, settings: None, common: Common) -> dict[str, float]:
        """The options of the kernel's selector."""
        return {}

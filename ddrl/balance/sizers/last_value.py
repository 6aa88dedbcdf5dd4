"""In proportion to the newest throughput b_i / t_i alone: quickest to follow, and as noisy as one iteration."""

from __future__ import annotations

from typing import ClassVar

from ddrl.balance.cluster import Cluster
from ddrl.balance.sizers.ema import Ema, EmaSettings


class LastValue(Ema):
    """An average that forgets at once."""

    name: ClassVar[str] = "last_value"
    Settings = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, cluster: Cluster, settings: None) -> None:
        super().__init__(cluster, EmaSettings(rate=1.0))

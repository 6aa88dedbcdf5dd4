"""What the best fixed rule for starting collectors would have cost, chosen knowing all rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddrl.pool.prewarm import PrewarmSettings, Round


def hindsight_cost(rounds: Sequence[Round], settings: PrewarmSettings) -> float:
    """Cost a collector of the best fixed rule: so long after the data, after parameters one to four rounds before, or
    staying alive."""

    def least(latest: NDArray[np.float64]) -> float:
        start = max(0.0, float(np.quantile(latest, settings.level, method="inverted_cdf")))
        costs = settings.idle_cost * np.maximum(0, latest - start) + settings.delay_cost * np.maximum(0, start - latest)
        return float(np.mean(costs))

    end, sent, begin, startup = (
        np.array([getattr(round, name)[0] for round in rounds]) for name in ("end", "sent", "begin", "startup")
    )
    by_begin = [least(end[k:] - begin[: len(begin) - k] - startup[k:]) for k in range(4)]
    return min(least(end - sent - startup), settings.idle_cost * float(np.mean(end - sent)), *by_begin)

"""What the best fixed rule for starting collectors would have cost, chosen knowing all rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddrl.pool.prewarm import PrewarmSettings, Round

Times = NDArray[np.float64]


def hindsight_cost(tasks: Sequence[Sequence[Round]], settings: PrewarmSettings, first: int = 0) -> float:
    """Cost a collector of the best fixed rule for tasks of one kind, over their rounds from `first` on: so long after
    the data, after parameters one to four rounds before, or staying alive. Over many rounds it is the optimum under
    their true distribution."""

    def least(latest: Times) -> float:
        start = max(0.0, float(np.quantile(latest, settings.level, method="inverted_cdf")))
        costs = settings.idle_cost * np.maximum(0, latest - start) + settings.delay_cost * np.maximum(0, start - latest)
        return float(np.mean(costs))

    by_task = [
        [np.array([getattr(round, name)[0] for round in rounds]) for name in ("end", "sent", "begin", "startup")]
        for rounds in tasks
    ]
    for _, _, _, startup in by_task:  # one that stayed would have started as the one before
        newest = np.maximum.accumulate(np.where(np.isnan(startup), 0, np.arange(len(startup))))
        startup[:] = startup[newest]
    waits = np.concatenate([(end - sent)[first:] for end, sent, _, _ in by_task])
    starts = np.concatenate([startup[first:] for _, _, _, startup in by_task])
    by_begin = (
        np.concatenate(
            [(end[k:] - begin[: len(begin) - k] - startup[k:])[first:] for end, _, begin, startup in by_task]
        )
        for k in range(4)
    )
    return min(least(waits - starts), settings.idle_cost * float(np.mean(waits)), *map(least, by_begin))

"""What the best fixed rule for starting collectors would have done, chosen knowing all rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddrl.pool.prewarm import PrewarmSettings, Round

Times = NDArray[np.float64]
IN_TIME = 0.95  # share of collectors


@dataclass(frozen=True)
class Hindsight:
    """cost: a collector's, of the rule that costs least; idle: its seconds a collector; least_idle: those of the rule
    that is least idle among all with 95 % of the collectors in time."""

    cost: float
    idle: float
    least_idle: float


def hindsight(tasks: Sequence[Sequence[Round]], settings: PrewarmSettings, first: int = 0) -> Hindsight:
    """Of fixed rules for tasks of one kind, over their rounds from `first` on: so long after data or parameters one to
    four rounds before, or staying alive. Over many rounds it is the optimum under their true distribution."""
    by_task = [
        [np.array([getattr(round, name)[0] for round in rounds]) for name in ("end", "sent", "begin", "startup")]
        for rounds in tasks
    ]
    for _, _, _, startup in by_task:  # one that stayed would have started as the one before
        newest = np.maximum.accumulate(np.where(np.isnan(startup), 0, np.arange(len(startup))))
        startup[:] = startup[newest]

    def latest(anchor: int, back: int) -> Times:
        return np.concatenate(
            [(own[0][back:] - own[anchor][: len(own[anchor]) - back] - own[3][back:])[first:] for own in by_task]
        )

    counted = [latest(anchor, back) for back in range(4) for anchor in (1, 2)]
    alive = float(np.mean(np.concatenate([(end - sent)[first:] for end, sent, _, _ in by_task])))
    rules = [(settings.idle_cost * alive, alive), *(_started(times, settings.level, settings) for times in counted)]
    cost, idle = min(rules)
    return Hindsight(cost, idle, min(alive, *(_started(times, 1 - IN_TIME, settings)[1] for times in counted)))


def _started(latest: Times, level: float, settings: PrewarmSettings) -> tuple[float, float]:
    """Cost and idle seconds a collector of starts at a quantile of the latest ones in time; never before their
    anchor."""
    start = float(np.quantile(latest, level, method="inverted_cdf"))
    if start < 0:
        return float("inf"), float("inf")
    idle, late = (float(np.mean(np.maximum(0, sign * (latest - start)))) for sign in (1, -1))
    return settings.idle_cost * idle + settings.delay_cost * late, idle

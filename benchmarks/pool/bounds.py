"""What pools that were run are compared with: the busy share of exponential rounds in theory, the best fixed rule for
starting collectors, chosen knowing all rounds, and the simulator on the rounds that were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.pool.prewarm import DELAY_COST, Round, cost_level
from ddrl.pool.records import PoolSetup, read_pool
from ddrl.pool.simulator import recorded_traces, simulate


def repairman_share(tasks: int, devices: int, duty: float) -> float:
    """Busy share of `devices` devices with exponential rounds: the machine-repairman model M/M/c//N.

    duty: device seconds per round over a round without waits. With thinking rate 1 and service rate mu = (1 - duty) /
    duty the number of tasks at the devices is a birth-death chain (Feller, 1950)."""
    service = (1 - duty) / duty
    weights = [1.0]
    for at_devices in range(1, tasks + 1):
        weights.append(weights[-1] * (tasks - at_devices + 1) / (service * min(at_devices, devices)))
    busy = sum(min(number, devices) * weight for number, weight in enumerate(weights))
    return busy / (sum(weights) * devices)


IN_TIME = 0.95  # share of collectors


@dataclass(frozen=True)
class Hindsight:
    """cost: a collector's, of the rule that costs least; idle: its seconds a collector; least_idle: those of the rule
    that is least idle among all with 95 % of the collectors in time."""

    cost: float
    idle: float
    least_idle: float


def hindsight(tasks: Sequence[Sequence[Round]], first: int = 0) -> Hindsight:
    """Of fixed rules for tasks of one kind, over their rounds from `first` on: so long after data or parameters one to
    four rounds before, or staying alive. Over many rounds it is the optimum under their true distribution."""
    by_task = [
        [np.array([getattr(round, name)[0] for round in rounds]) for name in ("end", "sent", "begin", "startup")]
        for rounds in tasks
    ]
    for _, _, _, startup in by_task:  # one that stayed would have started as the one before
        newest = np.maximum.accumulate(np.where(np.isnan(startup), 0, np.arange(len(startup))))
        startup[:] = startup[newest]

    def latest(anchor: int, back: int) -> NDArray[np.float64]:
        return np.concatenate(
            [(own[0][back:] - own[anchor][: len(own[anchor]) - back] - own[3][back:])[first:] for own in by_task]
        )

    all_times = [latest(anchor, back) for back in range(4) for anchor in (1, 2)]
    counted = [times for times in all_times if len(times)]  # few rounds have no anchor so far back
    alive = float(np.mean(np.concatenate([(end - sent)[first:] for end, sent, _, _ in by_task])))
    rules = [(alive, alive), *(_started(times, cost_level(DELAY_COST)) for times in counted)]
    cost, idle = min(rules)
    return Hindsight(cost, idle, min(alive, *(_started(times, 1 - IN_TIME)[1] for times in counted)))


def _started(latest: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Cost and idle seconds a collector of starts at a quantile of the latest ones in time; never before their
    anchor."""
    start = float(np.quantile(latest, level, method="inverted_cdf"))
    if start < 0:
        return float("inf"), float("inf")
    idle, late = (float(np.mean(np.maximum(0, sign * (latest - start)))) for sign in (1, -1))
    return idle + DELAY_COST * late, idle


def replay(folder: Path) -> list[dict[str, Any]]:
    """A row for each ended pool below `folder`: its makespan, and the simulator's for the rounds that its leases
    recorded. Both count to the last lease's end, for closing the pool's processes is not simulated."""
    rows: list[dict[str, Any]] = []
    for path in sorted(found.parents[1] for found in folder.rglob("pool/plan.json")):
        record = read_pool(path)
        if not record.summary or not record.leases:
            continue
        outcome = simulate(recorded_traces(record), len(record.devices), PoolSetup.read(path).make_policy(), "alive")
        measured = max(lease.released for lease in record.leases)
        rows.append(
            {
                "pool": str(path.relative_to(folder)),
                "tasks": len(record.tasks),
                "devices": ",".join(record.devices),
                "rounds": len(record.leases),
                "measured": measured,
                "simulated": outcome.makespan,
                "error": outcome.makespan / measured - 1,
                "waited": sum(lease.granted - lease.asked for lease in record.leases),
                "waited_simulated": sum(outcome.waits),
            }
        )
    return rows

"""Figures of the simulator on drawn traces: nothing of it was measured on a device.

The queue and the pre-warming are the pool's own code, time is simulated. Rounds of 5 s, device work 20 % of each, 2
devices, unless said.

Busy: device seconds that compute over wall, between 10 % and 95 % of the first task's end. Its bound is min(1, sum of
duty cycles / devices), with exponential rounds the machine-repairman value. Makespan: over a certified lower bound.
Pre-warming: cost is idle seconds + 49 x late seconds, beside the best fixed start for the rounds of all 8 tasks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core import plugins
from ddrl.pool.policies import Fair, Policy, Slices, SlicesSettings
from ddrl.pool.prewarm import DELAY_COST, Round, cost_level
from ddrl.pool.records import PoolSetup, jain_index, read_pool
from ddrl.pool.simulator import Outcome, Start, TaskTrace, generate, lower_bound, recorded_traces, share_bound, simulate

PACKAGE = "ddrl.pool.policies"
DEVICES = 2
ROUND_SECONDS = 5.0
DUTY = 0.2


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


def make_policy(name: str) -> Policy:
    """A fresh policy; slices as long as a round's device work, and a tenth more for its variation."""
    if name == "slices":
        return Slices(SlicesSettings(seconds=1.1 * DUTY * ROUND_SECONDS))
    return plugins.load("pool.policy", PACKAGE, name)()


def equal_tasks(tasks: int, rounds: int, seed: int, **more: Any) -> list[TaskTrace]:
    """Tasks of one kind."""
    generator = np.random.default_rng(seed)
    return [generate(f"t{k}", rounds, generator, round_seconds=ROUND_SECONDS, duty=DUTY, **more) for k in range(tasks)]


def steady_share(outcome: Outcome) -> float:
    """Busy / wall while every task runs."""
    end = min(outcome.finished.values())
    return outcome.steady_share(0.1 * end, 0.95 * end)


def busy(seeds: int, rounds: int) -> list[dict[str, Any]]:
    """Busy / wall of each policy beside its bound, and Jain's index over the tasks' device seconds in equal time."""
    rows: list[dict[str, Any]] = []
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("cv 0", {}),
        ("cv 0.05", {"variation": 0.05}),
        ("cv 0.1", {"variation": 0.1}),
        ("exponential", {"exponential": True}),
    ]
    for tasks in (8, 10):
        for kind, more in kinds:
            for name in ("fair", "round_robin", "fifo", "slices"):
                outcomes = [
                    simulate(equal_tasks(tasks, rounds, seed, **more), DEVICES, make_policy(name), "alive")
                    for seed in range(seeds)
                ]
                shares = [steady_share(outcome) for outcome in outcomes]
                exponential = kind == "exponential"
                traces = equal_tasks(tasks, rounds, 0, **more)
                bound = repairman_share(tasks, DEVICES, DUTY) if exponential else share_bound(traces, DEVICES)
                rows.append(
                    {
                        "tasks": tasks,
                        "rounds": kind,
                        "policy": name,
                        "busy": statistics.median(shares),
                        "low": min(shares),
                        "high": max(shares),
                        "bound": bound,
                        "of_bound": statistics.median(shares) / bound,
                        "jain": min(jain_index(served_until_first_end(outcome)) for outcome in outcomes),
                        "longest_wait": max(max(outcome.waits) for outcome in outcomes),
                    }
                )
    return rows


def served_until_first_end(outcome: Outcome) -> list[float]:
    """Busy device seconds by task until the first one ends."""
    end = min(outcome.finished.values())
    return [
        sum(lease.busy for lease in outcome.leases if lease.task == task and lease.released <= end)
        for task in outcome.finished
    ]


def unequal_traces(seed: int) -> tuple[list[TaskTrace], int]:
    """A pool of unequal tasks with a load of at least 0.8, and its devices: 4 to 10 tasks of 10 to 40 rounds of 2 to 10
    s on 1 to 3 devices."""
    generator = np.random.default_rng([11, seed])
    while True:
        tasks = int(generator.integers(4, 11))
        devices = int(generator.integers(1, 4))
        traces = [
            generate(
                f"t{k}",
                int(generator.integers(10, 41)),
                generator,
                round_seconds=float(generator.uniform(2, 10)),
                duty=float(generator.uniform(0.1, 0.6)),
                variation=0.1,
                send=0.1,
            )
            for k in range(tasks)
        ]
        duties = sum(share_bound([trace], 1) for trace in traces)
        if tasks > devices and duties / devices >= 0.8:
            return traces, devices


def makespans(count: int) -> list[dict[str, Any]]:
    """Each policy's makespan over its lower bound, on unequal pools."""
    rows: list[dict[str, Any]] = []
    pools = [unequal_traces(seed) for seed in range(count)]
    for name in ("fair", "round_robin", "fifo"):
        over = [
            simulate(traces, devices, make_policy(name), "alive").makespan / lower_bound(traces, devices)
            for traces, devices in pools
        ]
        row = {"policy": name, "pools": count, "median": statistics.median(over)}
        rows.append(row | {"p95": float(np.quantile(over, 0.95)), "most": max(over)})
    return rows


def held(rounds: int) -> dict[str, float]:
    """Device seconds held by 8 exclusive devices over those of 2 in a pool, for the same work."""
    traces = equal_tasks(8, rounds, 0, variation=0.05)
    exclusive = simulate(traces, 8, make_policy("exclusive"), "alive")
    pool = simulate(traces, DEVICES, make_policy("fair"), "alive")
    return {
        "exclusive_device_seconds": exclusive.held_seconds,
        "pool_device_seconds": pool.held_seconds,
        "times_fewer": exclusive.held_seconds / pool.held_seconds,
        "bound": 1 / DUTY,
        "exclusive_makespan": exclusive.makespan,
        "pool_makespan": pool.makespan,
    }


def between_gradients(seeds: int, rounds: int) -> list[dict[str, Any]]:
    """8 tasks of 4 workers whose data arrive far apart (cv 0.5): a device held all round, or given back between
    gradients; a switch takes 5 ms each way."""
    rows: list[dict[str, Any]] = []
    for name in ("fair", "between_gradients"):
        outcomes = [
            simulate(
                equal_tasks(8, rounds, seed, workers=4, variation=0.5, switch=0.005),
                DEVICES,
                make_policy(name),
                "alive",
            )
            for seed in range(seeds)
        ]
        rows.append(
            {
                "policy": name,
                "busy_of_wall": statistics.median(steady_share(outcome) for outcome in outcomes),
                "busy_of_held": statistics.median(outcome.busy_seconds / outcome.held_seconds for outcome in outcomes),
                "makespan": statistics.median(outcome.makespan for outcome in outcomes),
                "leases_a_round": len(outcomes[0].leases) / (8 * rounds),
            }
        )
    return rows


def prewarming(rounds: int, learned: int) -> list[dict[str, Any]]:
    """Cold start, keep-alive and prediction, by start-up seconds: 8 tasks, each on a device of its own or all on 2.
    Counted once `learned` rounds are known; the cost of all rounds, those without a prediction included, stands beside
    it."""
    rows: list[dict[str, Any]] = []
    cases: list[tuple[str, int, int, dict[str, Any]]] = [
        ("alone, cv 0.025", 8, 8, {"variation": 0.025, "startup_variation": 0.025}),
        ("8 on 2, cv 0.025", 8, 2, {"variation": 0.025, "startup_variation": 0.025}),
        ("8 on 2, cv 0.1", 8, 2, {"variation": 0.1, "startup_variation": 0.1}),
        ("8 on 2, exponential", 8, 2, {"exponential": True, "startup_variation": 0.1}),
    ]
    starts: list[tuple[str, Start]] = [("cold", "cold"), ("keep-alive", "alive"), ("predicted", "prewarm")]
    for case, tasks, devices, more in cases:
        for startup in (0.1, 1.0, 5.0):
            for name, start in starts:
                traces = equal_tasks(tasks, rounds, 5, startup=startup, **more)
                outcome, everything = (
                    simulate(traces, devices, Fair(), start, uncounted=uncounted) for uncounted in (learned, 0)
                )
                warmth = outcome.all_warmth
                predicted = outcome.warmth
                best, best_of_all = (hindsight(list(outcome.rounds.values()), first) for first in (learned, 0))
                counted = predicted if start == "prewarm" and predicted.collectors else warmth
                rows.append(
                    {
                        "case": case,
                        "startup": startup,
                        "start": name,
                        "predicted": predicted.collectors / warmth.collectors,
                        "hit_rate": counted.hit_rate,
                        "idle_share": counted.idle_seconds / counted.collectors / ROUND_SECONDS,
                        "late_share": counted.late_seconds / counted.collectors / ROUND_SECONDS,
                        "cost": warmth.cost() / warmth.collectors,
                        "of_optimum": warmth.cost() / warmth.collectors / best.cost,
                        "idle_share_of_optimum": best.idle / ROUND_SECONDS,
                        "least_idle_share": best.least_idle / ROUND_SECONDS,
                        "of_optimum_all_rounds": everything.all_warmth.cost()
                        / everything.all_warmth.collectors
                        / best_of_all.cost,
                        "absent_share": counted.absent_seconds / counted.collectors / ROUND_SECONDS,
                        "corrections": predicted.corrections,
                        "late_corrections": predicted.late_corrections,
                        "makespan": outcome.makespan,
                    }
                )
    return rows


# -- the best fixed rule for starting collectors, chosen knowing all rounds --------------------------------------------

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

    counted = [latest(anchor, back) for back in range(4) for anchor in (1, 2)]
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


# -- beside pools that were run ----------------------------------------------------------------------------------------


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

"""Figures of the simulator on drawn traces: nothing of it was measured on a device.

The queue and the pre-warming are the pool's own code, time is simulated. Rounds of 5 s, device work 20 % of each, 2
devices, unless said.

Busy: device seconds that compute over wall, between 10 % and 95 % of the first task's end. Its bound is min(1, sum of
duty cycles / devices), with exponential rounds the machine-repairman value. Makespan: over the offline optimum where
the search proves it, else over a certified lower bound. Pre-warming: cost is idle seconds + 49 x late seconds, beside
the best fixed start for the rounds of all 8 tasks."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.pool.hindsight import hindsight
from ddrl.core import plugins
from ddrl.pool.policies import Fair, Policy, Slices, SlicesSettings
from ddrl.pool.prewarm import PrewarmSettings
from ddrl.pool.queue import jain_index
from ddrl.pool.records import TaskTrace, generate
from ddrl.pool.simulator import Outcome, Start, lower_bound, optimum, repairman_share, share_bound, simulate

PACKAGE = "ddrl.pool.policies"
DEVICES = 2
ROUND_SECONDS = 5.0
DUTY = 0.2


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


def unlike_tasks(
    generator: np.random.Generator, tasks: int, rounds: tuple[int, int], least_duty: float, **more: Any
) -> list[TaskTrace]:
    """Tasks whose rounds [low, high) differ in number, in length (2 to 10 s) and in device work (up to 0.6 of it)."""
    return [
        generate(
            f"t{k}",
            int(generator.integers(*rounds)),
            generator,
            round_seconds=float(generator.uniform(2, 10)),
            duty=float(generator.uniform(least_duty, 0.6)),
            variation=0.1,
            **more,
        )
        for k in range(tasks)
    ]


def unequal_traces(seed: int) -> tuple[list[TaskTrace], int]:
    """A pool of unequal tasks with a load of at least 0.8: 4 to 10 tasks of 10 to 40 rounds on 1 to 3 devices."""
    generator = np.random.default_rng([11, seed])
    while True:
        tasks = int(generator.integers(4, 11))
        devices = int(generator.integers(1, 4))
        traces = unlike_tasks(generator, tasks, (10, 41), 0.1, send=0.1)
        duties = sum(share_bound([trace], 1) for trace in traces)
        if tasks > devices and duties / devices >= 0.8:
            return traces, devices


def makespans(count: int, nodes: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each policy's makespan over the best known bound, on unequal pools; and how many optima were proven."""
    names = ("fair", "round_robin", "fifo")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    proven = 0
    for seed in range(count):
        traces, devices = unequal_traces(seed)
        bound = lower_bound(traces, devices)
        if len(traces) <= 6:
            found = optimum(traces, devices, nodes)
            proven += found.exact
            bound = found.bound
        for name in names:
            ratios[name].append(simulate(traces, devices, make_policy(name), "alive").makespan / bound)
    return spread(ratios), {"traces": count, "optima_proven": proven}


def spread(ratios: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each policy."""
    return [
        {
            "policy": name,
            "pools": len(values),
            "median": statistics.median(values),
            "p95": float(np.quantile(values, 0.95)),
            "most": max(values),
        }
        for name, values in ratios.items()
    ]


def small_makespans(count: int) -> list[dict[str, Any]]:
    """The same over the exact optimum: 4 to 6 tasks of 2 to 3 rounds on 1 or 2 devices, all proven."""
    ratios: dict[str, list[float]] = {name: [] for name in ("fair", "round_robin", "fifo")}
    for seed in range(count):
        generator = np.random.default_rng([12, seed])
        tasks = int(generator.integers(4, 7))
        devices = int(generator.integers(1, 3))
        traces = unlike_tasks(generator, tasks, (2, 4), 0.2)
        found = optimum(traces, devices)
        if not found.exact:
            continue
        for name, values in ratios.items():
            values.append(simulate(traces, devices, make_policy(name), "alive").makespan / found.makespan)
    return spread(ratios)


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
    settings = PrewarmSettings()
    starts: list[tuple[str, Start]] = [("cold", "cold"), ("keep-alive", "alive"), ("predicted", "predicted")]
    for case, tasks, devices, more in cases:
        for startup in (0.1, 1.0, 5.0):
            for name, start in starts:
                traces = equal_tasks(tasks, rounds, 5, startup=startup, **more)
                outcome, everything = (
                    simulate(traces, devices, Fair(), start, settings, uncounted=uncounted)
                    for uncounted in (learned, 0)
                )
                warmth = outcome.all_warmth
                predicted = outcome.warmth
                best, best_of_all = (
                    hindsight(list(outcome.rounds.values()), settings, first) for first in (learned, 0)
                )
                counted = predicted if start == "predicted" and predicted.collectors else warmth
                rows.append(
                    {
                        "case": case,
                        "startup": startup,
                        "start": name,
                        "predicted": predicted.collectors / warmth.collectors,
                        "hit_rate": counted.hit_rate,
                        "idle_share": counted.idle_seconds / counted.collectors / ROUND_SECONDS,
                        "late_share": counted.late_seconds / counted.collectors / ROUND_SECONDS,
                        "cost": warmth.cost(settings) / warmth.collectors,
                        "of_optimum": warmth.cost(settings) / warmth.collectors / best.cost,
                        "idle_share_of_optimum": best.idle / ROUND_SECONDS,
                        "least_idle_share": best.least_idle / ROUND_SECONDS,
                        "of_optimum_all_rounds": everything.all_warmth.cost(settings)
                        / everything.all_warmth.collectors
                        / best_of_all.cost,
                        "absent_share": counted.absent_seconds / counted.collectors / ROUND_SECONDS,
                        "corrections": predicted.corrections,
                        "late_corrections": predicted.late_corrections,
                        "makespan": outcome.makespan,
                    }
                )
    return rows

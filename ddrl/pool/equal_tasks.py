"""A pool as one typical task, and what other numbers of such tasks would do on the very queue: for pages and notebooks
that let their reader try numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddrl.pool.offline import share_bound
from ddrl.pool.policies.fair import Fair
from ddrl.pool.reading import PoolRecord, recorded_traces
from ddrl.pool.simulator import simulate
from ddrl.pool.traces import generate

ROUNDS = 120  # simulated of each task
_FROM = 0.1  # of the time until the first task ends: the steady part
_TO = 0.95


@dataclass(frozen=True)
class TypicalTask:
    """Means over the tasks of a pool. duty: busy device seconds over seconds of a round without waits; variation: std /
    mean of these rounds; busy_per_wall: of the pool's devices, while all tasks run."""

    round_seconds: float
    duty: float
    variation: float
    busy_per_wall: float


def typical_task(record: PoolRecord) -> TypicalTask:
    """What the leases of a pool show of its tasks; the first round, which holds the task's start, does not count."""
    duties: list[float] = []
    means: list[float] = []
    variations: list[float] = []
    for trace in recorded_traces(record):
        alone = np.array([trace.alone(number) for number in range(trace.rounds)][1:] or [trace.alone(0)])
        busy = [lease.busy for lease in record.leases if lease.task == trace.name][1:] or [trace.busy(0)]
        means.append(float(alone.mean()))
        variations.append(float(alone.std() / alone.mean()) if alone.mean() > 0 else 0.0)
        duties.append(min(1.0, sum(busy) / float(alone.sum())) if alone.sum() > 0 else 0.0)
    first = {task: [lease for lease in record.leases if lease.task == task] for task in record.tasks}
    begin = max((leases[0].granted for leases in first.values() if leases), default=0.0)
    end = min((leases[-1].released for leases in first.values() if leases), default=0.0)
    begin, end = begin + _FROM * (end - begin), begin + _TO * (end - begin)
    busy_seconds = sum(
        lease.busy * max(0.0, min(end, lease.released) - max(begin, lease.granted)) / (lease.released - lease.granted)
        for lease in record.leases
        if lease.released > lease.granted
    )
    share = busy_seconds / (len(record.devices) * (end - begin)) if end > begin else 0.0
    return TypicalTask(_mean(means), _mean(duties), _mean(variations), share)


def steady_shares(
    tasks: Sequence[int], *, duty: float, devices: int, variation: float, seed: int = 0
) -> tuple[list[float], list[float]]:
    """Simulated busy / wall of `devices` devices under so many equal tasks, while all of them run, and its bound."""
    shares: list[float] = []
    bounds: list[float] = []
    for count in tasks:
        generator = np.random.default_rng([seed, count])
        traces = [
            generate(f"t{k}", ROUNDS, generator, round_seconds=1.0, duty=duty, variation=variation)
            for k in range(count)
        ]
        outcome = simulate(traces, devices, Fair(), "alive")
        end = min(outcome.finished.values())
        shares.append(outcome.steady_share(_FROM * end, _TO * end))
        bounds.append(share_bound(traces, devices))
    return shares, bounds


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

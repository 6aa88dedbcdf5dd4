"""What no schedule of a pool can beat: lower bounds, the offline optimum of small pools, and queueing theory's values.

All assume that collectors are always ready (the first start apart), that a round's hold is not interrupted, and that
all seconds are known before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddrl.pool.records import PoolRecord, TaskTrace, recorded_traces

# -- offline -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimum:
    """The least makespan lies in [bound, makespan] [s]; where they are equal it is exact. nodes: of the search."""

    makespan: float
    bound: float
    nodes: int

    @property
    def exact(self) -> bool:
        """Whether `makespan` was proven to be least."""
        return self.makespan <= self.bound * (1 + 1e-9)


def lower_bound(traces: Sequence[TaskTrace], devices: int) -> float:
    """A makespan [s] that no schedule undercuts: the longest task alone, or all device seconds spread evenly.

    The second counts that each device begins with one task's first collecting and ends with one task's last sending:
    with M devices, (M least heads + all holds + M least tails) / M (Carlier's bound for parallel machines)."""
    chains = [_Chain(trace) for trace in traces]
    longest = max(chain.rest[0] for chain in chains)
    heads = sorted(chain.first[0] for chain in chains)[:devices]
    tails = sorted(chain.trace.send[-1] for chain in chains)[:devices]
    loads = sum(heads) + sum(chain.rest_of_work[0] for chain in chains) + sum(tails)
    return max(longest, loads / devices if len(chains) >= devices else 0.0)


def optimum(traces: Sequence[TaskTrace], devices: int, max_nodes: int = 200_000) -> Optimum:
    """The least makespan by branch and bound; exact for small pools, else the best found and a certified bound.

    A schedule is an order of holds, each placed as early as it can on the device that is free first. Only active
    schedules are searched (Giffler and Thompson, 1960): a hold that would begin after another one could have ended in
    its place is not tried. Orders that reach the same rounds no earlier in any respect are cut."""
    return _Search([_Chain(trace) for trace in traces], devices, max_nodes).run()


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


def share_bound(traces: Sequence[TaskTrace], devices: int) -> float:
    """Largest busy / wall of a pool whose tasks never end: min(1, sum of duty cycles / devices)."""
    duties = (
        sum(trace.busy(round) for round in range(trace.rounds))
        / sum(trace.alone(round) for round in range(trace.rounds))
        for trace in traces
    )
    return min(1.0, sum(duties) / devices)


@dataclass(frozen=True)
class Bounded:
    """A figure beside what no order of the same rounds can beat. share: figure / bound."""

    name: str
    value: float
    bound: float
    unit: str

    @property
    def share(self) -> float:
        """1: the bound is reached; nan: there is none."""
        return self.value / self.bound if self.bound > 0 else math.nan


def figures_beside_bounds(record: PoolRecord) -> list[Bounded]:
    """Figures of a pool with their bounds; empty before the first lease has ended.

    Busy / wall of the devices: the most of the same work without waits, min(1, sum of duty cycles / devices). Busy /
    held: 1. Makespan: the longest task without waits, or all holds on all devices (ddrl.pool.bounds)."""
    if not record.leases or not record.seconds:
        return []
    traces = recorded_traces(record)
    devices = len(record.devices)
    busy = {task: sum(lease.busy for lease in record.leases if lease.task == task) for task in record.tasks}
    held = sum(lease.released - lease.granted for lease in record.leases)
    duty = sum(busy[trace.name] / sum(trace.alone(number) for number in range(trace.rounds)) for trace in traces)
    total = sum(busy.values())
    return [
        Bounded("busy / wall", total / (devices * record.seconds), min(1.0, duty / devices), ""),
        Bounded("busy / held", total / held if held else 0.0, 1.0, ""),
        Bounded("makespan", record.seconds, lower_bound(traces, devices), "s"),
    ]


class _Chain:
    """A task without contention; lists by round, the sums from that round on."""

    def __init__(self, trace: TaskTrace) -> None:
        self.trace = trace
        self.collect = [list(collect) for collect in trace.collect]  # parameters to data, by worker
        if self.collect:
            self.collect[0] = [a + b for a, b in zip(trace.startup[0], trace.collect[0], strict=True)]
        self.first = [min(collect) for collect in self.collect]
        self.work = [trace.busy(round) + 2 * trace.switch for round in range(trace.rounds)]
        self.rest = [0.0] * (trace.rounds + 1)  # parameters of the round to the task's end
        self.rest_of_work = [0.0] * (trace.rounds + 1)  # device seconds from that round on, at least
        for round in reversed(range(trace.rounds)):
            alone = trace.held(round, self.first[round], self.collect[round]) + trace.send[round]
            self.rest[round] = self.rest[round + 1] + alone
            self.rest_of_work[round] = self.rest_of_work[round + 1] + self.work[round]

    def end(self, round: int, parameters: float, free: float) -> float:
        """When the task ends at the earliest, its parameters at one time and a device free at another."""
        granted = max(parameters + self.first[round], free) + self.work[round] + self.trace.send[round]
        return max(parameters + self.rest[round], granted + self.rest[round + 1])


class _Search:
    """Depth-first branch and bound over orders of holds."""

    def __init__(self, chains: Sequence[_Chain], devices: int, max_nodes: int) -> None:
        self._chains = chains
        self._devices = devices
        self._nodes_left = max_nodes
        self._max_nodes = max_nodes
        self._best = math.inf
        self._seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        self._root = lower_bound([chain.trace for chain in chains], devices)

    def run(self) -> Optimum:
        rounds = (0,) * len(self._chains)
        parameters = (0.0,) * len(self._chains)
        exhausted = self._branch(rounds, parameters, (0.0,) * self._devices, 0.0)
        bound = self._best if exhausted else self._root
        return Optimum(self._best, bound, self._max_nodes - self._nodes_left)

    def _branch(
        self, rounds: tuple[int, ...], parameters: tuple[float, ...], free: tuple[float, ...], ended: float
    ) -> bool:
        """Search below a partial order; `parameters`: arrival of each task's next ones; `free`: devices, sorted;
        `ended`: when the last of the finished tasks did. Returns whether nothing below was left out."""
        running = [k for k, chain in enumerate(self._chains) if rounds[k] < chain.trace.rounds]
        if not running:
            self._best = min(self._best, ended)
            return True
        if self._best <= self._root * (1 + 1e-9):
            return True
        if self._nodes_left == 0:
            return False
        self._nodes_left -= 1
        if self._bound(rounds, parameters, free, ended, running) >= self._best * (1 - 1e-9):
            return True
        if self._is_dominated(rounds, (*parameters, *free, ended)):
            return True
        holds: list[tuple[float, float, int]] = []
        for k in running:
            trace = self._chains[k].trace
            round = rounds[k]
            arrivals = [parameters[k] + collect for collect in self._chains[k].collect[round]]
            begin = max(min(arrivals), free[0])
            holds.append((begin, trace.held(round, begin, arrivals), k))
        earliest_end = min(end for _, end, _ in holds)
        complete = True
        candidates = [hold for hold in holds if hold[0] < earliest_end or hold[1] == earliest_end]
        for _, end, k in sorted(candidates, key=lambda hold: (-self._chains[hold[2]].rest[rounds[hold[2]]], hold[0])):
            chain = self._chains[k]
            arrival = end + chain.trace.send[rounds[k]]
            after = rounds[k] + 1
            complete &= self._branch(
                (*rounds[:k], after, *rounds[k + 1 :]),
                (*parameters[:k], arrival, *parameters[k + 1 :]),
                tuple(sorted((end, *free[1:]))),
                max(ended, arrival) if after == chain.trace.rounds else ended,
            )
        return complete

    def _bound(
        self,
        rounds: tuple[int, ...],
        parameters: tuple[float, ...],
        free: tuple[float, ...],
        ended: float,
        running: Sequence[int],
    ) -> float:
        """No completion of the partial order ends before this."""
        chains = [(self._chains[k], rounds[k], parameters[k]) for k in running]
        longest = max(chain.end(round, arrival, free[0]) for chain, round, arrival in chains)
        first = min(arrival + chain.first[round] for chain, round, arrival in chains)
        load = sum(max(time, first) for time in free) + sum(chain.rest_of_work[round] for chain, round, _ in chains)
        tail = min(chain.trace.send[-1] for chain, _, _ in chains)
        return max(ended, longest, load / len(free) + tail)

    def _is_dominated(self, rounds: tuple[int, ...], times: tuple[float, ...]) -> bool:
        """Whether these rounds were reached before at times none of which is later; remembers them if not."""
        known = self._seen.setdefault(rounds, [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in known):
            return True
        known[:] = [other for other in known if not all(b <= a for a, b in zip(other, times, strict=True))]
        known.append(times)
        return False

"""Runs traces (`TaskTrace`: a task's rounds in seconds, recorded or generated) on the queue and planner of a real pool,
in simulated time, and bounds what any order can reach.

An event is (time, order, what, task, worker); events of one time all happen before devices are granted. A round: its
parameters arrive; each worker collects as soon as its collector is ready too; with the first data the task asks for a
device; gradients run in order of arrival; the device is released; then the parameters are sent.

Every collector and device computes as if it had its cores to itself, and links are not shared.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ddrl.core.errors import PoolError
from ddrl.core.specs import Floats
from ddrl.pool.policies import DeviceQueue, Fair, Grant, Policy, Request
from ddrl.pool.prewarm import Planner, Round, Schedule, Warmth
from ddrl.pool.records import Lease, PoolRecord, busy_between

# -- traces ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskTrace:
    """One task of R rounds and W workers, as if nobody else used the devices.

    startup [R][W]: a collector's start, until it can act; collect [R][W]: parameters and collector ready to data
    arrived; gradient [R][W]: a worker's gradient on the device; update [R]: combining them; send [R]: device released
    to parameters at the workers; switch: moving the task's state on to a device, and again off it."""

    name: str
    startup: list[list[float]]
    collect: list[list[float]]
    gradient: list[list[float]]
    update: list[float]
    send: list[float]
    switch: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        shape = (self.rounds, self.workers)
        by_worker = ("startup", "collect", "gradient")
        for name in (*by_worker, "update", "send"):
            values = np.array(getattr(self, name), dtype=np.float64)
            wanted = shape if name in by_worker else shape[:1]
            if values.shape != wanted or not np.all(values >= 0):
                raise PoolError(f"trace of task '{self.name}': {name} must be {wanted} seconds, none of them negative")

    @property
    def rounds(self) -> int:
        """R."""
        return len(self.collect)

    @property
    def workers(self) -> int:
        """W."""
        return len(self.collect[0]) if self.collect else 0

    def held(self, round: int, first: float, arrivals: Sequence[float]) -> float:
        """When a device taken at `first` is free again, the round's data arriving at `arrivals` [s, by worker].

        Gradients run one after another, in order of arrival."""
        time = first + self.switch
        for arrival, gradient in sorted(zip(arrivals, self.gradient[round], strict=True)):
            time = max(time, arrival) + gradient
        return time + self.update[round] + self.switch

    def alone(self, round: int) -> float:
        """Seconds of a round, parameters to next parameters, without any wait."""
        return self.held(round, min(self.collect[round]), self.collect[round]) + self.send[round]

    def busy(self, round: int) -> float:
        """Device seconds in which a round computes."""
        return sum(self.gradient[round]) + self.update[round]


def generate(
    name: str,
    rounds: int,
    generator: np.random.Generator,
    *,
    round_seconds: float = 5.0,
    duty: float = 0.2,
    variation: float = 0.0,
    exponential: bool = False,
    workers: int = 1,
    startup: float = 0.0,
    startup_variation: float = 0.0,
    send: float = 0.0,
    switch: float = 0.0,
) -> TaskTrace:
    """A task whose device works `duty` of each round of about `round_seconds` [s] when it runs alone.

    variation: std / mean of collecting and of gradients, drawn from a gamma distribution; exponential: both exponential
    instead; startup_variation: that of collectors' starts."""

    def draw(mean: float, spread: float, memoryless: bool, *shape: int) -> Floats:
        if memoryless:
            return generator.exponential(mean, shape)
        if spread == 0 or mean == 0:
            return np.full(shape, mean)
        return generator.gamma(spread**-2, mean * spread**2, shape)

    work = duty * round_seconds
    collect = round_seconds - work - send - 2 * switch
    if collect < 0:
        raise PoolError(f"trace of task '{name}': duty {duty} and {send} s of sending leave no time to collect")
    return TaskTrace(
        name,
        startup=draw(startup, startup_variation, False, rounds, workers).tolist(),
        collect=draw(collect, variation, exponential, rounds, workers).tolist(),
        gradient=draw(work / workers, variation, exponential, rounds, workers).tolist(),
        update=[0.0] * rounds,
        send=[send] * rounds,
        switch=switch,
    )


def recorded_traces(record: PoolRecord) -> list[TaskTrace]:
    """The rounds that the leases show, as if nobody else had used the devices. A hold counts as the device's work."""
    traces: list[TaskTrace] = []
    for task in record.tasks:
        leases = record.leases_of(task)
        if not leases:
            continue
        before = [0.0, *(lease.released for lease in leases[:-1])]
        collect = [max(0.0, lease.asked - released) for lease, released in zip(leases, before, strict=True)]
        held = [lease.released - lease.granted for lease in leases]
        nothing = [0.0] * len(leases)
        traces.append(
            TaskTrace(
                task,
                startup=[[0.0]] * len(leases),
                collect=[[seconds] for seconds in collect],
                gradient=[[seconds] for seconds in held],
                update=nothing,
                send=nothing,
            )
        )
    return traces


# -- bounds ------------------------------------------------------------------------------------------------------------
# What no order of a pool's rounds can beat.
#
# All assume that collectors are always ready (the first start apart), that a round's hold is not interrupted, and that
# all seconds are known before.


def lower_bound(traces: Sequence[TaskTrace], devices: int) -> float:
    """A makespan [s] that no schedule undercuts: the longest task alone, or all device seconds spread evenly.

    The second counts that each device begins with one task's first collecting and ends with one task's last sending:
    with M devices, (M least heads + all holds + M least tails) / M (Carlier's bound for parallel machines)."""
    longest = max(_seconds_alone(trace) for trace in traces)
    heads = sorted(min(_arrivals(trace, 0)) for trace in traces)[:devices]
    tails = sorted(trace.send[-1] for trace in traces)[:devices]
    works = [trace.busy(round) + 2 * trace.switch for trace in traces for round in range(trace.rounds)]
    loads = sum(heads) + sum(works) + sum(tails)
    return max(longest, loads / devices if len(traces) >= devices else 0.0)


def _arrivals(trace: TaskTrace, round: int) -> list[float]:
    """Seconds from a round's parameters to its data, by worker; the first round's collectors must start."""
    starts = trace.startup[0] if round == 0 else [0.0] * trace.workers
    return [start + collect for start, collect in zip(starts, trace.collect[round], strict=True)]


def _seconds_alone(trace: TaskTrace) -> float:
    """Seconds of all rounds without any wait."""
    arrivals = [_arrivals(trace, round) for round in range(trace.rounds)]
    held = (trace.held(round, min(arrivals[round]), arrivals[round]) for round in range(trace.rounds))
    return sum(held) + sum(trace.send)


def share_bound(traces: Sequence[TaskTrace], devices: int) -> float:
    """Largest busy / wall of a pool whose tasks never end: min(1, sum of duty cycles / devices)."""
    duties = (sum(trace.busy(round) for round in range(trace.rounds)) / sum(_alone(trace)) for trace in traces)
    return min(1.0, sum(duties) / devices)


def _alone(trace: TaskTrace) -> list[float]:
    """Seconds of each round without any wait."""
    return [trace.alone(round) for round in range(trace.rounds)]


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
    held: 1. Makespan: the longest task without waits, or all holds on all devices (ddrl.pool.simulator)."""
    if not record.leases or not record.seconds:
        return []
    traces = recorded_traces(record)
    devices = len(record.devices)
    held = sum(lease.released - lease.granted for lease in record.leases)
    total = sum(lease.busy for lease in record.leases)
    duty = sum(sum(lease.busy for lease in record.leases_of(trace.name)) / sum(_alone(trace)) for trace in traces)
    return [
        Bounded("busy / wall", total / (devices * record.seconds), min(1.0, duty / devices), ""),
        Bounded("busy / held", total / held if held else 0.0, 1.0, ""),
        Bounded("makespan", record.seconds, lower_bound(traces, devices), "s"),
    ]


# -- simulator ---------------------------------------------------------------------------------------------------------

Start = Literal["cold", "alive", "prewarm"]  # as pool.collectors


@dataclass
class Outcome:
    """What a simulated pool did."""

    devices: int
    makespan: float = 0.0  # s
    finished: dict[str, float] = field(default_factory=dict[str, float])  # s, by task
    rounds: dict[str, list[Round]] = field(
        default_factory=dict[str, list[Round]]
    )  # measured, by task; all but the last
    leases: list[Lease] = field(default_factory=list[Lease])
    held_seconds: float = 0.0
    warmth: Warmth = field(default_factory=Warmth)  # of collectors for which there was an instruction
    all_warmth: Warmth = field(default_factory=Warmth)  # of all but each task's first

    @property
    def busy_seconds(self) -> float:
        """Device seconds that computed."""
        return sum(lease.busy for lease in self.leases)

    def steady_share(self, begin: float, end: float) -> float:
        """Busy / wall between two times; a lease counts by its part within them."""
        return busy_between(self.leases, begin, end) / (self.devices * (end - begin))

    @property
    def waits(self) -> list[float]:
        """Seconds from request to grant, by lease."""
        return [lease.granted - lease.asked for lease in self.leases]


class _Task:
    """A task on its way through its trace."""

    def __init__(self, trace: TaskTrace, planner: Planner) -> None:
        self.trace = trace
        self.planner = planner
        self.schedule = Schedule()
        self.round = 0
        self.started = [0.0] * trace.workers  # of each worker's newest collector
        self.ready = [0.0] * trace.workers
        self.sent = [0.0] * trace.workers
        self.pending: list[tuple[float, int]] = []  # data not yet worked on: arrival, worker
        self.computed = 0  # gradients of this round
        self.holds = False  # a device
        self.working = False  # the device computes, or moves state
        self.resident = -1  # device that holds the task's state
        self.busy = 0.0


class Simulator:
    """One run, by `simulate`."""

    def __init__(self, traces: Sequence[TaskTrace], devices: int, policy: Policy, start: Start) -> None:
        if not traces:
            raise PoolError("a pool without tasks has nothing to simulate: give it traces")
        self._start_mode = start
        self._queue = DeviceQueue(policy, devices)
        self._tasks: dict[str, _Task] = {}
        self._events: list[tuple[float, int, str, str, int]] = []
        self._order = itertools.count()
        self._tenants: dict[int, str] = {}  # whose state a device holds
        self.outcome = Outcome(devices)
        for trace in traces:
            planner = Planner(trace.workers, start)
            planner.warmth = self.outcome.all_warmth
            planner.predicted = self.outcome.warmth
            self._tasks[trace.name] = _Task(trace, planner)
            self._queue.join(trace.name, trace.weight)

    def run(self) -> Outcome:
        """All tasks to their ends."""
        for name in self._tasks:
            self._at(0.0, "parameters", name)
        handlers = {
            "parameters": self._parameters,
            "data": self._data,
            "computed": self._computed,
            "released": self._released,
        }
        ended = 0.0
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                _, _, what, name, worker = heapq.heappop(self._events)
                if what != "slice":
                    handlers[what](self._tasks[name], now, worker)
            ended = now
            for grant in self._queue.grants(now):
                self._granted(grant, now)
            tick = self._queue.next_time(now)
            if math.isfinite(tick) and not any(event[2] == "slice" for event in self._events):
                self._at(tick, "slice")
        self.outcome.makespan = max(self.outcome.finished.values())
        self.outcome.held_seconds = self._queue.device_seconds(ended)
        return self.outcome

    def _at(self, time: float, what: str, task: str = "", worker: int = 0) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, task, worker))

    def _parameters(self, task: _Task, now: float, _: int) -> None:
        """The round's parameters have arrived: collectors act; starts of later rounds' are ordered."""
        orders = task.planner.begin(task.round, now)
        if task.planner.measured is not None:
            self.outcome.rounds.setdefault(task.trace.name, []).append(task.planner.measured)
        for worker in range(task.trace.workers):
            self._make_ready(task, worker, now)
            seconds = task.trace.collect[task.round][worker]
            self._at(max(now, task.ready[worker]) + seconds, "data", task.trace.name, worker)
        task.schedule.begin(task.round)
        for order in orders:
            task.schedule.order(order)

    def _make_ready(self, task: _Task, worker: int, now: float) -> None:
        """When the round's collector has started and is ready."""
        start = task.schedule.time(task.round, worker)
        if start is None and task.round and self._start_mode != "cold":  # it stayed
            task.ready[worker] = task.sent[worker]
            return
        task.started[worker] = now if start is None else min(start, now)  # once the parameters are there it starts
        task.ready[worker] = task.started[worker] + task.trace.startup[task.round][worker]

    def _data(self, task: _Task, now: float, worker: int) -> None:
        """A worker's data have arrived; its collector ends, unless it stays."""
        task.sent[worker] = now
        for corrected in task.schedule.sent(task.round, worker, now, now):
            task.planner.note_corrected(corrected)
        task.planner.note_sent(task.round, worker, task.started[worker], task.ready[worker], now)
        task.planner.note_end(worker, now)
        task.pending.append((now, worker))
        if task.holds and not task.working:
            self._compute(task, now)
        elif not task.holds and len(task.pending) == 1:
            self._ask(task, now)

    def _ask(self, task: _Task, now: float) -> None:
        self._queue.request(Request(task.trace.name, now, task.round, task.trace.rounds - task.round))

    def _granted(self, grant: Grant, now: float) -> None:
        task = self._tasks[grant.request.task]
        task.holds = True
        task.busy = 0.0
        stays = self._tenants.get(grant.device) == task.trace.name and task.resident == grant.device
        self._tenants[grant.device] = task.trace.name
        task.resident = grant.device
        self._work(task, now, 0.0 if stays else task.trace.switch, "computed", -1)

    def _work(self, task: _Task, now: float, seconds: float, then: str, worker: int = 0) -> None:
        task.working = True
        self._at(now + seconds, then, task.trace.name, worker)

    def _compute(self, task: _Task, now: float) -> None:
        """Begin the gradient of the data that arrived first."""
        _, worker = task.pending.pop(0)
        seconds = task.trace.gradient[task.round][worker]
        task.computed += 1
        if task.computed == task.trace.workers:
            seconds += task.trace.update[task.round]
        task.busy += seconds
        self._work(task, now, seconds, "computed", worker)

    def _computed(self, task: _Task, now: float, worker: int) -> None:
        """A gradient has ended; worker -1: the task's state has moved on to the device."""
        task.working = False
        if task.computed == task.trace.workers or (worker >= 0 and self._queue.policy.splits_rounds):
            self._work(task, now, task.trace.switch, "released")
        elif task.pending:
            self._compute(task, now)

    def _released(self, task: _Task, now: float, _: int) -> None:
        trace = task.trace
        grant = self._queue.release(trace.name, now)
        asked = grant.request.at
        self.outcome.leases.append(Lease(trace.name, task.round, grant.device, asked, grant.at, now, task.busy))
        task.holds = False
        task.working = False
        if task.computed < trace.workers:
            if task.pending:
                self._ask(task, now)
            return
        task.computed = 0
        task.round += 1
        arrival = now + trace.send[task.round - 1]
        if task.round < trace.rounds:
            self._at(arrival, "parameters", trace.name)
        else:
            self.outcome.finished[trace.name] = arrival
            self._queue.leave(trace.name, now)


def simulate(
    traces: Sequence[TaskTrace],
    devices: int,
    policy: Policy,
    start: Start = "prewarm",
) -> Outcome:
    """Run `traces` on `devices` devices under a fresh `policy`. start: how collectors start, as pool.collectors."""
    return Simulator(traces, devices, policy, start).run()


# -- other numbers of tasks --------------------------------------------------------------------------------------------
# A pool as one typical task, and what other numbers of such tasks would do on the same queue: for pages and notebooks
# that let their reader try numbers.


ROUNDS = 120  # simulated of each task
STEADY_FROM = 0.1  # of the time until the first task ends: the part in which all of them run
STEADY_TO = 0.95


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
    traces = recorded_traces(record)
    if not traces:
        return TypicalTask(0.0, 0.0, 0.0, 0.0)
    duties: list[float] = []
    means: list[float] = []
    variations: list[float] = []
    leases = [record.leases_of(trace.name) for trace in traces]
    for trace, own in zip(traces, leases, strict=True):
        alone = np.array(_alone(trace)[1:] or _alone(trace))
        busy = [lease.busy for lease in own][1:] or [trace.busy(0)]
        mean = max(float(alone.mean()), 1e-12)
        means.append(mean)
        variations.append(float(alone.std()) / mean)
        duties.append(min(1.0, sum(busy) / (mean * len(alone))))
    all_began = max(own[0].granted for own in leases)
    seconds = min(own[-1].released for own in leases) - all_began
    begin = all_began + STEADY_FROM * seconds
    end = all_began + STEADY_TO * seconds
    share = busy_between(record.leases, begin, end) / (len(record.devices) * (end - begin)) if end > begin else 0.0
    return TypicalTask(float(np.mean(means)), float(np.mean(duties)), float(np.mean(variations)), share)


def steady_shares(
    tasks: Sequence[int], *, duty: float, devices: int, variation: float
) -> tuple[list[float], list[float]]:
    """Simulated busy / wall of `devices` devices under so many equal tasks, while all of them run, and its bound."""
    shares: list[float] = []
    bounds: list[float] = []
    for count in tasks:
        generator = np.random.default_rng([0, count])
        traces = [
            generate(f"t{k}", ROUNDS, generator, round_seconds=1.0, duty=duty, variation=variation)
            for k in range(count)
        ]
        outcome = simulate(traces, devices, Fair(), "alive")
        end = min(outcome.finished.values())
        shares.append(outcome.steady_share(STEADY_FROM * end, STEADY_TO * end))
        bounds.append(share_bound(traces, devices))
    return shares, bounds


if __name__ == "__main__":  # python -m ddrl.plan, of earlier versions
    print(
        "ddrl.plan went: measure a short run, or simulate a pool (ddrl.pool.simulator; docs/pool.md)", file=sys.stderr
    )
    sys.exit(2)

"""Runs traces on the very queue and pre-warming of a real pool, in simulated time.

An event is (time, order, what, task, worker); events of one time all happen before devices are granted. A round: its
parameters arrive; each worker collects as soon as its collector is ready too; with the first data the task asks for a
device; gradients run in order of arrival; the device is released; then the parameters are sent.

With `processors`, collecting, gradients and switches share the cores of one host; without, each collector has a core.
Not simulated: starts of collectors that are told when to start compete for no core, and links are not shared.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ddrl.core.errors import PoolError
from ddrl.pool import prewarm
from ddrl.pool.devices import Device
from ddrl.pool.policies import Fair, Policy, Request
from ddrl.pool.prewarm import History, Instruction, PrewarmSettings, Round, Warmth
from ddrl.pool.queue import DeviceQueue, Grant
from ddrl.pool.records import Lease, PoolRecord, TaskTrace, generate, recorded_traces

# -- bounds ------------------------------------------------------------------------------------------------------------
# What no schedule of a pool can beat: lower bounds, the offline optimum of small pools, and queueing theory's values.
#
# All assume that collectors are always ready (the first start apart), that a round's hold is not interrupted, and that
# all seconds are known before.


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
    held: 1. Makespan: the longest task without waits, or all holds on all devices (ddrl.pool.simulator)."""
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


# -- processors --------------------------------------------------------------------------------------------------------
# Processor time among processes that compete for it, in simulated time: each gets its max-min fair share, as the
# kernel's fair scheduler gives equal processes theirs.
#
# Limits: a process uses at most its own demand; those pinned to the same cores at most these cores; all together at
# most all cores. What runs in no slot keeps off the slots' cores where others are left, as a task's process in a pool
# does. Shares change only when work begins or ends. O(processes x limits) a change.


@dataclass(eq=False)
class _Work:
    """What one process has to do. left [s], alone; demand: cores in use while nobody else wants them."""

    left: float
    demand: float
    cores: frozenset[int]  # pinned to; empty: any
    rate: float = 0.0  # seconds done a second


class Processors:
    """`cores` of one host. `slots`: what its pool's devices are, by number; a torch device takes none of the cores."""

    def __init__(self, cores: int, slots: Sequence[Device] = (), threads: int = 1) -> None:
        pinned = {core for slot in slots for core in slot.cores}
        if cores < max(1, len(pinned)):
            raise PoolError(f"{cores} cores are fewer than the {len(pinned)} that the pool's devices name")
        self._cores = cores
        self._slots = slots
        self._threads = threads
        others = frozenset(range(cores)) - pinned
        self._others = others if pinned else frozenset[int]()  # empty: any core
        self._work: dict[Hashable, _Work] = {}
        self._now = 0.0

    def begin(self, key: Hashable, seconds: float, now: float, device: int = -1) -> None:
        """Let work of so many `seconds` alone begin; device: the slot that it runs in, -1: none."""
        self._pass(now)
        slot = self._slots[device] if device >= 0 else None
        if slot is None or not slot.is_slot:
            self._work[key] = _Work(seconds, 1.0 if slot is None else 0.0, self._others)
        else:
            self._work[key] = _Work(seconds, min(slot.capacity, self._threads), frozenset(slot.cores))
        self._share()

    def next_end(self) -> float:
        """When the first work ends [s]; inf: there is none."""
        return self._now + min((work.left / work.rate for work in self._work.values()), default=math.inf)

    def end(self, now: float) -> list[Hashable]:
        """The work that has ended by `now`, which is at most `next_end`."""
        self._pass(now)
        ended = [key for key, work in self._work.items() if work.left <= 1e-12 * max(1.0, now)]
        for key in ended:
            del self._work[key]
        if ended:
            self._share()
        return ended

    def _pass(self, now: float) -> None:
        for work in self._work.values():
            work.left -= work.rate * (now - self._now)
        self._now = now

    def _share(self) -> None:
        """Raise all shares alike; who is at a limit stays there (progressive filling; Bertsekas and Gallager, 1992)."""
        for work in self._work.values():
            work.rate = 1.0 if work.demand == 0 else 0.0
        rising = [work for work in self._work.values() if work.demand > 0]
        limits: list[tuple[list[_Work], float]] = [(rising, float(self._cores))]
        for cores in {work.cores for work in rising if work.cores}:
            limits.append(([work for work in rising if work.cores == cores], float(len(cores))))
        use: dict[int, float] = {id(work): 0.0 for work in rising}
        while rising:
            step = min(work.demand - use[id(work)] for work in rising)
            for members, most in limits:
                count = sum(1 for work in members if work in rising)
                if count:
                    step = min(step, (most - sum(use[id(work)] for work in members)) / count)
            for work in rising:
                use[id(work)] += step
            full: set[int] = set()
            for members, most in limits:
                if sum(use[id(work)] for work in members) >= most - 1e-9:
                    full.update(id(work) for work in members)
            rising = [work for work in rising if use[id(work)] < work.demand - 1e-9 and id(work) not in full]
        for work in self._work.values():
            if work.demand > 0:
                work.rate = use[id(work)] / work.demand


# -- simulator ---------------------------------------------------------------------------------------------------------

# -- simulator ---------------------------------------------------------------------------------------------------------

Start = Literal["cold", "alive", "predicted"]


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

    @property
    def busy_share(self) -> float:
        """Busy / wall, over all devices."""
        return self.busy_seconds / (self.devices * self.makespan)

    def steady_share(self, begin: float, end: float) -> float:
        """Busy / wall between two times; a lease counts by its part within them."""
        parts = (
            lease.busy
            * max(0.0, min(end, lease.released) - max(begin, lease.granted))
            / (lease.released - lease.granted)
            for lease in self.leases
            if lease.released > lease.granted
        )
        return sum(parts) / (self.devices * (end - begin))

    @property
    def waits(self) -> list[float]:
        """Seconds from request to grant, by lease."""
        return [lease.granted - lease.asked for lease in self.leases]


class _Task:
    """A task on its way through its trace."""

    def __init__(self, trace: TaskTrace, settings: PrewarmSettings) -> None:
        self.trace = trace
        self.round = 0
        self.parameters = 0.0  # when those of the round arrived
        self.sent: list[float] = []
        self.pending: list[tuple[float, int]] = []  # data not yet worked on: arrival, worker
        self.computed = 0  # gradients of this round
        self.asked = self.granted = 0.0
        self.working = False  # the device computes, or moves state
        self.device = -1
        self.resident = -1  # device that holds the task's state
        self.busy = 0.0
        self.history = History(settings)
        self.instructions: dict[int, Instruction] = {}  # by round, of those not begun
        self.starts: dict[int, list[float]] = {}  # planned, then corrected; nan: the collector stays alive
        self.startup: list[float] = []  # seconds of this round's start, by worker; nan: it stayed


class Simulator:
    """One run. `start`: how collectors start: when parameters arrive, never again, or as predicted."""

    def __init__(
        self,
        traces: Sequence[TaskTrace],
        devices: int,
        policy: Policy,
        start: Start = "predicted",
        settings: PrewarmSettings | None = None,
        processors: Processors | None = None,
        uncounted: int = 0,
    ) -> None:
        if not traces:
            raise PoolError("a pool without tasks has nothing to simulate")
        self._settings = settings or PrewarmSettings()
        self._start_mode = start
        self._uncounted = uncounted
        self._queue = DeviceQueue(policy, devices)
        self._tasks = {trace.name: _Task(trace, self._settings) for trace in traces}
        self._events: list[tuple[float, int, str, str, int]] = []
        self._order = itertools.count()
        self._processors = processors
        self._tenants: dict[int, str] = {}  # whose state a device holds
        self.outcome = Outcome(devices)
        for trace in traces:
            self._queue.join(trace.name, trace.weight)

    def run(self) -> Outcome:
        """All tasks to their ends."""
        for name in self._tasks:
            self._at(0.0, "parameters", name)
        handlers = {
            "parameters": self._parameters,
            "collect": self._collect,
            "data": self._data,
            "computed": self._computed,
            "released": self._released,
        }
        ended = 0.0
        while math.isfinite(now := self._next_time()):
            while self._next_time() == now:
                for what, name, worker in self._due(now):
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

    def _next_time(self) -> float:
        event = self._events[0][0] if self._events else math.inf
        return event if self._processors is None else min(event, self._processors.next_end())

    def _due(self, now: float) -> list[tuple[str, str, int]]:
        """Take out what happens now: (what, task, worker)."""
        due: list[Any] = [] if self._processors is None else self._processors.end(now)
        while self._events and self._events[0][0] == now:
            due.append(heapq.heappop(self._events)[2:])
        return due

    def _compute_for(self, seconds: float, then: str, task: _Task, now: float, worker: int, device: int = -1) -> None:
        """Let work of `seconds` begin, on a core or on a device; `then` is what happens at its end."""
        if self._processors is None or seconds == 0:
            self._at(now + seconds, then, task.trace.name, worker)
        else:
            self._processors.begin((then, task.trace.name, worker), seconds, now, device)

    def _at(self, time: float, what: str, task: str = "", worker: int = 0) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, task, worker))

    def _parameters(self, task: _Task, now: float, _: int) -> None:
        """The round's parameters have arrived: collectors act; the next round's are told when to start."""
        trace = task.trace
        number = task.round
        startup, ready = self._ready(task, now)
        if number > 0:
            self._count(task, ready, now)
        task.parameters = now
        task.sent = [math.nan] * trace.workers
        task.startup = startup
        for worker in range(trace.workers):
            self._at(max(now, ready[worker]), "collect", trace.name, worker)
        if self._start_mode == "predicted":
            self._instruct(task, now)

    def _collect(self, task: _Task, now: float, worker: int) -> None:
        """Parameters and collector are there."""
        self._compute_for(task.trace.collect[task.round][worker], "data", task, now, worker)

    def _instruct(self, task: _Task, now: float) -> None:
        """Issue what is due: for the next round, or for later ones where collectors start slowly."""
        begin = [now] * task.trace.workers
        for ahead in range(1, prewarm.best_ahead(task.history) + 1):
            target = task.round + ahead
            if target < task.trace.rounds and target not in task.instructions:
                found = prewarm.instruct(task.trace.name, target, begin, task.history, ahead)
                if found is not None:
                    task.instructions[target], task.starts[target] = found, list(found.start)

    def _ready(self, task: _Task, now: float) -> tuple[list[float], list[float]]:
        """How long each collector of the round that begins took to start, nan where it stayed, and when it is ready."""
        startup = task.trace.startup[task.round]
        if task.round == 0 or self._start_mode == "cold":
            return startup, [now + seconds for seconds in startup]
        took = [math.nan] * len(startup)
        ready = list(task.sent)
        for worker, start in enumerate(task.starts.get(task.round, [])):
            if not math.isnan(start):
                took[worker] = startup[worker]
                ready[worker] = min(start, now) + took[worker]  # once the parameters are there nobody waits for a plan
        return took, ready

    def _count(self, task: _Task, ready: list[float], now: float) -> None:
        starts = task.starts.pop(task.round, [math.nan] * len(ready))
        task.instructions.pop(task.round, None)
        for worker, (time, start) in enumerate(zip(ready, starts, strict=True)):
            if task.round <= self._uncounted:
                break
            predicted = not math.isnan(start)
            for warmth in (self.outcome.all_warmth, *([self.outcome.warmth] if predicted else [])):
                warmth.count(time, now)
                if self._start_mode == "cold":
                    warmth.absent_seconds += now - task.sent[worker]
                elif predicted:
                    warmth.absent_seconds += max(0.0, start - task.sent[worker])
        measured = Round(
            task.round - 1,
            begin=(task.parameters,) * len(ready),
            sent=tuple(task.sent),
            end=(now,) * len(ready),
            startup=tuple(task.startup),
        )
        self.outcome.rounds.setdefault(task.trace.name, []).append(measured)
        if self._start_mode == "predicted":
            task.history = task.history.add(measured)

    def _data(self, task: _Task, now: float, worker: int) -> None:
        """A worker's data have arrived; its collector ends."""
        task.sent[worker] = now
        self._correct(task, now, worker)
        task.pending.append((now, worker))
        if task.device >= 0 and not task.working:
            self._compute(task, now)
        elif task.device < 0 and len(task.pending) == 1:
            self._ask(task, now)

    def _correct(self, task: _Task, now: float, worker: int) -> None:
        for target, instruction in task.instructions.items():
            start = prewarm.correct(instruction, worker, task.round, now)
            if start is not None:
                starts = task.starts[target]
                self.outcome.warmth.corrections += not math.isclose(start, starts[worker], abs_tol=1e-9)
                self.outcome.warmth.late_corrections += starts[worker] < now
                starts[worker] = start

    def _ask(self, task: _Task, now: float) -> None:
        task.asked = now
        self._queue.request(Request(task.trace.name, now, task.round, task.trace.rounds - task.round))

    def _granted(self, grant: Grant, now: float) -> None:
        task = self._tasks[grant.request.task]
        task.device = grant.device
        task.granted = now
        task.busy = 0.0
        stays = self._tenants.get(grant.device) == task.trace.name and task.resident == grant.device
        self._tenants[grant.device] = task.trace.name
        task.resident = grant.device
        self._work(task, now, 0.0 if stays else task.trace.switch, "computed", -1)

    def _work(self, task: _Task, now: float, seconds: float, then: str, worker: int = 0) -> None:
        task.working = True
        self._compute_for(seconds, then, task, now, worker, task.device)

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
        lease = Lease(trace.name, task.round, task.device, task.asked, task.granted, now, task.busy)
        self.outcome.leases.append(lease)
        self._queue.release(trace.name, now)
        task.device = -1
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
    start: Start = "predicted",
    settings: PrewarmSettings | None = None,
    processors: Processors | None = None,
    uncounted: int = 0,
) -> Outcome:
    """Run `traces` on `devices` devices under a fresh `policy`, on fresh `processors` where collectors share cores.

    uncounted: rounds of each task, after its first, whose collectors `warmth` leaves out."""
    return Simulator(traces, devices, policy, start, settings, processors, uncounted).run()


# -- equal_tasks -------------------------------------------------------------------------------------------------------
# A pool as one typical task, and what other numbers of such tasks would do on the very queue: for pages and notebooks
# that let their reader try numbers.


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

"""The queue for devices: who holds, who waits, and who is next by a policy. Events in, grants out.

The lease master (ddrl.pool.leases) and the simulator use the same object, a pure state machine. It knows no
clock: each event carries its time [s]. Complexity: an event is O(1), a grant O(tasks) and what the policy takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddrl.core.errors import PoolError
from ddrl.pool.policies import Policy, Request
from ddrl.pool.records import Lease


@dataclass(frozen=True)
class Grant:
    """A device for a request; `waited` [s] since it was made."""

    request: Request
    device: int
    waited: float


@dataclass(frozen=True)
class _Hold:
    device: int
    since: float


class DeviceQueue:
    """Devices 0 ... devices - 1 among tasks by name.

    Invariant: a device has at most one holder; a task holds at most one device and waits at most once."""

    def __init__(self, policy: Policy, devices: int) -> None:
        if devices < 1:
            raise PoolError(f"a pool of {devices} devices: it needs at least 1")
        self.policy = policy
        self.held_seconds: dict[str, float] = {}
        """Device seconds of each task that ever joined, of holds that have ended (`device_seconds` adds the others)."""
        self._devices = set(range(devices))
        self._tasks: set[str] = set()
        self._holds: dict[str, _Hold] = {}
        self._waiting: dict[str, Request] = {}
        self._kept: dict[str, float] = {}  # since when a policy that keeps devices has kept one for the task
        policy.use(range(devices))

    def join(self, task: str, weight: float = 1.0) -> None:
        """Let a task ask for devices. PoolError where the name is taken or the weight is not positive."""
        if task in self._tasks:
            raise PoolError(f"two tasks of the pool have the name '{task}': give one another name")
        check_weight(task, weight)
        self._tasks.add(task)
        self.held_seconds.setdefault(task, 0.0)
        self.policy.join(task, weight)

    def leave(self, task: str, now: float) -> None:
        """Remove a task, ended or dead: its device is free, its request is dropped."""
        self._known(task)
        self._waiting.pop(task, None)
        if task in self._holds:
            self.release(task, now)
        if task in self._kept:
            self.held_seconds[task] += now - self._kept.pop(task)
        self._tasks.remove(task)
        self.policy.leave(task)

    def reweight(self, task: str, weight: float) -> None:
        """Change a task's weight."""
        self._known(task)
        check_weight(task, weight)
        self.policy.reweight(task, weight)

    def request(self, request: Request) -> None:
        """Queue a request. PoolError where the task holds a device or waits already."""
        self._known(request.task)
        if request.task in self._holds or request.task in self._waiting:
            raise PoolError(f"task '{request.task}' asks for a second device: it may hold or await one only")
        self._waiting[request.task] = request
        self.policy.asked(request)

    def cancel(self, task: str) -> None:
        """Drop the task's request, if it waits."""
        self._waiting.pop(task, None)

    def release(self, task: str, now: float) -> None:
        """Take the task's device back. PoolError where it holds none."""
        hold = self._holds.pop(task, None)
        if hold is None:
            raise PoolError(f"task '{task}' gives back a device that it does not hold")
        if task not in self._kept:
            self.held_seconds[task] += now - hold.since
        self.policy.released(task, hold.device, now - hold.since, now)

    def grants(self, now: float) -> list[Grant]:
        """Hand idle devices out until the policy gives no more."""
        given: list[Grant] = []
        idle = sorted(self._devices - {hold.device for hold in self._holds.values()})
        waiting = sorted(self._waiting.values(), key=lambda request: request.at)
        while idle and waiting:
            chosen = self.policy.choose(waiting, idle, now)
            if chosen is None:
                break
            request, device = chosen
            waiting.remove(request)
            idle.remove(device)
            del self._waiting[request.task]
            self._holds[request.task] = _Hold(device, now)
            if self.policy.keeps_devices:
                self._kept.setdefault(request.task, now)
            self.policy.granted(request, device, now)
            given.append(Grant(request, device, now - request.at))
        return given

    def next_time(self, now: float) -> float:
        """When `grants` must be called again although nothing happens [s]; inf: never."""
        return self.policy.next_time(now) if self._waiting else math.inf

    def device_seconds(self, now: float) -> float:
        """Device seconds held by all tasks until now, idle or busy."""
        running = (now - hold.since for task, hold in self._holds.items() if task not in self._kept)
        return sum(self.held_seconds.values()) + sum(running) + sum(now - since for since in self._kept.values())

    @property
    def tasks(self) -> frozenset[str]:
        """The tasks that have joined and not left."""
        return frozenset(self._tasks)

    @property
    def holders(self) -> dict[str, int]:
        """Device by task that holds one."""
        return {task: hold.device for task, hold in self._holds.items()}

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests not granted yet, in order of request."""
        return tuple(sorted(self._waiting.values(), key=lambda request: request.at))

    def check(self) -> None:
        """Assert the invariant of the class."""
        held = [hold.device for hold in self._holds.values()]
        assert len(held) == len(set(held)), f"a device has two holders: {self._holds}"
        assert not self._holds.keys() & self._waiting.keys(), "a task holds a device and waits"
        assert self._holds.keys() | self._waiting.keys() <= self._tasks, "a task that left holds or waits"
        assert all(seconds >= 0 for seconds in self.held_seconds.values()), "negative seconds"

    def _known(self, task: str) -> None:
        if task not in self._tasks:
            raise PoolError(f"there is no task '{task}' in the pool")


def check_weight(task: str, weight: float) -> None:
    """Raise PoolError for what cannot be a weight."""
    if not 0 < weight < math.inf:
        raise PoolError(f"task '{task}' has the weight {weight}: it must be positive and finite")


def jain_index(shares: Iterable[float]) -> float:
    """Fairness of shares: (sum x)^2 / (n sum x^2) (Jain, Chiu and Hawe, 1984); 1 where all are equal, 1/n at worst."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0


@dataclass
class _Sums:
    """Of all leases of one task, or of one device."""

    rounds: int = 0
    wait_seconds: float = 0.0
    longest_wait: float = 0.0  # s
    held_seconds: float = 0.0
    busy_seconds: float = 0.0
    expired: int = 0  # leases whose process ended

    def add(self, lease: Lease) -> None:
        """Count one lease. A round's parts are one round, and their waits add up."""
        waited = lease.granted - lease.asked
        self.rounds += lease.part == 0
        self.wait_seconds += waited
        self.longest_wait = max(self.longest_wait, waited)
        self.held_seconds += lease.released - lease.granted
        self.busy_seconds += lease.busy
        self.expired += lease.expired


class PoolFigures:
    """Sums over leases that have ended, by task and by device: memory does not grow with a pool's age. devices: their
    names, in the order of the leases' numbers."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._by_task = defaultdict[str, _Sums](_Sums)
        self._by_device = [_Sums() for _ in devices]

    def add(self, lease: Lease) -> None:
        """Count a lease that has ended."""
        self._by_task[lease.task].add(lease)
        self._by_device[lease.device].add(lease)

    def of_task(self, task: str) -> dict[str, Any]:
        """The sums of one task."""
        return asdict(self._by_task[task])

    def devices(self, wall: float) -> list[dict[str, Any]]:
        """One row a device; shares are None where they would divide by nothing. wall: seconds of the pool so far."""
        return [
            {
                "device": name,
                "leases": sums.rounds,
                "held_seconds": sums.held_seconds,
                "busy_seconds": sums.busy_seconds,
                "busy_per_held": _share(sums.busy_seconds, sums.held_seconds),
                "busy_per_wall": _share(sums.busy_seconds, wall),
            }
            for name, sums in zip(self._devices, self._by_device, strict=True)
        ]

    def totals(self, wall: float) -> dict[str, float | None]:
        """Over all devices."""
        held = sum(sums.held_seconds for sums in self._by_device)
        busy = sum(sums.busy_seconds for sums in self._by_device)
        return {
            "held_seconds": held,
            "busy_seconds": busy,
            "busy_per_held": _share(busy, held),
            "busy_per_wall": _share(busy, wall * len(self._devices)),
            "wait_seconds": sum(sums.wait_seconds for sums in self._by_task.values()),
            "longest_wait": max((sums.longest_wait for sums in self._by_task.values()), default=0.0),
        }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None

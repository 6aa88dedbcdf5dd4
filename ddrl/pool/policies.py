"""The queue for devices, and its policies: which waiting task gets which idle device (`pool.policy`).

`DeviceQueue` calls a policy and keeps the invariants (one holder a device, one device a task), so that a policy cannot
break them. Both are pure state machines that know time [s] only from their arguments: `ddrl.pool.leases` and
`ddrl.pool.simulator` use the same objects. An event is O(1), a grant O(tasks) and what the policy takes.

Each policy proves its bound on one wait, for K tasks on M devices with holds of at most G seconds; a test holds it to
the bound. A policy of a user is a class with a `name`, derived from `Policy`, written package.module:Class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddrl.core.config import setting
from ddrl.core.errors import PoolError


@dataclass(frozen=True)
class Request:
    """A task's request for a device.

    at: when it was made [s]; round: the task's round; remaining: rounds until the task ends, this one included (nan:
    not known); part: of the round, where a task gives its device back between gradients."""

    task: str
    at: float
    round: int = 0
    remaining: float = math.nan
    part: int = 0


class Policy:
    """Base of all policies; each must define `choose`.

    The queue calls the other methods as events happen: a task joins and leaves, requests a device, gets one, gives it
    back. All times are seconds on one clock and never decrease."""

    name: ClassVar[str] = ""
    Settings: ClassVar[type | None] = None
    """A frozen dataclass of the policy's own settings, the table [pool.NAME]; None: it has none."""
    splits_rounds: ClassVar[bool] = False
    """Whether a task gives its device back between the gradients of one round."""
    keeps_devices: ClassVar[bool] = False
    """Whether a device stays with its task between rounds, and counts as held, until the task leaves."""

    def use(self, devices: Sequence[int]) -> None:
        """The pool's devices, once, at its start."""

    def join(self, task: str, weight: float) -> None:
        """A task joins; weight > 0, 1 for an ordinary one."""

    def reweight(self, task: str, weight: float) -> None:
        """The task's weight changes."""

    def leave(self, task: str) -> None:
        """A task has ended or died; it no longer holds or waits for a device."""

    def asked(self, request: Request) -> None:
        """A request joins the queue."""

    def granted(self, request: Request, device: int, now: float) -> None:
        """The device that `choose` returned is handed over."""

    def released(self, task: str, device: int, held: float, now: float) -> None:
        """A device is given back after `held` [s]."""

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int] | None:
        """One grant, or None for none now; both sequences have entries. `waiting` is in order of request."""
        raise NotImplementedError

    def next_time(self, now: float) -> float:
        """When `choose` may answer otherwise although nothing has happened [s]; inf: never."""
        return math.inf


class Fifo(Policy):
    """First in, first out: the oldest request gets any idle device.

    Bound on waiting, K tasks, M devices, holds of at most G seconds: ceil((K - M) / M) G, and 0 where K <= M. A request
    that waits finds all M devices held, so at most K - 1 - M older requests wait; it is granted with the (K - M)-th
    release at the latest, and M devices make M releases in each G seconds."""

    name = "fifo"

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int]:
        return waiting[0], idle[0]


class RoundRobin(Policy):
    """Round-robin: the tasks form a circle; an idle device goes to the first waiting one after the last served.

    RollMux (2025) shows it to be optimal within a group of tasks whose rounds are alike. Bound on waiting, K tasks, M
    devices, holds of at most G seconds: ceil(K / M) G, and 0 where K <= M. While a task waits, each grant moves the
    pointer to a task between the pointer and the waiting one, so each of the K - 1 others is granted at most once
    before it: it is granted with the K-th release at the latest, and M devices make M releases in each G seconds."""

    name = "round_robin"

    def __init__(self) -> None:
        self._circle: list[str] = []  # the next task to be served first

    def join(self, task: str, weight: float) -> None:
        self._circle.append(task)

    def leave(self, task: str) -> None:
        self._circle.remove(task)

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int]:
        """The first waiting task of the circle."""
        return min(waiting, key=lambda request: self._circle.index(request.task)), idle[0]

    def granted(self, request: Request, device: int, now: float) -> None:
        """Turn the circle until the task is last."""
        turn = self._circle.index(request.task) + 1
        self._circle = self._circle[turn:] + self._circle[:turn]


@dataclass(frozen=True)
class SlicesSettings:
    """Table [pool.slices]."""

    seconds: float = setting(1.0, "s", "Length of one task's slice of a device.", gt=0)


class Slices(Policy):
    """Static time slices: each task has fixed slices of one device and may begin a round only within them; a baseline.

    The tasks are dealt to the devices in the order in which they joined; those of one device take turns of `seconds`
    each, counted from time 0. A round that has begun runs to its end, into the next slice if need be. Slices are not
    lent: a slice whose task is not ready stays empty.

    Bound on waiting where no hold G is longer than a slice: n slices of its device's n tasks, plus G."""

    name = "slices"
    Settings = SlicesSettings

    def __init__(self, settings: SlicesSettings | None = None) -> None:
        self.settings = settings or SlicesSettings()
        self._tasks: list[str] = []
        self._devices: Sequence[int] = (0,)

    def use(self, devices: Sequence[int]) -> None:
        self._devices = devices

    def join(self, task: str, weight: float) -> None:
        self._tasks.append(task)

    def leave(self, task: str) -> None:
        """Its slices go to the other tasks."""
        self._tasks.remove(task)

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int] | None:
        """A waiting task whose slice it is."""
        for request in waiting:
            place = self._tasks.index(request.task) % len(self._devices)
            if self._devices[place] in idle and self._tenant(place, now) == request.task:
                return request, self._devices[place]
        return None

    def next_time(self, now: float) -> float:
        """The next slice's begin."""
        begin = (math.floor(now / self.settings.seconds) + 1) * self.settings.seconds
        return begin if begin > now else begin + self.settings.seconds  # rounding

    def _tenant(self, place: int, now: float) -> str:
        tenants = self._tasks[place :: len(self._devices)]
        return tenants[math.floor(now / self.settings.seconds) % len(tenants)]


class Exclusive(Policy):
    """Exclusive devices: a task keeps its device from its first round to its end; a baseline.

    There is no bound on waiting: with more tasks than devices a task waits until another one ends."""

    name = "exclusive"
    keeps_devices = True

    def __init__(self) -> None:
        self._owners: dict[str, int] = {}

    def leave(self, task: str) -> None:
        self._owners.pop(task, None)

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int] | None:
        """The device that the task keeps, else one that nobody keeps."""
        unowned = [device for device in idle if device not in self._owners.values()]
        for request in waiting:
            owned = self._owners.get(request.task)
            if owned is None and unowned:
                return request, unowned[0]
            if owned is not None and owned in idle:
                return request, owned
        return None

    def granted(self, request: Request, device: int, now: float) -> None:
        self._owners[request.task] = device


_NEW_WEIGHT = 0.3  # of the newest round in the mean round's exponential average


@dataclass(frozen=True)
class FairSettings:
    """Table [pool.fair]."""

    patience: float = setting(
        4.0, "longest holds", "Wait after which a request goes first; divided by the task's weight.", ge=0
    )


@dataclass
class _Account:
    """What is measured of one task."""

    weight: float
    served: float = 0.0  # device seconds
    round_seconds: float = math.nan  # mean of a round without its waits
    round: int = -1  # the newest one, its first request's time, and its waits
    asked: float = math.nan
    waited: float = 0.0
    due: float = math.inf  # of the current request


class Fair(Policy):
    """The task with the most work remaining first, the least served among equals, within a bound on waiting.

    A request becomes due when it has waited `patience / weight` times the longest hold seen so far. Due requests go
    first, in the order in which they became due. Otherwise the task with the greatest weight x remaining seconds goes
    first: the pool ends when its longest task ends, so that task must not wait (most work remaining, as in job shops).
    Remaining seconds are the remaining rounds times the task's mean round without waits, both measured here. Tasks that
    do not state their remaining rounds come before those that do; among them the one that has held least per weight
    goes first (fair sharing).

    Bound on waiting. K tasks, M devices, no hold longer than G, one request a task at a time: a task of weight w waits
    at most

        (patience / w + ceil((K - M) / M)) G        where K > M, else 0.

    Proof. Let request x be made at t and wait. It becomes due at d <= t + (patience / w) G, for no hold seen is longer
    than G. While x waits no device is idle, because `choose` always gives one. So at d all M devices are held, and at
    most K - M - 1 other tasks wait. From d on each device that is released is granted to a due request, the one due
    longest. A request made after d is due after d, hence behind x. So before x only requests that waited at d can be
    granted, at most K - M - 1 of them, and x is granted with the (K - M)-th release after d at the latest. Each device
    is released within G of d, and within G of each further grant: M devices make at least M n releases in n G seconds,
    K - M of them in ceil((K - M) / M) G."""

    name = "fair"
    Settings = FairSettings

    def __init__(self, settings: FairSettings | None = None) -> None:
        self.settings = settings or FairSettings()
        self._accounts: dict[str, _Account] = {}
        self._longest_hold = 0.0

    def join(self, task: str, weight: float) -> None:
        """Open its account level with the least served, or it would get every device until it has caught up."""
        account = _Account(weight)
        account.served = weight * min((other.served / other.weight for other in self._accounts.values()), default=0.0)
        self._accounts[task] = account

    def reweight(self, task: str, weight: float) -> None:
        """From the next request on; what it has been served counts by the new weight."""
        self._accounts[task].weight = weight

    def leave(self, task: str) -> None:
        del self._accounts[task]

    def asked(self, request: Request) -> None:
        """Measure the round that ends, and set when the request is due."""
        account = self._accounts[request.task]
        if request.round != account.round:
            seconds = request.at - account.asked - account.waited
            if not math.isnan(seconds):
                old = seconds if math.isnan(account.round_seconds) else account.round_seconds
                account.round_seconds = old + _NEW_WEIGHT * (seconds - old)
            account.round = request.round
            account.asked = request.at
            account.waited = 0.0
        account.due = request.at + self.settings.patience / account.weight * self._longest_hold

    def granted(self, request: Request, device: int, now: float) -> None:
        """Its wait is no part of the round."""
        self._accounts[request.task].waited += now - request.at

    def released(self, task: str, device: int, held: float, now: float) -> None:
        self._accounts[task].served += held
        self._longest_hold = max(self._longest_hold, held)

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int]:
        """Due requests by due time, then most work remaining."""
        return min(waiting, key=lambda request: self._order(request, now)), idle[0]

    def _order(self, request: Request, now: float) -> tuple[bool, float, float, float]:
        """The least is granted first."""
        account = self._accounts[request.task]
        if account.due <= now:
            return False, account.due, request.at, 0.0
        remaining = account.weight * request.remaining * account.round_seconds
        return True, -math.inf if math.isnan(remaining) else -remaining, account.served / account.weight, request.at


class BetweenGradients(Fair):
    """`Fair`, with the device given back between the gradients of one round.

    A task does not hold its device while it waits for its slower workers' data; its price is a wait and a switch for
    each gradient, and with more than one lease a task and round. The bound of `fair` holds for each single wait."""

    name = "between_gradients"
    Settings = FairSettings
    splits_rounds = True


@dataclass(frozen=True)
class Grant:
    """A device for a request, from the time `at` [s] on."""

    request: Request
    device: int
    at: float

    @property
    def waited(self) -> float:
        """Seconds since the request was made."""
        return self.at - self.request.at


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
        self._holds: dict[str, Grant] = {}
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

    def release(self, task: str, now: float) -> Grant:
        """Take the task's device back: the grant that ends. PoolError where it holds none."""
        hold = self._holds.pop(task, None)
        if hold is None:
            raise PoolError(f"task '{task}' gives back a device that it does not hold: acquire one first")
        if task not in self._kept:
            self.held_seconds[task] += now - hold.at
        self.policy.released(task, hold.device, now - hold.at, now)
        return hold

    def grants(self, now: float) -> list[Grant]:
        """Hand idle devices out until the policy gives no more."""
        given: list[Grant] = []
        idle = sorted(self._devices - {hold.device for hold in self._holds.values()})
        waiting = list(self.waiting)
        while idle and waiting:
            chosen = self.policy.choose(waiting, idle, now)
            if chosen is None:
                break
            request, device = chosen
            waiting.remove(request)
            idle.remove(device)
            del self._waiting[request.task]
            self._holds[request.task] = grant = Grant(request, device, now)
            if self.policy.keeps_devices:
                self._kept.setdefault(request.task, now)
            self.policy.granted(request, device, now)
            given.append(grant)
        return given

    def next_time(self, now: float) -> float:
        """When `grants` must be called again although nothing happens [s]; inf: never."""
        return self.policy.next_time(now) if self._waiting else math.inf

    def device_seconds(self, now: float) -> float:
        """Device seconds held by all tasks until now, idle or busy."""
        running = (now - hold.at for task, hold in self._holds.items() if task not in self._kept)
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
            raise PoolError(
                f"there is no task '{task}' in the pool: name one of {', '.join(sorted(self._tasks)) or 'none yet'}"
            )


def check_weight(task: str, weight: object) -> None:
    """Raise PoolError for what cannot be a weight."""
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight < math.inf:
        raise PoolError(f"task '{task}' has the weight {weight}: it must be positive and finite")

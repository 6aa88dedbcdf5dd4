"""Static time slices: each task has fixed slices of one device and may begin a round only within them.

The tasks are dealt to the devices in the order in which they joined; those of one device take turns of `seconds` each,
counted from time 0. A round that has begun runs to its end, into the next slice if need be. Slices are not lent: a
slice whose task is not ready stays empty; that is what the other policies are compared with.

Bound on waiting where no hold G is longer than a slice: n slices of its device's n tasks, plus G."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddrl.core.config import setting
from ddrl.pool.policy import Policy, Request


@dataclass(frozen=True)
class SlicesSettings:
    """Table [pool.slices]."""

    seconds: float = setting(1.0, "s", "Length of one task's slice of a device.", gt=0)


class Slices(Policy):
    """Fixed turns, used or not."""

    name = "slices"
    Settings = SlicesSettings

    def __init__(self, settings: SlicesSettings | None = None) -> None:
        self.settings = settings or SlicesSettings()
        self._tasks: list[str] = []
        self._devices: Sequence[int] = (0,)

    def use(self, devices: Sequence[int]) -> None:
        """Deal the tasks to these."""
        self._devices = devices

    def join(self, task: str, weight: float) -> None:
        """One more slice of a device's turn."""
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

    def longest_wait(self, task: str, tasks: int, devices: int, longest_hold: float) -> float:
        """n slices and one hold; inf where a hold can outlast a slice."""
        if longest_hold > self.settings.seconds:
            return math.inf
        return math.ceil(tasks / devices) * self.settings.seconds + longest_hold

    def _tenant(self, place: int, now: float) -> str:
        tenants = self._tasks[place :: len(self._devices)]
        return tenants[math.floor(now / self.settings.seconds) % len(tenants)]

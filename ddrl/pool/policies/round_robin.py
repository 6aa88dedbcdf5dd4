"""Round-robin: tasks stand in a circle; an idle device goes to the first waiting one behind the last that got one.

RollMux (2025) shows it to be optimal within a group of tasks whose rounds are alike. Bound on waiting, K tasks, M
devices, holds of at most G seconds: ceil(K / M) G, and 0 where K <= M. While a task waits, each grant moves the
circle's hand to another task between the hand and the waiting one, so each of the K - 1 others is granted at most once
before it: it is granted with the K-th release at the latest, and M devices make M releases in each G seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddrl.pool.policy import Policy, Request


class RoundRobin(Policy):
    """Order of a circle of tasks, in which they joined."""

    name = "round_robin"

    def __init__(self) -> None:
        self._circle: list[str] = []  # the next task to be served stands first

    def join(self, task: str, weight: float) -> None:
        """At the circle's end."""
        self._circle.append(task)

    def leave(self, task: str) -> None:
        """Out of the circle."""
        self._circle.remove(task)

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int]:
        """The first waiting task of the circle."""
        return min(waiting, key=lambda request: self._circle.index(request.task)), idle[0]

    def granted(self, request: Request, device: int, now: float) -> None:
        """Turn the circle until the task stands last."""
        turn = self._circle.index(request.task) + 1
        self._circle = self._circle[turn:] + self._circle[:turn]

    def longest_wait(self, task: str, tasks: int, devices: int, longest_hold: float) -> float:
        """ceil(K / M) G; 0 where there is a device for each task."""
        return math.ceil(tasks / devices) * longest_hold if tasks > devices else 0.0

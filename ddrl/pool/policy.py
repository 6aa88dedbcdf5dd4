"""What a queue policy is: it says which waiting task gets which idle device, and nothing else.

`ddrl.pool.queue.DeviceQueue` calls it and keeps the invariants (one holder a device, one device a task), so that a
policy cannot break them. A policy is a pure state machine: it knows time only from its arguments, so the same object
runs in the simulator and in a real pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Request:
    """A task's wish for a device.

    at: when it was made [s]; round: the task's round; remaining: rounds until the task ends, this one included (nan:
    not known)."""

    task: str
    at: float
    round: int = 0
    remaining: float = math.nan


@dataclass(frozen=True)
class NoSettings:
    """The table of a policy that has no settings of its own."""


class Policy:
    """Base of all policies; `choose` is what each must say.

    The other methods are called by the queue as things happen: a task joins and leaves, asks, gets a device, gives it
    back. All times are seconds on one clock and never decrease."""

    name: ClassVar[str] = ""
    Settings: ClassVar[type] = NoSettings
    splits_rounds: ClassVar[bool] = False
    """Whether a task gives its device back between the gradients of one round."""
    keeps_devices: ClassVar[bool] = False
    """Whether a device stays with its task between rounds, and counts as held, until the task leaves."""

    def use(self, devices: Sequence[int]) -> None:
        """The pool's devices: at its start, and again whenever one has disappeared."""

    def join(self, task: str, weight: float) -> None:
        """A task joins; weight > 0, 1 for an ordinary one."""

    def reweight(self, task: str, weight: float) -> None:
        """The task's weight changes."""

    def leave(self, task: str) -> None:
        """A task has ended or died; it holds nothing and waits for nothing any more."""

    def asked(self, request: Request) -> None:
        """A request joins the queue."""

    def granted(self, request: Request, device: int, now: float) -> None:
        """What `choose` gave is handed over."""

    def released(self, task: str, device: int, held: float, now: float) -> None:
        """A device comes back after `held` [s]."""

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int] | None:
        """One grant, or None for none now; both sequences have entries. `waiting` is in order of request."""
        raise NotImplementedError

    def next_time(self, now: float) -> float:
        """When `choose` may answer otherwise although nothing has happened [s]; inf: never."""
        return math.inf

    def longest_wait(self, task: str, tasks: int, devices: int, longest_hold: float) -> float:
        """Bound on one wait of `task` [s], while `tasks` share `devices` and no hold is longer; inf: there is none."""
        return math.inf

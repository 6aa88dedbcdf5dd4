"""Ours: the task with the most work before it first, the least served among equals, and nobody waits beyond a bound.

A request becomes due when it has waited `patience / weight` times the longest hold seen so far. Due requests go first,
by the time at which they became due. Otherwise the task with the greatest weight x remaining seconds goes first: the
pool ends when its longest task ends, so that task must not wait (most work remaining, as in job shops). Remaining
seconds are the remaining rounds times the task's mean round without waits, both measured here. Among tasks that do not
say how many rounds remain, and which come first, the one goes first that has held least per weight (fair sharing).

Bound on waiting. K tasks, M devices, no hold longer than G, one request a task at a time: a task of weight w waits at
most

    (patience / w + ceil((K - M) / M)) G        where K > M, else 0.

Proof. Let request x be made at t and wait. It becomes due at d <= t + (patience / w) G, for no hold seen is longer than
G. While x waits no device is idle, because `choose` always gives one. So at d all M devices are held, and at most K - 1
- M other tasks wait. From d on each device that comes back goes to a due request, the one due longest. Whoever asks
after d is due after d, hence behind x. So before x only requests that waited at d can be granted, at most K - 1 - M of
them, and x is granted with the (K - M)-th release after d at the latest. Each device is released within G of d, and
within G of each further grant: M devices make at least M n releases in n G seconds, K - M of them in ceil((K - M) / M)
G."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddrl.core.config import setting
from ddrl.pool.policy import Policy, Request

_NEW_WEIGHT = 0.3  # of the newest round in the mean round's exponential average


@dataclass(frozen=True)
class FairSettings:
    """Table [pool.fair]."""

    patience: float = setting(
        4.0, "longest holds", "Wait after which a request goes first; divided by the task's weight.", ge=0
    )


@dataclass
class _Account:
    """What is known of one task."""

    weight: float
    served: float = 0.0  # device seconds
    round_seconds: float = math.nan  # mean of a round without its waits
    round: int = -1  # the newest one, its first request's time, and its waits
    asked: float = math.nan
    waited: float = 0.0
    due: float = math.inf  # of the present request


class Fair(Policy):
    """Most work remaining first, within a bound on waiting."""

    name = "fair"
    Settings = FairSettings

    def __init__(self, settings: FairSettings | None = None) -> None:
        self.settings = settings or FairSettings()
        self._accounts: dict[str, _Account] = {}
        self._longest_hold = 0.0

    def join(self, task: str, weight: float) -> None:
        """Open its account, level with the least served, or it would hold the devices until it has caught up."""
        account = _Account(weight)
        account.served = weight * min((other.served / other.weight for other in self._accounts.values()), default=0.0)
        self._accounts[task] = account

    def reweight(self, task: str, weight: float) -> None:
        """From the next request on; what it has been served counts by the new weight."""
        self._accounts[task].weight = weight

    def leave(self, task: str) -> None:
        """Close its account."""
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
        """Count what it held."""
        self._accounts[task].served += held
        self._longest_hold = max(self._longest_hold, held)

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int]:
        """Due requests by due time, then most work remaining."""
        return min(waiting, key=lambda request: self._order(request, now)), idle[0]

    def longest_wait(self, task: str, tasks: int, devices: int, longest_hold: float) -> float:
        """(patience / w + ceil((K - M) / M)) G."""
        if tasks <= devices:
            return 0.0
        patience = self.settings.patience / self._accounts[task].weight
        return (patience + math.ceil((tasks - devices) / devices)) * longest_hold

    def _order(self, request: Request, now: float) -> tuple[bool, float, float, float]:
        """What sorts first is granted first."""
        account = self._accounts[request.task]
        if account.due <= now:
            return False, account.due, request.at, 0.0
        remaining = account.weight * request.remaining * account.round_seconds
        return True, -math.inf if math.isnan(remaining) else -remaining, account.served / account.weight, request.at

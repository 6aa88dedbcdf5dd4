"""First in, first out: the oldest request gets any idle device.

Bound on waiting, K tasks, M devices, holds of at most G seconds: ceil((K - M) / M) G, and 0 where K <= M. A request
that waits finds all M devices held, so at most K - 1 - M older requests wait; it is granted with the (K - M)-th release
at the latest, and M devices make M releases in each G seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddrl.pool.policy import Policy, Request


class Fifo(Policy):
    """Order of request."""

    name = "fifo"

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int]:
        """The oldest request, the first idle device."""
        return waiting[0], idle[0]

    def longest_wait(self, task: str, tasks: int, devices: int, longest_hold: float) -> float:
        """ceil((K - M) / M) G."""
        return math.ceil(max(0, tasks - devices) / devices) * longest_hold

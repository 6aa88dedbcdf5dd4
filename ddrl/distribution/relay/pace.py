"""The root's watch over the pace of its models: whether it is time to measure the links again."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

RECENT = 5  # models
SLOWER = 1.5
STUCK = 3.0


class PaceWatch:
    """Notices that models have become much slower than they were under the same plan: then a link has changed, or the
    machine is busy.

    The root's alone. `suspicious` at most once in `interval` seconds, and half as often each time. `stuck`: times as
    long as usual from which on one model under way is enough, or that none has ended although one was under way (then
    one and a half times as long as a whole model at least).
    """

    def __init__(
        self, interval: float = 20.0, stuck: float = STUCK, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._interval = interval
        self._stuck = stuck
        self._begun: dict[int, float] = {}
        self._first: list[tuple[float, float]] = []  # (seconds, those for which nothing else was awaited)
        self._last: deque[float] = deque(maxlen=RECENT)
        self._ended_at = -math.inf
        self._rest_until = clock() + interval

    def restart(self) -> None:
        """A new plan: forget how long models took."""
        if self.suspicious:
            self._interval *= 2
        self._begun.clear()
        self._first.clear()
        self._last.clear()
        self._ended_at = -math.inf
        self._rest_until = self._clock() + self._interval

    def began(self, sequence: int) -> None:
        """A model has left."""
        self._begun[sequence] = self._clock()

    def ended(self, sequence: int) -> None:
        """It has been confirmed everywhere."""
        if (begun := self._begun.pop(sequence, None)) is None:
            return
        now = self._clock()
        if len(self._first) < RECENT:
            self._first.append((now - begun, now - max(begun, self._ended_at)))
        else:
            self._last.append(now - begun)
        self._ended_at = now

    @property
    def suspicious(self) -> bool:
        """Whether the last models took half as long again as the first, or none has ended for several times as long as
        usual, and the interval has passed."""
        now = self._clock()
        if len(self._first) < RECENT or now < self._rest_until:
            return False
        seconds, awaited = (statistics.median(times) for times in zip(*self._first, strict=True))
        if self._begun:
            oldest = min(self._begun.values())
            waited = now - max(oldest, self._ended_at)
            if now - oldest > self._stuck * seconds or waited > max(self._stuck * awaited, SLOWER * seconds):
                return True
        return len(self._last) == RECENT and statistics.median(self._last) > SLOWER * seconds

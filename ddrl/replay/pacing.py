"""Pacing: how much may be recorded and whether a batch may be drawn, so that recording and learning keep in step.

Nothing here blocks: pacing answers questions and counts; the caller waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from ddrl.core.errors import CheckpointError, ConfigError

UNLIMITED = 1 << 40


class Pacing(Protocol):
    """The rates of recording and drawing that a source of experience allows.

    May be left out: missing() -> int, how many rows at least must be recorded before `ready` says yes."""

    def insertable(self) -> int:
        """Rows that may be recorded now; UNLIMITED where nothing limits."""
        ...

    def ready(self) -> bool:
        """Whether a batch may be drawn now."""
        ...

    def change(self, samples_per_insert: float) -> None:
        """Keep this ratio of transitions learned from to transitions recorded, where the source keeps one."""
        ...


class RateLimiter:
    """Keeps samples / inserts near samples_per_insert, within `tolerance` [transitions recorded] either way.

    With error = samples - samples_per_insert * (inserts - min_size):

        draw up to n samples   while  error + n <= tolerance * samples_per_insert     (the learner is not too far ahead)
        insert n transitions   while  error - samples_per_insert * n >= -tolerance * samples_per_insert

    For n small beside the tolerance one of the two always holds, so recording and drawing never both wait (the equation
    is that of Reverb, Cassirer et al. 2021). Before min_size inserts nothing may be drawn and everything may be
    inserted. samples_per_insert = 0: inserts never wait, and draws only wait for min_size.

    As a `Pacing`: a batch takes up to `batch` samples, and `available` says whether there is anything to draw. While
    there is not, nothing limits recording: the learner could never catch up.
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size: int,
        tolerance: float,
        batch: int = 1,
        available: Callable[[], bool] = lambda: True,
    ) -> None:
        if samples_per_insert < 0 or min_size < 1 or tolerance <= 0:
            raise ConfigError(
                f"samples_per_insert ({samples_per_insert}) must be at least 0, min_size ({min_size}) at least 1 and "
                f"tolerance ({tolerance}) above 0"
            )
        self.samples_per_insert = float(samples_per_insert)
        self.min_size = int(min_size)
        self.tolerance = float(tolerance)
        self.inserts = 0
        self.samples = 0
        self._configured = self.samples_per_insert
        self._batch = batch
        self._available = available

    @property
    def samples_behind(self) -> float:
        """Samples that the learner owes [transitions]; negative: it is ahead."""
        return self.samples_per_insert * (self.inserts - self.min_size) - self.samples

    def insertable(self) -> int:
        """How many transitions may be recorded now; UNLIMITED where nothing limits."""
        if self.samples_per_insert == 0 or not self._available():
            return UNLIMITED
        room = self.tolerance - self.samples_behind / self.samples_per_insert
        one = room >= min(1.0, self.tolerance)  # a tolerance below 1 must not block both sides
        return max(int(one), math.floor(min(max(room, 0.0), UNLIMITED)), self.min_size - self.inserts)

    def ready(self) -> bool:
        """Whether a batch may be drawn, and there is something to draw."""
        return self.can_sample(self._batch) and self._available()

    def can_sample(self, count: int = 1) -> bool:
        """Whether `count` more transitions may be drawn now."""
        if self.inserts < self.min_size:
            return False
        if self.samples_per_insert == 0:
            return True
        band = self.tolerance * self.samples_per_insert
        return min(count, band) - self.samples_behind <= band

    def inserted(self, count: int) -> None:
        """Count transitions recorded."""
        self.inserts += count

    def sampled(self, count: int) -> None:
        """Count transitions drawn."""
        self.samples += count

    def change(self, samples_per_insert: float) -> None:
        """Keep another ratio from now on; what was drawn and recorded until now counts as balanced."""
        if samples_per_insert < 0:
            raise ConfigError(f"samples_per_insert ({samples_per_insert}) must be at least 0")
        if samples_per_insert != self.samples_per_insert:
            self._restart(samples_per_insert)

    def _restart(self, samples_per_insert: float) -> None:
        self.samples_per_insert = float(samples_per_insert)
        self.samples = round(self.samples_per_insert * max(0, self.inserts - self.min_size))

    def state(self) -> dict[str, float]:
        """For a checkpoint: the counts, and the ratios that belong to them."""
        return {
            "inserts": self.inserts,
            "samples": self.samples,
            "samples_per_insert": self.samples_per_insert,
            "configured": self._configured,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint.

        A ratio that was changed during the run is kept; where the settings name another one than they did then, that
        of the settings is used, as after `change`."""
        try:
            inserts = int(state["inserts"])
            samples = int(state["samples"])
            configured = float(state.get("configured", self._configured))
            ratio = float(state.get("samples_per_insert", configured))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the rate limiter's state {state!r} cannot be used ({error!r})") from None
        self.inserts = inserts
        self.samples = samples
        if configured == self._configured:
            self.samples_per_insert = ratio
        else:
            self._restart(self._configured)

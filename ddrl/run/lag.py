"""Policy lag: how old the policies are whose rows arrive and are learned from, and a bound of it.

The lag of a sample is the learner's version when it is consumed less the version that acted. Its parts, counted for
each sample by the version that acted: in flight (versions published between choosing the action and the row's arrival
at the trainer, the lane included; rows of one version that arrived at different times count their mean) and in queue
(versions published while the row was in replay). Unpublished: updates done but not yet published when the sample was
consumed. Lag in seconds is measured from the publish time of the version that acted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config
from ddrl.core.rows import RowKind

RECENT = 1 << 15  # [samples] window of the live percentiles
PENDING = 1 << 13  # [samples] kept before they are counted


class Recent:
    """The newest values of a series that never ends, for percentiles of the moment."""

    def __init__(self) -> None:
        self._values = np.full(RECENT, -1, np.int64)
        self._next = 0
        self._counts = np.zeros(1024, np.int64)  # by value: how many there are; sorting takes a millisecond a look

    def add(self, values: NDArray[np.int64]) -> None:
        """Append values [n], at least 0."""
        newest = values[-RECENT:]
        places = (self._next + np.arange(len(newest))) % RECENT
        replaced = self._values[places]
        self._values[places] = newest
        self._next = (self._next + len(newest)) % RECENT
        added = np.bincount(newest, minlength=len(self._counts))
        removed = np.bincount(replaced[replaced >= 0], minlength=len(added))
        if len(added) > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(len(added) - len(self._counts), np.int64)])
        self._counts += added
        self._counts -= removed

    def percentile(self, percentile: float) -> float:
        """NaN before the first value."""
        cumulated = np.cumsum(self._counts)
        present = int(cumulated[-1])
        if not present:
            return float("nan")
        place = percentile / 100.0 * (present - 1)
        below = math.floor(place)
        lower, upper = np.searchsorted(cumulated, (below, math.ceil(place)), side="right").tolist()
        return float(lower + (place - below) * (upper - lower))


class Pending:
    """Versions that acted beside the newest version then, kept until they are counted: many at once cost a tenth."""

    def __init__(self) -> None:
        self._acted = np.zeros(PENDING, np.int64)
        self._newest = np.zeros(PENDING, np.int64)
        self._count = 0

    def fits(self, count: int) -> bool:
        """Whether so many more are kept. After `take` any number is."""
        return self._count + count <= len(self._acted)

    def add(self, acted: NDArray[np.uint64], newest: int) -> None:
        """Keep versions [n]."""
        end = self._count + len(acted)
        if end > len(self._acted):
            self._acted = np.zeros(end, np.int64)
            self._newest = np.zeros(end, np.int64)
        self._acted[self._count : end] = acted
        self._newest[self._count : end] = newest
        self._count = end

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Versions that acted [n], and their lags [n]; nothing is kept any more. Valid until the next `add`."""
        acted = self._acted[: self._count]
        lag = np.maximum(self._newest[: self._count] - acted, 0)
        self._count = 0
        return acted, lag


class LagMeter:
    """Counts every consumed sample's lag; exact over the whole run."""

    def __init__(self, newest: int = -1) -> None:
        """`newest`: the last version of the run this one resumes; such versions count as published now."""
        self._recent = {"arrived": Recent(), "consumed": Recent()}  # [versions], of rows and of samples
        self._pending = {"arrived": Pending(), "consumed": Pending()}
        self._histogram = np.zeros(1024, np.int64)  # lag in versions -> samples
        self._consumed = 0
        self._debt_sum = 0.0  # [updates]
        self._in_flight_sum = 0.0
        self._seconds_sum = 0.0
        versions = max(1024, newest + 1)
        self._publish_time = np.full(versions, time.monotonic())
        self._arrived = np.zeros((2, versions))  # by version that acted: rows, and their lags together

    def published(self, version: int) -> None:
        """A version is published now."""
        if version >= len(self._publish_time):
            more = max(len(self._publish_time), version)
            self._publish_time = np.concatenate([self._publish_time, np.zeros(more)])
            self._arrived = np.concatenate([self._arrived, np.zeros((2, more))], axis=1)
        self._publish_time[version] = time.monotonic()

    def arrived(self, acted: NDArray[np.uint64], newest: int) -> None:
        """Rows reached the trainer: [n] versions that acted."""
        self._add("arrived", acted, newest)

    def consumed(self, acted: NDArray[np.uint64], newest: int, unpublished: float = 0) -> None:
        """Samples were learned from: [B] versions that acted, `unpublished` updates (their mean) after version
        `newest`."""
        self._add("consumed", acted, newest)
        self._seconds_sum += len(acted) * time.monotonic()
        self._debt_sum += len(acted) * unpublished

    def _add(self, what: str, acted: NDArray[np.uint64], newest: int) -> None:
        pending = self._pending[what]
        if not pending.fits(len(acted)):
            self._settle()
        pending.add(acted, newest)

    def _settle(self) -> None:
        """Count what is pending; what arrived first, for it may be consumed by now."""
        arrived, lag = self._pending["arrived"].take()
        if len(arrived):
            self._recent["arrived"].add(lag)
            versions = np.minimum(arrived, len(self._publish_time) - 1)
            first = int(versions.min())
            rows = np.bincount(versions - first)
            self._arrived[:, first : first + len(rows)] += (rows, np.bincount(versions - first, lag))
        versions, lag = self._pending["consumed"].take()
        if not len(versions):
            return
        counts = np.bincount(lag)
        if len(counts) > len(self._histogram):
            self._histogram = np.concatenate([self._histogram, np.zeros(len(counts), np.int64)])
        self._histogram[: len(counts)] += counts
        self._recent["consumed"].add(lag)
        self._consumed += len(versions)
        known = np.clip(versions, 0, len(self._publish_time) - 1)
        self._seconds_sum -= float(self._publish_time[known].sum())
        rows, lags = self._arrived[:, known]
        self._in_flight_sum += float(np.minimum(lags / np.maximum(rows, 1), lag).sum())

    def recent(self, percentile: float, what: str = "consumed") -> float:
        """Percentile of the lag [versions] of the newest samples, or of the rows that "arrived"; NaN before the
        first."""
        self._settle()
        return self._recent[what].percentile(percentile)

    def summary(self) -> dict[str, Any]:
        """Percentiles over the whole run [versions], and mean parts."""
        self._settle()
        if not self._consumed:
            return {"p50": None, "p99": None}
        cumulated = np.cumsum(self._histogram)
        in_flight = self._in_flight_sum / self._consumed
        mean = float((self._histogram * np.arange(len(self._histogram))).sum() / self._consumed)
        return {
            "p50": int(np.searchsorted(cumulated, 0.50 * self._consumed)),
            "p99": int(np.searchsorted(cumulated, 0.99 * self._consumed)),
            "mean": mean,
            "mean_in_flight": in_flight,
            "mean_in_queue": mean - in_flight,
            "mean_unpublished": self._debt_sum / self._consumed,
            "mean_seconds": self._seconds_sum / self._consumed,
        }


class LagBound:
    """rollout.max_policy_lag: bounds the lag of rows on arrival, in updates made since the version that acted was
    published.

    `wait`: the trainer puts off its next update, and publishes what it has, until the rows of every rollout show a
    version recent enough: rows of one rollout arrive in order, so no later one is older. Where
    replay.samples_per_insert lets no rows in, updates go on; rows that this makes older are left out and counted, as
    with `drop`, and replay closes the gap in `step`. `weight` is done where samples are drawn
    (`ddrl.replay.sources`)."""

    def __init__(
        self, config: Config, rollouts: int, updates: int, absent: Callable[[], NDArray[np.bool_]] | None = None
    ) -> None:
        """`updates`: made so far; versions of before count as published now. `absent`: which rollouts have no process
        now [rollouts], for which nothing waits."""
        rollout = config.rollout
        self._absent = absent or (lambda: np.zeros(rollouts, np.bool_))
        self._most = rollout.max_policy_lag
        self._waits = rollout.at_max_lag == "wait"
        self._drops = rollout.at_max_lag != "weight"
        self._num_envs = config.env.num_envs
        self._made = np.full(1024, updates, np.int64)  # updates when a version was published
        self._seen = np.full(rollouts, updates, np.int64)  # the same, of the newest one in each rollout's rows

    @classmethod
    def of(
        cls, config: Config, rollouts: int, updates: int, absent: Callable[[], NDArray[np.bool_]] | None = None
    ) -> LagBound | None:
        """None where the lag is not bounded."""
        return cls(config, rollouts, updates, absent) if math.isfinite(config.rollout.max_policy_lag) else None

    def published(self, version: int, updates: int) -> None:
        """A version is published now, after so many updates."""
        if version >= len(self._made):
            more = np.full(max(len(self._made), version), self._made[0], np.int64)
            self._made = np.concatenate([self._made, more])
        self._made[version] = updates

    def admit(self, rows: NDArray[Any], updates: int) -> NDArray[Any]:
        """The rows that may be recorded, of those that arrived after so many updates. O(rows)."""
        acted = self._made[np.minimum(rows["policy_version"], len(self._made) - 1).astype(np.int64)]
        if self._waits:
            np.maximum.at(self._seen, rows["stream"] // self._num_envs, acted)
        if not self._drops:
            return rows
        late = (updates - acted > self._most) & (rows["kind"] == RowKind.STEP)
        return rows[~late] if late.any() else rows

    def allows(self, updates: int) -> bool:
        """Whether there may be so many updates now."""
        if not self._waits:
            return True
        late = updates - self._seen > self._most
        return not late.any() or not (late & ~self._absent()).any()

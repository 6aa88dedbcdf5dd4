"""Policy lag: how old the policy that acted was, when its sample was learned from.

lag = learner's version when the sample is consumed - the version that acted, per sample. Its parts, counted for each
sample by the version that acted: in flight (versions published between choosing the action and the row's arrival at the
trainer, the lane included; rows of one version that arrived at different times count their mean) and in queue (versions
published while the row stood in replay). Publish: updates done but not yet published when the sample was consumed. Lag
in seconds is measured from the publish time of the version that acted."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECENT = 1 << 15  # [samples] window of the live percentiles
PENDING = 1 << 13  # [samples] kept before they are counted


class Recent:
    """The newest values of a series that never ends, for percentiles of the moment."""

    def __init__(self) -> None:
        self._values = np.full(RECENT, -1, np.int64)
        self._next = 0

    def add(self, values: NDArray[np.int64]) -> None:
        """Append values [n], at least 0."""
        newest = values[-RECENT:]
        self._values[(self._next + np.arange(len(newest))) % RECENT] = newest
        self._next = (self._next + len(newest)) % RECENT

    def percentile(self, percentile: float) -> float:
        """NaN before the first value."""
        present = self._values[self._values >= 0]
        return float(np.percentile(present, percentile)) if len(present) else float("nan")


class LagMeter:
    """Counts every consumed sample's lag; exact over the whole run."""

    def __init__(self, newest: int = -1) -> None:
        """`newest`: the last version of the run this one resumes; such versions count as published now."""
        self.consumption = Recent()  # [versions], of samples and of rows
        self.arrival = Recent()
        self._histogram = np.zeros(1024, np.int64)  # lag in versions -> samples
        self._acted = np.zeros(PENDING, np.int64)
        self._newest = np.zeros(PENDING, np.int64)
        self._pending = 0  # how many of them are not counted yet
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
        if len(acted):
            lag = np.maximum(newest - acted.astype(np.int64), 0)
            self.arrival.add(lag)
            versions, rows = np.unique(
                np.minimum(acted, len(self._publish_time) - 1).astype(np.int64), return_counts=True
            )
            self._arrived[:, versions] += (rows, rows * np.maximum(newest - versions, 0))

    def consumed(self, acted: NDArray[np.uint64], newest: int, unpublished: int = 0) -> None:
        """Samples were learned from: [B] versions that acted, `unpublished` updates after version `newest`. Counting
        many at once costs a tenth."""
        count = len(acted)
        if self._pending + count > len(self._acted):
            self._settle()
            if count > len(self._acted):
                self._acted = np.zeros(count, np.int64)
                self._newest = np.zeros(count, np.int64)
        end = self._pending + count
        self._acted[self._pending : end] = acted
        self._newest[self._pending : end] = newest
        self._pending = end
        self._seconds_sum += count * time.monotonic()
        self._debt_sum += count * unpublished

    def _settle(self) -> None:
        """Count what is pending."""
        versions = self._acted[: self._pending]
        lag = np.maximum(self._newest[: self._pending] - versions, 0)
        counts = np.bincount(lag)
        if len(counts) > len(self._histogram):
            self._histogram = np.concatenate([self._histogram, np.zeros(len(counts), np.int64)])
        self._histogram[: len(counts)] += counts
        self.consumption.add(lag)
        self._consumed += self._pending
        known = np.clip(versions, 0, len(self._publish_time) - 1)
        self._seconds_sum -= float(self._publish_time[known].sum())
        rows, lags = self._arrived[:, known]
        self._in_flight_sum += float(np.minimum(lags / np.maximum(rows, 1), lag).sum())
        self._pending = 0

    def recent(self, percentile: float) -> float:
        """Percentile of the newest samples' lag [versions]; NaN before the first."""
        self._settle()
        return self.consumption.percentile(percentile)

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

"""Policy lag: how old the policies are whose rows arrive and are learned from, and a bound of it. And the ledger: what
becomes of rows.

The lag of a sample is the learner's version when it is consumed less the version that acted. Its parts, counted for
each sample by the version that acted: in flight (versions published between choosing the action and the row's arrival
at the trainer, the lane included; rows of one version that arrived at different times count their mean) and in queue
(versions published while the row was in replay). Unpublished: updates done but not yet published when the sample was
consumed. Lag in seconds is measured from the publish time of the version that acted."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.channels.board import LEFT, TAKEN
from ddrl.channels.lane import LaneSet
from ddrl.core.config import Config
from ddrl.core.errors import RunDirError
from ddrl.core.rows import RowKind
from ddrl.replay.sources import Experience, ReplaySource
from ddrl.run.checkpoint import TrainingState
from ddrl.run.directory import RunDirectory
from ddrl.run.topology import HostChannels, Topology
from ddrl.telemetry import Recorder, Run
from ddrl.telemetry.summary import LEDGER

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


def _long(values: NDArray[Any], length: int, fill: float = 0.0) -> NDArray[Any]:
    """The values, at least twice as many along the last axis where there are fewer than `length`; further ones are
    `fill`."""
    missing = length - values.shape[-1]
    if missing <= 0:
        return values
    more = np.full((*values.shape[:-1], max(missing, values.shape[-1])), fill, values.dtype)
    return np.concatenate([values, more], axis=-1)


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
        self._publish_time = _long(self._publish_time, version + 1)
        self._arrived = _long(self._arrived, version + 1)
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
        self._histogram = _long(self._histogram, len(counts))
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

    def published(self, version: int, updates: int) -> None:
        """A version is published now, after so many updates."""
        self._made = _long(self._made, version + 1, self._made[0])
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


# -- what becomes of rows ----------------------------------------------------------------------------------------------


class Ledger:
    """What became of each row, in the telemetry (ddrl.telemetry.summary)."""

    def __init__(self, topology: Topology, channels: HostChannels, source: Experience, state: TrainingState) -> None:
        self._channels = channels
        self._source = source
        self._state = state
        self._own = LaneSet(list(channels.lanes.values()))
        self._remote = LaneSet(channels.remote_lanes)
        # Collectors' lanes are emptied for each round, and sample areas are no lanes.
        self._through_lanes = not topology.in_rounds and not topology.area_columns
        self._rows_written = channels.counters_row(topology.trainer)["rows_written"]
        self._host_lost = False
        self._accounts: dict[str, Any] = {}  # as they were recorded last

    def look(self) -> None:
        """Note whether a host has died before the job's end: the last counts of its relay have not come."""
        ended = self._channels.counters.columns.index("ended")
        lost = (bool(np.all(mirror.table()[:, ended] == 1.0)) for mirror in self._channels.mirrors)
        self._host_lost = self._host_lost or any(lost)

    def open(self, directory: RunDirectory, *, same_job: bool) -> None:
        """Count what is lost with what came before the checkpoint of this training: rows that a trainer of the same job
        has taken since, or rows that an earlier job has written and left."""
        state = self._state
        shared = self._channels.board.values
        state.rows_taken = max(state.rows_taken, state.env_steps)  # of a checkpoint without these counts
        if same_job:
            state.rows_left = int(shared[LEFT])
            lost = int(shared[TAKEN]) + self._popped - state.rows_taken if self._through_lanes else 0
            state.rows_taken += lost
            state.rows_lost += lost
            return
        written = 0
        with contextlib.suppress(RunDirError), Run(directory.path) as before:
            written = int((before.snapshot(LEDGER) or {}).get("written", 0))
        state.rows_left += max(0, written - state.rows_taken - state.rows_left)
        shared[TAKEN] = state.rows_taken
        shared[LEFT] = state.rows_left

    @property
    def _popped(self) -> int:
        return self._own.popped + self._remote.popped

    def record(self, recorder: Recorder, *, ended: bool = False, failed: bool = False) -> None:
        """Record the accounts as they are now; `ended`: in order, and nothing more is written. failed: training has
        stopped anywhere, perhaps between taking rows and counting them: the accounts stay as they were."""
        if not ended:
            self.look()
        popped = self._popped
        written = self._own.pushed
        placed = self._remote.pushed
        self._rows_written.set(written)
        shared = self._channels.board.values
        column = self._channels.counters.columns.index("rows_written")
        if not failed:
            held: tuple[int, int, int] | tuple[None, None, None] = (None, None, None)
            if isinstance(self._source, ReplaySource):
                evicted, unseen = self._source.evicted
                held = len(self._source.replay), evicted - unseen, unseen
            self._accounts = {
                "state": msgspec.structs.asdict(self._state),
                "taken_before": int(shared[TAKEN]),
                "left_before": int(shared[LEFT]),
                "popped": popped if self._through_lanes else None,
                "waiting": written + placed - popped,
                "written_here": written,
                "placed": placed,
                "held": held[0],
                "evicted_seen": held[1],
                "evicted_unseen": held[2],
                "ended": ended,
                "host_lost": self._host_lost,
            }
        if self._accounts:
            rows = int(shared[TAKEN] + shared[LEFT] + np.nansum(self._channels.tables()[:, column]))
            recorder.record_snapshot(LEDGER, **self._accounts, written=rows)

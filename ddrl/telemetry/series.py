"""What telemetry records: records of the counters, events, evaluations, snapshots; and run-level series, one number per
record.

Series are pure: a table of counters and a clock go in, numbers come out. Each metric declares its own
(`ddrl.core.metrics.Metric.across`), the figures of the algorithm included; those that need several columns are in
`_DERIVED`. Rates, shares and means are taken over the last `WINDOW_SECONDS`, so that they do not jump with each record.
NaN means "not reported". Imports ddrl.core alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import msgspec
import numpy as np

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.core.metrics import COLUMNS, FIGURES, METRICS, Across, Metric, run_metrics
from ddrl.core.roles import Role
from ddrl.core.specs import Floats

WINDOW_SECONDS = 5.0
COLUMN = {name: index for index, name in enumerate(COLUMNS)}  # the same places in every run
ROLES = tuple(Role)
NAN = float("nan")


@dataclass(frozen=True)
class Series:
    """One run-level series; a `total` only grows, a `gauge` is a value of the moment or a mean over the window."""

    name: str
    kind: Literal["total", "gauge"]
    unit: str
    doc: str
    figure: bool = False  # declared by the run's algorithm


def role_rows(table: Floats, role: Role) -> Floats:
    """Rows of the processes of one role: [processes of that role, columns]."""
    return table[table[:, COLUMN["role"]] == ROLES.index(role)]


def _sum(values: Floats) -> float:
    reported = values[~np.isnan(values)]
    return float(reported.sum()) if reported.size else NAN


def _or_zero(values: Floats) -> Floats:
    return np.where(np.isnan(values), 0.0, values)


def _lengthened(table: Floats, rows: int) -> Floats:
    """The table with rows of NaN at its end, so that it has so many."""
    if len(table) == rows:
        return table
    return np.concatenate([table, np.full((rows - len(table), table.shape[1]), NAN)])


class _Moment:
    """A table of counters at one time; sums and means of its columns are made at once for each role."""

    def __init__(self, time: float, seconds: float, table: Floats, column: Mapping[str, int]) -> None:
        self.time = time
        self.seconds = seconds  # into the run, by a clock that nobody sets
        self.table = table
        self._column = column
        self._rows: dict[Role | None, Floats] = {None: table}
        self._totals: dict[Role | None, tuple[Floats, Floats]] = {}  # sums and means [columns]

    def rows(self, role: Role | None) -> Floats:
        if role not in self._rows:
            assert role is not None
            self._rows[role] = role_rows(self.table, role)
        return self._rows[role]

    def values(self, name: str, role: Role | None) -> Floats:
        return self.rows(role)[:, self._column[name]]

    def sum(self, name: str, role: Role | None) -> float:
        return float(self._total(role)[0][self._column[name]])

    def mean(self, name: str, role: Role | None) -> float:
        return float(self._total(role)[1][self._column[name]])

    def forget_rows(self, roles: Iterable[Role | None]) -> None:
        """Keep the sums and means of the roles, which is all that a later window asks of its beginning: the tables of
        all moments of a window would never be in a processor's cache."""
        for role in roles:
            self._total(role)
        del self.table, self._rows

    def _total(self, role: Role | None) -> tuple[Floats, Floats]:
        if role not in self._totals:
            rows = self.rows(role)
            known = rows == rows  # not NaN
            reported = np.count_nonzero(known, axis=0)
            sums = np.where(reported, np.add.reduce(rows, axis=0, where=known), NAN)
            self._totals[role] = sums, sums / np.maximum(reported, 1)
        return self._totals[role]


@dataclass(frozen=True)
class _Window:
    """What series are made from: the newest moment, and the one at the window's begin, where there is one."""

    config: Config
    now: _Moment
    before: _Moment | None
    held: float  # share of the window's records at which rollouts were held back

    def gained(self, name: str, role: Role | None) -> float:
        """Growth over the window; NaN where there is none yet."""
        if self.before is None:
            return NAN
        earlier = self.before.sum(name, role)
        return self.now.sum(name, role) - (0.0 if np.isnan(earlier) else earlier)

    def rate(self, name: str, role: Role | None) -> float:
        """Growth per second."""
        seconds = self.now.seconds - self.before.seconds if self.before else 0.0
        return self.gained(name, role) / seconds if seconds > 0 else NAN

    def ratio(self, numerator: str, denominator: str, role: Role) -> float:
        """Growth of one column for each that another one grew."""
        below = self.gained(denominator, role)
        return self.gained(numerator, role) / below if below > 0 else NAN

    def across(self, metric: Metric, across: Across) -> float:
        """The number that `across` declares."""
        match across.how:
            case "sum":
                found = self.now.sum(metric.name, across.role)
            case "mean":
                found = self.now.mean(metric.name, across.role)
            case "rate":
                found = self.rate(metric.name, across.role)
            case "share":
                processes = len(self.now.rows(across.role))
                found = self.rate(metric.name, across.role) / processes if processes else NAN
        return found / across.scale

    def version_ages(self) -> Floats:
        """Versions that each rollout is behind the trainer's newest [rollouts that have one]."""
        newest = self.now.sum("policy_version", Role.TRAINER)
        ages = np.maximum(newest - self.now.values("policy_version", Role.ROLLOUT), 0.0)
        return ages[~np.isnan(ages)]

    def versions_in_flight(self) -> float:
        """Versions published but not yet sealed on the slowest host."""
        sealed = self.now.values("policy_version", Role.RELAY)
        sealed = sealed[~np.isnan(sealed)]
        newest = self.now.sum("policy_version", Role.TRAINER)
        return max(newest - float(sealed.min()), 0.0) if sealed.size else NAN

    def heartbeat_age(self) -> float:
        """Age of the oldest last sign of life [s]."""
        beats = self.now.values("heartbeat", None)
        beats = beats[~np.isnan(beats)]
        return max(self.now.time - float(beats.min()), 0.0) if beats.size else NAN


def _median_or_nan(values: Floats) -> float:
    return float(np.median(values)) if values.size else NAN


def _gauge(name: str, unit: str, doc: str) -> Series:
    return Series(name, "gauge", unit, doc)


# Series of several columns; the metrics declare all others.
_DERIVED: tuple[tuple[Series, Callable[[_Window], float]], ...] = (
    (
        _gauge("return_mean", "return", "Mean raw return of the episodes ended in the window."),
        lambda window: window.ratio("return_sum", "episodes", Role.ROLLOUT),
    ),
    (
        _gauge("episode_steps_mean", "env steps", "Mean length of the episodes ended in the window."),
        lambda window: window.ratio("episode_steps_sum", "episodes", Role.ROLLOUT),
    ),
    (
        _gauge("version_age_p50", "versions", "Versions that the median rollout is behind the trainer's newest."),
        lambda window: _median_or_nan(window.version_ages()),
    ),
    (
        _gauge("version_age_max", "versions", "Versions that the slowest rollout is behind the trainer's newest."),
        lambda window: float(window.version_ages().max(initial=-np.inf)) if window.version_ages().size else NAN,
    ),
    (
        _gauge("versions_in_flight", "versions", "Versions published but not yet sealed on the slowest host."),
        _Window.versions_in_flight,
    ),
    (
        _gauge("samples_per_insert", "samples/transition", "Transitions learned from for each one recorded."),
        lambda window: window.ratio("samples", "rows_recorded", Role.TRAINER),
    ),
    (
        _gauge("replay_fill", "", "Records in replay as a share of its capacity."),
        lambda window: window.now.sum("replay_size", Role.TRAINER) / window.config.replay.capacity,
    ),
    (
        _gauge("rollout_hold", "", "Share of the window's records at which samples_per_insert held rollouts back."),
        lambda window: window.held,
    ),
    (
        _gauge("rollouts", "processes", "Rollouts that have reported."),
        lambda window: float(np.count_nonzero(~np.isnan(window.now.values("env_steps", Role.ROLLOUT)))),
    ),
    (_gauge("heartbeat_age_max", "s", "Age of the oldest last sign of life."), _Window.heartbeat_age),
)
OTHER_SHARE = _gauge(
    "other_share", "", "Share of the trainer's time in nothing of the above: looks, reports, evaluation."
)
SECONDS_LEFT = _gauge(
    "seconds_left", "s", "Time left by run.max_env_steps or run.max_seconds, the first to end the run."
)


def series_of(metrics: Sequence[Metric]) -> tuple[Series, ...]:
    """The run-level series that follow from a run's metrics (`run_metrics`). ConfigError where two have one name."""
    known = {metric.name for metric in METRICS}
    found = [
        Series(
            across.name or metric.name,
            "total" if across.how == "sum" and metric.kind == "count" else "gauge",
            across.unit if across.name else metric.unit,
            across.doc or metric.doc,
            metric.name not in known,
        )
        for metric in metrics
        for across in metric.across
    ]
    found += [*(series for series, _ in _DERIVED), OTHER_SHARE, SECONDS_LEFT]
    names = [series.name for series in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"figure {name!r}: a run-level series has that name; see ddrl.telemetry.SERIES")
    return tuple(found)


SERIES: tuple[Series, ...] = series_of(run_metrics(FIGURES))  # of a run whose algorithm declares no others
SERIES_NAMES: tuple[str, ...] = tuple(series.name for series in SERIES)


@dataclass
class SeriesWindow:
    """Turns tables of counters, one after the other, into run-level numbers.

    `metrics` are the columns of the tables. `base` holds the totals of the run before this process began (a resumed
    run): they are added to what processes count."""

    config: Config
    base: Mapping[str, float] = field(default_factory=dict[str, float])
    window: float = WINDOW_SECONDS
    metrics: tuple[Metric, ...] = field(default_factory=run_metrics)

    def __post_init__(self) -> None:
        self.series = series_of(self.metrics)
        self._column = {metric.name: index for index, metric in enumerate(self.metrics)}
        self._roles = {across.role for metric in self.metrics for across in metric.across}
        self._roles |= {Role.ROLLOUT, Role.TRAINER}  # of series of several columns
        names = [metric.name for metric in self.metrics if metric.kind == "count"]
        self._counts = np.array([self._column[name] for name in names])
        self._of_episodes = np.array([name in ("episodes", "episode_steps_sum", "return_sum") for name in names])
        self._rising = np.array([name != "return_sum" for name in names])
        self._last = np.empty((0, len(names)))  # counts as the last table had them [processes, counts]
        self._ended = np.empty((0, len(names)))  # of processes that ended; NaN: none has, that counted this
        self._moments: deque[tuple[_Moment, float]] = deque()
        self._frozen = False

    def freeze(self) -> None:
        """The run has been stopped: what is still drained counts into totals, and no longer into rates and shares."""
        self._frozen = True

    def measure(self, table: Floats, now: float, wall_seconds: float) -> dict[str, float]:
        """Every series from `table` [processes, columns] read at `now` (Unix seconds), `wall_seconds` into the run."""
        moment = _Moment(now, wall_seconds, self._accumulate(table), self._column)
        held = float(np.fmax.reduce(moment.values("rollout_wait", Role.TRAINER), initial=0.0))
        while len(self._moments) > 1 and wall_seconds - self._moments[1][0].seconds >= self.window:
            self._moments.popleft()
        before = self._moments[0][0] if self._moments and not self._frozen else None
        self._moments.append((moment, held))
        share_held = NAN if self._frozen else sum(past for _, past in self._moments) / len(self._moments)
        window = _Window(self.config, moment, before, share_held)
        values = {
            across.name or metric.name: window.across(metric, across)
            for metric in self.metrics
            for across in metric.across
        }
        for name, earlier in self.base.items():
            if name in values:
                values[name] = earlier + (0.0 if np.isnan(values[name]) else values[name])
        values |= {series.name: measure(window) for series, measure in _DERIVED}
        self._make_whole(values)
        values["seconds_left"] = self._seconds_left(values, window, wall_seconds)
        moment.forget_rows(self._roles)
        return {series.name: values[series.name] for series in self.series}

    def _accumulate(self, table: Floats) -> Floats:
        """The table with counts that never fall: where one has fallen, another process began at zero, and adds to it.
        Counts of episodes, which are divided by each other, begin anew together: returns may fall below zero, and more
        episodes than before may have been played since."""
        table = _lengthened(table, max(len(table), len(self._last)))
        new = table[:, self._counts]
        old = _lengthened(self._last, len(table))
        before = _lengthened(self._ended, len(table))
        ended = (new < old) & self._rising
        if ended.any():
            ended[:, self._of_episodes] = ended[:, self._of_episodes].any(axis=1, keepdims=True)
        missing = np.isnan(new)
        ended = (ended | missing) & ~np.isnan(old)
        if ended.any():
            before = np.where(ended, _or_zero(before) + old, before)
        self._last = new
        self._ended = before
        if np.isnan(before).all():
            return table
        whole = table.copy()
        whole[:, self._counts] = np.where(missing, before, new + _or_zero(before))
        return whole

    def _make_whole(self, values: dict[str, float]) -> None:
        """Shares of one role's time never add up to more than all of it: what a long activity (a checkpoint) adds to a
        short window at its end is cut down to the window."""
        for role in (Role.ROLLOUT, Role.TRAINER):
            names = [
                across.name
                for metric in self.metrics
                for across in metric.across
                if (across.how, across.role) == ("share", role)
            ]
            total = _sum(np.array([values[name] for name in names]))
            if total > 1:
                for name in names:
                    values[name] /= total
        values["other_share"] = max(1.0 - total, 0.0)  # of the trainer, the last of the two

    def _seconds_left(self, values: Mapping[str, float], window: _Window, wall_seconds: float) -> float:
        run = self.config.run
        by_time = run.max_seconds - wall_seconds
        speed = window.rate("env_steps", Role.TRAINER)
        by_steps = (run.max_env_steps - values["env_steps"]) / speed if speed > 0 else NAN
        known = [left for left in (by_time, by_steps) if np.isfinite(left)]
        return max(min(known), 0.0) if known and not self._frozen else NAN


# -- records and sinks -------------------------------------------------------------------------------------------------
# Made by the recorder and passed to the sinks in the order in which they were made.


class Record(msgspec.Struct, frozen=True, eq=False, tag="record"):
    """All counters at one moment. `tick` counts records of the run from 0 without gaps, resumed runs included."""

    tick: int
    time: float  # [Unix s]
    wall_seconds: float  # since the run began, earlier parts of a resumed run included
    series: dict[str, float]  # by name of ddrl.telemetry.series.SERIES; NaN: not reported
    table: Floats  # [processes, columns]; NaN: not reported
    columns: tuple[str, ...] = COLUMNS  # METRICS, then the figures of the run's algorithm


class Event(msgspec.Struct, frozen=True, tag="event"):
    """Something that happened: a checkpoint, a command, a failure. `fields` holds JSON values."""

    time: float
    wall_seconds: float
    kind: str
    text: str
    fields: dict[str, Any] = {}


class Evaluation(msgspec.Struct, frozen=True, tag="evaluation"):
    """Greedy episodes played with one version of the policy."""

    time: float
    wall_seconds: float
    env_steps: float
    updates: float
    mean: float
    std: float
    episodes: int
    policy_version: float = NAN


@dataclass(frozen=True)
class Snapshot:
    """The newest state of something too large for a counter, e.g. a sample of priorities; only the last of each kind is
    kept."""

    time: float
    kind: str
    fields: dict[str, Any]


class Sink(Protocol):
    """Where records go. Called by the recorder's thread alone; an exception is reported, and the run continues."""

    def record(self, record: Record, /) -> None:
        """Take one record of the counters."""
        ...

    def event(self, event: Event, /) -> None:
        """Take one event."""
        ...

    def evaluation(self, evaluation: Evaluation, /) -> None:
        """Take one evaluation."""
        ...

    def close(self) -> None:
        """Write what is buffered and let go."""
        ...


def plain(value: Any) -> Any:
    """Numpy arrays and scalars as JSON's lists and numbers; anything else as its words."""
    is_numpy = isinstance(value, (np.ndarray, np.generic))
    return cast(Any, value).tolist() if is_numpy else str(value)

"""Run-level series: one number per record, made from the counters of all processes.

Pure: a table of counters and a clock go in, numbers come out. Written to the run directory by `store`, shown by
dashboards, plots and the terminal, which take names, units and meanings from `SERIES`. Rates, shares and means are
taken over the last `WINDOW_SECONDS`, so that they do not jump with each record. NaN means "not reported". Imports
ddrl.core alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role

WINDOW_SECONDS = 5.0
COLUMN = {name: index for index, name in enumerate(COLUMNS)}
ROLES = tuple(Role)
NAN = float("nan")


@dataclass(frozen=True)
class Series:
    """One run-level series; a `total` only grows, a `gauge` is a value of the moment or a mean over the window."""

    name: str
    kind: Literal["total", "gauge"]
    unit: str
    doc: str


SERIES: tuple[Series, ...] = (
    Series(
        "env_steps",
        "total",
        "env steps",
        "Environment steps of all rollouts that the trainer has recorded: what run.max_env_steps counts.",
    ),
    Series("episodes", "total", "episodes", "Episodes ended in all rollouts."),
    Series("updates", "total", "updates", "Optimizer steps."),
    Series("publishes", "total", "versions", "Versions of the parameters published."),
    Series("samples", "total", "transitions", "Transitions learned from."),
    Series("rows_recorded", "total", "transitions", "Transitions written to replay."),
    Series("rows_dropped", "total", "rows", "Rows dropped at full lanes."),
    Series("checksum_failures", "total", "versions", "Versions refused for a wrong checksum."),
    Series("bytes_sent", "total", "bytes", "Bytes given to MPI by all processes."),
    Series("model_bytes_sent", "total", "bytes", "Bytes of parameters sent between relays."),
    Series("return_mean", "gauge", "return", "Mean raw return of the episodes ended in the window."),
    Series("episode_steps_mean", "gauge", "env steps", "Mean length of the episodes ended in the window."),
    Series("env_steps_per_s", "gauge", "env steps/s", "Environment steps of all rollouts together."),
    Series("updates_per_s", "gauge", "updates/s", "Optimizer steps."),
    Series("publishes_per_s", "gauge", "versions/s", "Versions published."),
    Series("model_mb_per_s", "gauge", "MB/s", "Parameters sent between relays, all together."),
    Series("mpi_mb_per_s", "gauge", "MB/s", "Bytes given to MPI, all together: parameters, experience and control."),
    Series("loss", "gauge", "", "Loss of a recent update."),
    Series("td_error", "gauge", "", "Mean absolute TD error of a recent batch."),
    Series("q_mean", "gauge", "", "Mean action value of a recent batch."),
    Series("grad_norm", "gauge", "", "Gradient norm before clipping of a recent update."),
    Series("epsilon", "gauge", "", "Mean share of random actions over the rollouts."),
    Series("lag_p50", "gauge", "versions", "Median policy lag of recently consumed samples."),
    Series("lag_p99", "gauge", "versions", "99th percentile of the policy lag of recently consumed samples."),
    Series("version_age_p50", "gauge", "versions", "Versions that the median rollout is behind the trainer's newest."),
    Series("version_age_max", "gauge", "versions", "Versions that the slowest rollout is behind the trainer's newest."),
    Series("versions_in_flight", "gauge", "versions", "Versions published but not yet sealed on the slowest host."),
    Series(
        "samples_per_insert",
        "gauge",
        "samples/transition",
        "Transitions learned from per transition recorded, over the window.",
    ),
    Series("replay_size", "gauge", "transitions", "Records in replay."),
    Series("replay_fill", "gauge", "", "Records in replay as a share of its capacity."),
    Series("replay_bytes", "gauge", "bytes", "Memory held by replay."),
    Series("learn_share", "gauge", "", "Share of the trainer's time in optimizer steps."),
    Series("sample_share", "gauge", "", "Share of the trainer's time drawing batches and writing back priorities."),
    Series("record_share", "gauge", "", "Share of the trainer's time moving rows from lanes to replay."),
    Series("publish_share", "gauge", "", "Share of the trainer's time writing parameters to the mailbox."),
    Series("checkpoint_share", "gauge", "", "Share of the trainer's time writing checkpoints."),
    Series("trainer_wait_share", "gauge", "", "Share of the trainer's time waiting for data."),
    Series("env_share", "gauge", "", "Share of the rollouts' time inside the environments."),
    Series("act_share", "gauge", "", "Share of the rollouts' time choosing actions."),
    Series("rollout_wait_share", "gauge", "", "Share of the rollouts' time waiting at a full lane."),
    Series(
        "rollout_hold",
        "gauge",
        "",
        "Share of the window's records at which rollouts were held back for samples_per_insert.",
    ),
    Series("rollouts", "gauge", "processes", "Rollouts that have reported."),
    Series("heartbeat_age_max", "gauge", "s", "Age of the oldest last sign of life."),
    Series(
        "seconds_left",
        "gauge",
        "s",
        "Time left by run.max_env_steps and run.max_seconds, whichever ends the run first.",
    ),
)

SERIES_NAMES: tuple[str, ...] = tuple(series.name for series in SERIES)

# What is summed over which role before rates are taken.
_ROLLOUT_SUMS = (
    "env_steps",
    "episodes",
    "return_sum",
    "episode_steps_sum",
    "env_seconds",
    "act_seconds",
    "wait_seconds",
    "rows_dropped",
)
_SIGNED_SUMS = ("rollout.return_sum",)
_RELAY_SUMS = ("model_bytes_sent", "checksum_failures")
_TRAINER_SUMS = (
    "updates",
    "publishes",
    "samples",
    "rows_recorded",
    "learn_seconds",
    "sample_seconds",
    "record_seconds",
    "publish_seconds",
    "checkpoint_seconds",
    "wait_seconds",
)
_TRAINER_GAUGES = ("loss", "td_error", "q_mean", "grad_norm", "lag_p50", "lag_p99", "replay_size", "replay_bytes")


def role_rows(table: NDArray[np.float64], role: Role) -> NDArray[np.float64]:
    """Rows of the processes of one role: [processes of that role, columns]."""
    return table[table[:, COLUMN["role"]] == ROLES.index(role)]


def _sum(values: NDArray[np.float64]) -> float:
    reported = values[~np.isnan(values)]
    return float(reported.sum()) if reported.size else NAN


def _mean(values: NDArray[np.float64]) -> float:
    reported = values[~np.isnan(values)]
    return float(reported.mean()) if reported.size else NAN


@dataclass(frozen=True)
class _Moment:
    time: float
    sums: dict[str, float]
    held: float


@dataclass
class SeriesWindow:
    """Turns tables of counters, one after the other, into run-level numbers.

    `base` holds the totals of the run before this process began (a resumed run): env_steps, episodes, ... are added to
    what rollouts count."""

    config: Config
    base: Mapping[str, float] = field(default_factory=dict)
    window: float = WINDOW_SECONDS
    _moments: deque[_Moment] = field(default_factory=deque)

    def measure(self, table: NDArray[np.float64], now: float, wall_seconds: float) -> dict[str, float]:
        """Every series of `SERIES` from `table` [processes, columns] read at `now` (Unix seconds), `wall_seconds` into
        the run."""
        rollouts, relays, trainer = (role_rows(table, role) for role in (Role.ROLLOUT, Role.RELAY, Role.TRAINER))
        sums = self._sums(table, rollouts, relays, trainer)
        held = float(np.nan_to_num(trainer[:, COLUMN["rollout_wait"]]).max(initial=0.0))
        moment = _Moment(now, sums, held)
        while len(self._moments) > 1 and now - self._moments[1].time >= self.window:
            self._moments.popleft()
        before = self._moments[0] if self._moments else None
        values = self._instant(table, rollouts, relays, trainer, sums, now)
        values.update(self._over_window(moment, before, len(rollouts)))
        self._moments.append(moment)
        values["seconds_left"] = self._seconds_left(values, wall_seconds)
        return {name: values[name] for name in SERIES_NAMES}

    def _sums(
        self,
        table: NDArray[np.float64],
        rollouts: NDArray[np.float64],
        relays: NDArray[np.float64],
        trainer: NDArray[np.float64],
    ) -> dict[str, float]:
        sums = {f"rollout.{name}": _sum(rollouts[:, COLUMN[name]]) for name in _ROLLOUT_SUMS}
        if not len(rollouts):  # a run whose only process reports as trainer
            sums["rollout.env_steps"] = _sum(trainer[:, COLUMN["env_steps"]])
        recorded = _sum(trainer[:, COLUMN["env_steps"]])
        sums["run.env_steps"] = sums["rollout.env_steps"] if np.isnan(recorded) else recorded
        sums |= {f"relay.{name}": _sum(relays[:, COLUMN[name]]) for name in _RELAY_SUMS}
        sums |= {f"trainer.{name}": _sum(trainer[:, COLUMN[name]]) for name in _TRAINER_SUMS}
        sums["all.bytes_sent"] = _sum(table[:, COLUMN["bytes_sent"]])
        return sums

    def _instant(
        self,
        table: NDArray[np.float64],
        rollouts: NDArray[np.float64],
        relays: NDArray[np.float64],
        trainer: NDArray[np.float64],
        sums: dict[str, float],
        now: float,
    ) -> dict[str, float]:
        totals = {
            "env_steps": "run",
            "episodes": "rollout",
            "rows_dropped": "rollout",
            "updates": "trainer",
            "publishes": "trainer",
            "samples": "trainer",
            "rows_recorded": "trainer",
            "checksum_failures": "relay",
            "bytes_sent": "all",
            "model_bytes_sent": "relay",
        }
        values = {name: sums[f"{role}.{name}"] for name, role in totals.items()}
        for name, earlier in self.base.items():
            if name in values:
                values[name] = earlier + (0.0 if np.isnan(values[name]) else values[name])
        values |= {name: _mean(trainer[:, COLUMN[name]]) for name in _TRAINER_GAUGES}
        values["epsilon"] = _mean(rollouts[:, COLUMN["epsilon"]])
        values["replay_fill"] = values["replay_size"] / self.config.replay.capacity
        values["rollouts"] = float(np.count_nonzero(~np.isnan(rollouts[:, COLUMN["env_steps"]])))
        version = COLUMN["policy_version"]
        newest = trainer[0, version] if len(trainer) else NAN
        ages = np.maximum(newest - rollouts[:, version], 0.0)
        ages = ages[~np.isnan(ages)]
        values["version_age_p50"] = float(np.median(ages)) if ages.size else NAN
        values["version_age_max"] = float(ages.max()) if ages.size else NAN
        sealed = relays[:, version]
        sealed = sealed[~np.isnan(sealed)]
        values["versions_in_flight"] = max(newest - float(sealed.min()), 0.0) if sealed.size else NAN
        beats = table[:, COLUMN["heartbeat"]]
        beats = beats[~np.isnan(beats)]
        values["heartbeat_age_max"] = max(now - float(beats.min()), 0.0) if beats.size else NAN
        return values

    def _over_window(self, moment: _Moment, before: _Moment | None, rollouts: int) -> dict[str, float]:
        seconds = moment.time - before.time if before else 0.0

        def gained(name: str) -> float:
            if before is None:
                return NAN
            earlier = before.sums[name]
            difference = moment.sums[name] - (0.0 if np.isnan(earlier) else earlier)
            # A restarted process counts from zero again: never a negative rate. Returns alone may sink.
            return difference if name in _SIGNED_SUMS else max(difference, 0.0)

        def rate(name: str, over: float = 1.0) -> float:
            return gained(name) / (seconds * over) if seconds > 0 and over > 0 else NAN

        def ratio(numerator: str, denominator: str) -> float:
            below = gained(denominator)
            return gained(numerator) / below if below > 0 else NAN

        held = [past.held for past in self._moments] + [moment.held]
        values = {
            "return_mean": ratio("rollout.return_sum", "rollout.episodes") if before else NAN,
            "episode_steps_mean": ratio("rollout.episode_steps_sum", "rollout.episodes"),
            "env_steps_per_s": rate("rollout.env_steps"),
            "updates_per_s": rate("trainer.updates"),
            "publishes_per_s": rate("trainer.publishes"),
            "model_mb_per_s": rate("relay.model_bytes_sent", 1e6),
            "mpi_mb_per_s": rate("all.bytes_sent", 1e6),
            "samples_per_insert": ratio("trainer.samples", "trainer.rows_recorded"),
            "env_share": rate("rollout.env_seconds", rollouts),
            "act_share": rate("rollout.act_seconds", rollouts),
            "rollout_wait_share": rate("rollout.wait_seconds", rollouts),
            "trainer_wait_share": rate("trainer.wait_seconds"),
            "rollout_hold": sum(held) / len(held),
            "recorded_per_s": rate("run.env_steps"),
        }
        for name in ("learn", "sample", "record", "publish", "checkpoint"):
            values[f"{name}_share"] = rate(f"trainer.{name}_seconds")
        return values

    def _seconds_left(self, values: Mapping[str, float], wall_seconds: float) -> float:
        run = self.config.run
        by_time = run.max_seconds - wall_seconds
        speed = values["recorded_per_s"]
        by_steps = (run.max_env_steps - values["env_steps"]) / speed if speed > 0 else NAN
        known = [left for left in (by_time, by_steps) if np.isfinite(left)]
        return max(min(known), 0.0) if known else NAN

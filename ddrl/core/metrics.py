"""The columns of the counters table: what every process reports about itself, and how a run's figures are made of
them.

Each process owns one row and stores plain float64 values in it; a value that was never stored is NaN (fresh memory is
poison). Written by every role, read by telemetry. Counts only grow; gauges hold the last value. Run-level series
(ddrl.telemetry.series) follow from the `across` of each metric. A run's columns are METRICS and then the figures that
its algorithm declares (`Declaration.figures`): these travel as data, so that no list changes for a new figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from ddrl.core.errors import ConfigError
from ddrl.core.roles import Role


@dataclass(frozen=True)
class Across:
    """One run-level series: how a column of many processes becomes one number.

    sum      over all processes of `role`; of a count: a total that only grows
    mean     over the processes of `role` that report
    rate     growth of the sum per second, over the window
    share    the same of a column in seconds, for each process of `role`: 0 to 1
    """

    how: Literal["sum", "mean", "rate", "share"]
    role: Role | None = None  # None: all processes
    name: str = ""  # "", as unit and doc: the metric's own
    unit: str = ""
    doc: str = ""
    scale: float = 1.0  # the number is divided by it


@dataclass(frozen=True)
class Metric:
    """One column."""

    name: str
    kind: Literal["count", "gauge"]
    unit: str
    doc: str
    across: tuple[Across, ...] = ()


_TRAINER = (Across("mean", Role.TRAINER),)  # a gauge of the one trainer


def _total(role: Role | None, *further: Across) -> tuple[Across, ...]:
    return (Across("sum", role), *further)


def _timed(name: str, role: Role, whose: str, words: str) -> Metric:
    """Seconds of one role's processes in something, and its share of their time."""
    share = Across("share", role, f"{name}_share", "", f"Share of {whose} time {words}")
    return Metric(f"{name}_seconds", "count", "s", f"Time {words}", (share,))


class Phase(IntEnum):
    """What a process does between two heartbeats."""

    RUNNING = 1
    SAVING = 2
    WAITING = 3  # for a pool's device; of a collector's place: nothing is expected of it
    STARTING = 4  # a rollout or evaluator that has not acted yet


MAX_GPUS = 8  # of a host, reported one by one

METRICS: tuple[Metric, ...] = (
    # every role
    Metric("rank", "gauge", "", "Rank of the process (its number in a local run)."),
    Metric("role", "gauge", "", "Position of its role in ddrl.core.roles.Role."),
    Metric("host", "gauge", "", "Host index."),
    Metric("pid", "gauge", "", "Process id on its host."),
    Metric("heartbeat", "gauge", "s", "Wall time (Unix) of the last sign of life."),
    Metric(
        "policy_version",
        "gauge",
        "versions",
        "Version in use (rollout, evaluator), sealed (relay), published (trainer).",
    ),
    Metric(
        "bytes_sent",
        "count",
        "bytes",
        "Bytes given to MPI.",
        _total(
            None,
            Across(
                "rate",
                None,
                "mpi_mb_per_s",
                "MB/s",
                "Bytes given to MPI, all together: parameters, experience and control.",
                1e6,
            ),
        ),
    ),
    Metric("bytes_received", "count", "bytes", "Bytes taken from MPI."),
    Metric("cpu_seconds", "count", "s", "Processor time used, all threads; measured once a host."),
    Metric(
        "queued_seconds",
        "count",
        "s",
        "Time that its main thread was ready to run and had no core, by Linux; measured once a host.",
    ),
    Metric("memory_bytes", "gauge", "bytes", "Resident memory without pages shared with others; measured once a host."),
    Metric("ended", "gauge", "", "1 while its place has no process: it has done its last work, or has died."),
    Metric("phase", "gauge", "", "What it does, which says how long it may be silent: ddrl.core.metrics.Phase."),
    Metric("incarnation", "gauge", "", "Processes that had this place before."),
    Metric("restarts", "count", "", "Times that a process was started in place of one that died.", _total(None)),
    Metric("episodes_cut", "count", "episodes", "Episodes cut by the death of their process.", _total(Role.ROLLOUT)),
    # rollout
    Metric(
        "env_steps",
        "count",
        "env steps",
        "Environment steps taken (rollout) or recorded (trainer): what run.max_env_steps counts.",
        _total(
            Role.TRAINER,
            Across(
                "rate", Role.ROLLOUT, "env_steps_per_s", "env steps/s", "Environment steps of all rollouts together."
            ),
        ),
    ),
    Metric("episodes", "count", "episodes", "Episodes ended whose return is a number.", _total(Role.ROLLOUT)),
    Metric("return_sum", "count", "return", "Sum of the raw returns of ended episodes."),
    Metric("episode_steps_sum", "count", "env steps", "Sum of the lengths of ended episodes."),
    Metric("epsilon", "gauge", "", "Share of random actions.", (Across("mean", Role.ROLLOUT),)),
    _timed("env", Role.ROLLOUT, "the rollouts'", "inside the environments."),
    _timed("act", Role.ROLLOUT, "the rollouts'", "choosing actions."),
    Metric(
        "wait_seconds",
        "count",
        "s",
        "Time waiting: a full lane (rollout), no data to learn from (trainer).",
        (
            Across(
                "share", Role.ROLLOUT, "rollout_wait_share", "", "Share of the rollouts' time waiting at a full lane."
            ),
            Across("share", Role.TRAINER, "trainer_wait_share", "", "Share of the trainer's time waiting for data."),
        ),
    ),
    Metric("rows_dropped", "count", "rows", "Rows with a NaN or infinite number, left out.", _total(Role.ROLLOUT)),
    Metric("fetches", "count", "versions", "Newer versions taken into use."),
    # relay
    Metric(
        "model_bytes_sent",
        "count",
        "bytes",
        "Bytes of parameters sent to other relays, headers included.",
        _total(
            Role.RELAY,
            Across("rate", Role.RELAY, "model_mb_per_s", "MB/s", "Parameters sent between relays, all together.", 1e6),
        ),
    ),
    Metric("model_bytes_received", "count", "bytes", "Bytes of parameters received, headers included."),
    Metric("versions_sealed", "count", "versions", "Versions handed to this host's rollouts."),
    Metric("checksum_failures", "count", "versions", "Versions refused for a wrong checksum.", _total(Role.RELAY)),
    Metric(
        "rows_forwarded", "count", "rows", "Rows of experience sent to the root (relay) or received from relays (root)."
    ),
    Metric(
        "rows_written",
        "count",
        "rows",
        "Rows that rollouts of this host have written to their lanes (trainer, or relay of another host).",
        _total(None),
    ),
    Metric(
        "seal_seconds",
        "gauge",
        "s",
        "Time from the trainer's publish of the newest version to its sealing on this host.",
    ),
    Metric(
        "plan_epoch", "gauge", "plans", "Plans that the root relay has made, less one: it changes with each new plan."
    ),
    Metric(
        "plan_shards",
        "gauge",
        "hosts",
        "Hosts that the root itself sends to by the plan: m of the sharded scheme (root relay).",
    ),
    Metric("plan_chunk_bytes", "gauge", "bytes", "Size of the plan's largest piece (root relay)."),
    Metric(
        "plan_bound_seconds",
        "gauge",
        "s",
        "Least time in which any plan brings a model to all hosts, by the links measured (root relay).",
    ),
    Metric("gpu_utilization", "gauge", "", "Mean share of time that this host's GPUs computed, by NVML."),
    Metric("gpu_memory_bytes", "gauge", "bytes", "Memory in use on this host's GPUs together."),
    Metric("gpu_memory_total_bytes", "gauge", "bytes", "Memory of this host's GPUs together."),
    *(
        metric
        for gpu in range(MAX_GPUS)
        for metric in (
            Metric(
                f"gpu{gpu}_utilization", "gauge", "", f"Share of time that GPU {gpu} of this host computed, by NVML."
            ),
            Metric(f"gpu{gpu}_memory", "gauge", "", f"Share of the memory of GPU {gpu} of this host in use, by NVML."),
        )
    ),
    # gradient node
    Metric("node_size", "gauge", "samples", "Samples of the part that node_seconds is of."),
    Metric(
        "node_seconds",
        "gauge",
        "s",
        "From the dealing of a node's last part to the arrival of its gradient, as the trainer measured it.",
    ),
    Metric("gradients", "count", "gradients", "Gradients that nodes have sent.", _total(Role.NODE)),
    Metric("gradients_late", "count", "gradients", "Of these, used in a later update.", _total(Role.NODE)),
    Metric("gradients_dropped", "count", "gradients", "Of these, dropped: too late.", _total(Role.NODE)),
    _timed("gradient", Role.NODE, "the gradient nodes'", "computing gradients."),
    # trainer
    Metric("model_nbytes", "gauge", "bytes", "Size of the parameter vector that is published (S)."),
    Metric(
        "updates",
        "count",
        "updates",
        "Optimizer steps.",
        _total(Role.TRAINER, Across("rate", Role.TRAINER, "updates_per_s", "updates/s")),
    ),
    Metric(
        "publishes",
        "count",
        "versions",
        "Versions published.",
        _total(Role.TRAINER, Across("rate", Role.TRAINER, "publishes_per_s", "versions/s")),
    ),
    Metric("publish_deferred", "count", "versions", "Publishes put off because every mailbox slot was in use."),
    Metric("loss", "gauge", "", "Loss of a recent update.", _TRAINER),
    Metric("grad_norm", "gauge", "", "Gradient norm before clipping of a recent update.", _TRAINER),
    _timed("learn", Role.TRAINER, "the trainer's", "in optimizer steps."),
    _timed("sample", Role.TRAINER, "the trainer's", "drawing batches and writing back priorities."),
    _timed("record", Role.TRAINER, "the trainer's", "moving rows from lanes to replay."),
    _timed("publish", Role.TRAINER, "the trainer's", "writing parameters to the mailbox."),
    _timed("checkpoint", Role.TRAINER, "the trainer's", "writing checkpoints."),
    Metric(
        "lag_wait_seconds",
        "count",
        "s",
        "Of the trainer's wait_seconds: updates were put off for rollout.max_policy_lag.",
    ),
    Metric("rows_recorded", "count", "transitions", "Records written to replay.", _total(Role.TRAINER)),
    Metric("samples", "count", "transitions", "Transitions learned from.", _total(Role.TRAINER)),
    Metric("replay_size", "gauge", "transitions", "Records in replay.", _TRAINER),
    Metric("replay_bytes", "gauge", "bytes", "Memory held by replay.", _TRAINER),
    Metric(
        "records_evicted_unseen",
        "gauge",
        "transitions",
        "Records evicted from replay with episodes that no batch had drawn from.",
        _TRAINER,
    ),
    Metric(
        "lag_p50",
        "gauge",
        "versions",
        "Median policy lag of recently consumed samples, their age in replay included.",
        _TRAINER,
    ),
    Metric(
        "lag_p99",
        "gauge",
        "versions",
        "99th percentile of the policy lag of recently consumed samples, their age in replay included.",
        _TRAINER,
    ),
    Metric(
        "arrival_lag_p50", "gauge", "versions", "Median policy lag of rows at their arrival at the trainer.", _TRAINER
    ),
    Metric(
        "arrival_lag_p99",
        "gauge",
        "versions",
        "99th percentile of the policy lag of rows at their arrival at the trainer.",
        _TRAINER,
    ),
    Metric("areas_readable", "gauge", "areas", "Sample areas that batches can be drawn from now.", _TRAINER),
    Metric(
        "draws_repeated", "gauge", "batches", "Draws repeated because an explorer wrote over what was read.", _TRAINER
    ),
    Metric(
        "torn_batches", "gauge", "batches", "Batches learned from that were written over as they were read.", _TRAINER
    ),
    Metric(
        "rows_too_old", "count", "rows", "Rows left out because they exceeded max_policy_lag.", _total(Role.TRAINER)
    ),
    Metric("trajectories_dropped", "gauge", "trajectories", "Trajectories dropped for their policy lag.", _TRAINER),
    Metric("rollout_wait", "gauge", "", "1 while the trainer holds rollouts back to keep samples_per_insert, else 0."),
)

# Figures that value-based algorithms declare.
TD_ERROR = Metric("td_error", "gauge", "", "Mean absolute TD error of a recent batch.")
Q_MEAN = Metric("q_mean", "gauge", "", "Mean action value of a recent batch.")
SUPPORT_ENDS = Metric(
    "support_ends",
    "gauge",
    "",
    "Share of the probability of a recent batch's targets that lies beyond the support, and counts as at its ends.",
)
FIGURES: tuple[Metric, ...] = (TD_ERROR, Q_MEAN)  # what a run records unless its algorithm declares others

RESERVED = frozenset({"level", "tick", "time", "wall_seconds"})  # columns of the tables that hold series


def info_figure(key: str) -> Metric:
    """The figure of an environment's info[key] (env.figures), which rollouts report."""
    doc = f"info[{key!r}] at the end of an episode: mean of each rollout's last 100 episodes, over the rollouts."
    name = re.sub(r"\W", "_", f"info_{key.lower()}")
    return Metric(name, "gauge", "", doc, (Across("mean", Role.ROLLOUT),))


_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


def run_metrics(figures: Sequence[Metric] = FIGURES) -> tuple[Metric, ...]:
    """All columns of a run: METRICS, then the algorithm's figures, which are gauges of the trainer unless they say
    otherwise.

    Raises ConfigError for a figure whose name is taken or is no plain name."""
    taken = {metric.name for metric in METRICS} | {across.name for metric in METRICS for across in metric.across}
    whole: list[Metric] = list(METRICS)
    for figure in figures:
        if not _NAME.fullmatch(figure.name):
            raise ConfigError(f"figure {figure.name!r}: a name of small letters, digits and _ is wanted")
        if figure.name in taken or figure.name in RESERVED:
            raise ConfigError(f"figure {figure.name!r}: the name is taken; see ddrl.core.metrics")
        taken.add(figure.name)
        whole.append(figure if figure.across else replace(figure, across=_TRAINER))
    return tuple(whole)


def columns(figures: Sequence[Metric] = FIGURES) -> tuple[str, ...]:
    """Names of a run's columns, in the order of the table; those of METRICS have the same place in every run."""
    return tuple(metric.name for metric in run_metrics(figures))


COLUMNS: tuple[str, ...] = columns()

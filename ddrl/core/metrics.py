"""The columns of the counters table: what every process reports about itself.

Each process owns one row and stores plain float64 values in it; a value nobody has stored yet is NaN (fresh memory is
poison). Written by every role, read by telemetry. Counts only grow; gauges hold the last value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One column."""

    name: str
    kind: Literal["count", "gauge"]
    unit: str
    doc: str


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
    Metric("bytes_sent", "count", "bytes", "Bytes given to MPI."),
    Metric("bytes_received", "count", "bytes", "Bytes taken from MPI."),
    Metric("cpu_seconds", "count", "s", "Processor time used, all threads; measured once a host."),
    Metric("memory_bytes", "gauge", "bytes", "Resident memory without pages shared with others; measured once a host."),
    Metric("ended", "gauge", "", "1 once the process has done its last work."),
    # rollout
    Metric("env_steps", "count", "env steps", "Environment steps taken (rollout) or recorded (trainer)."),
    Metric("episodes", "count", "episodes", "Episodes ended."),
    Metric("return_sum", "count", "return", "Sum of the raw returns of ended episodes."),
    Metric("episode_steps_sum", "count", "env steps", "Sum of the lengths of ended episodes."),
    Metric("epsilon", "gauge", "", "Share of random actions."),
    Metric("env_seconds", "count", "s", "Time inside the environments."),
    Metric("act_seconds", "count", "s", "Time choosing actions."),
    Metric("wait_seconds", "count", "s", "Time waiting: a full lane (rollout), no data to learn from (trainer)."),
    Metric("rows_dropped", "count", "rows", "Rows dropped at a full lane."),
    Metric("fetches", "count", "versions", "Newer versions taken into use."),
    # relay
    Metric("model_bytes_sent", "count", "bytes", "Bytes of parameters sent to other relays, headers included."),
    Metric("model_bytes_received", "count", "bytes", "Bytes of parameters received, headers included."),
    Metric("versions_sealed", "count", "versions", "Versions handed to this host's rollouts."),
    Metric("checksum_failures", "count", "versions", "Versions refused for a wrong checksum."),
    Metric(
        "rows_forwarded", "count", "rows", "Rows of experience sent to the root (relay) or received from relays (root)."
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
    # trainer
    Metric("model_nbytes", "gauge", "bytes", "Size of the parameter vector that is published (S)."),
    Metric("updates", "count", "updates", "Optimizer steps."),
    Metric("publishes", "count", "versions", "Versions published."),
    Metric("publish_deferred", "count", "versions", "Publishes put off because every mailbox slot was in use."),
    Metric("loss", "gauge", "", "Loss of a recent update."),
    Metric("td_error", "gauge", "", "Mean absolute TD error of a recent batch."),
    Metric("q_mean", "gauge", "", "Mean action value of a recent batch."),
    Metric("grad_norm", "gauge", "", "Gradient norm before clipping of a recent update."),
    Metric("learn_seconds", "count", "s", "Time in optimizer steps."),
    Metric("sample_seconds", "count", "s", "Time drawing batches and writing back priorities."),
    Metric("record_seconds", "count", "s", "Time moving rows from lanes to replay."),
    Metric("publish_seconds", "count", "s", "Time writing parameters to the mailbox."),
    Metric("checkpoint_seconds", "count", "s", "Time writing checkpoints."),
    Metric("rows_recorded", "count", "transitions", "Records written to replay."),
    Metric("samples", "count", "transitions", "Transitions learned from."),
    Metric("replay_size", "gauge", "transitions", "Records in replay."),
    Metric("replay_bytes", "gauge", "bytes", "Memory held by replay."),
    Metric("lag_p50", "gauge", "versions", "Median policy lag of recently consumed samples."),
    Metric("lag_p99", "gauge", "versions", "99th percentile of the policy lag of recently consumed samples."),
    Metric("rollout_wait", "gauge", "", "1 while the trainer holds rollouts back to keep samples_per_insert, else 0."),
)

COLUMNS: tuple[str, ...] = tuple(metric.name for metric in METRICS)

"""What telemetry writes and sends: records of the counters, events, evaluations; and what a sink of them is.

Made by the recorder, consumed by sinks (store, live socket, terminal, TensorBoard, Prometheus) in the order they were
made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.core.metrics import COLUMNS


@dataclass(frozen=True)
class Record:
    """All counters at one moment. `tick` counts records of the run from 0 without gaps, resumed runs included."""

    tick: int
    time: float  # [Unix s]
    wall_seconds: float  # since the run began, earlier parts of a resumed run included
    series: dict[str, float]  # by name of ddrl.telemetry.series.SERIES; NaN: not reported
    table: NDArray[np.float64]  # [processes, columns]; NaN: not reported
    columns: tuple[str, ...] = COLUMNS  # METRICS, then the figures of the run's algorithm


@dataclass(frozen=True)
class Event:
    """Something that happened: a checkpoint, a command, a failure. `fields` holds JSON values."""

    time: float
    wall_seconds: float
    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Evaluation:
    """Greedy episodes played with one version of the policy."""

    time: float
    wall_seconds: float
    env_steps: float
    updates: float
    mean: float
    std: float
    episodes: int
    policy_version: float = float("nan")


@dataclass(frozen=True)
class Snapshot:
    """The newest state of something too large for a counter, e.g. a sample of priorities; only the last of each kind is
    kept."""

    time: float
    kind: str
    fields: dict[str, Any]


class Sink(Protocol):
    """Where records go. Called by the recorder's thread alone; an exception is reported and the run goes on."""

    def record(self, record: Record) -> None:
        """Take one record of the counters."""
        ...

    def event(self, event: Event) -> None:
        """Take one event."""
        ...

    def evaluation(self, evaluation: Evaluation) -> None:
        """Take one evaluation."""
        ...

    def close(self) -> None:
        """Write what is buffered and let go."""
        ...


def plain(value: Any) -> Any:
    """Numpy arrays and scalars as JSON's lists and numbers; anything else as its words."""
    is_numpy = isinstance(value, (np.ndarray, np.generic))
    return cast(Any, value).tolist() if is_numpy else str(value)

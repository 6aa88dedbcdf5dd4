"""Sources of experience: what a trainer records into and learns from.

`ReplaySource` draws from an ExperienceReplay as often as a rate limiter allows; `TrajectorySource` hands out each
trajectory once, in the order of recording; `AreaSource` draws from what explorers write into shared sample areas;
`PoolSource` from a pool where a new transition replaces a random one. None knows torch or the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from ddrl.channels.area import SampleArea
from ddrl.core.algorithm import Experience
from ddrl.core.config import Config
from ddrl.core.rows import RowSchema
from ddrl.replay.sources.areas import AreaSource
from ddrl.replay.sources.pool import PoolSource
from ddrl.replay.sources.replay import ReplaySource
from ddrl.replay.sources.trajectories import Trajectories, TrajectorySource

__all__ = [
    "AreaSource",
    "PoolSource",
    "ReplaySource",
    "Source",
    "Trajectories",
    "TrajectorySource",
    "make_source",
]


class Source(Protocol):
    """What a trainer learns from. One thread calls it."""

    def insertable(self) -> int:
        """Rows that may be recorded now; a large number where nothing limits."""
        ...

    def record(self, rows: NDArray[Any], newest_version: int) -> int:
        """Record rows of the schema's dtype in their order; the steps recorded. `newest_version`: of the policies
        published so far."""
        ...

    def arrived(self) -> int:
        """Steps that came past `record` since the last call, through shared sample areas; 0 for other sources."""
        ...

    def ready(self) -> bool:
        """Whether `sample` may be called now."""
        ...

    def sample(self) -> Any:
        """One draw of the configured size."""
        ...

    def count(self, batch: Any) -> int:
        """Transitions of a batch."""
        ...

    def learned(self, batch: Any, priority: NDArray[Any] | None) -> None:
        """An update has used the batch: write its priorities [B] back, count it."""
        ...

    def anneal(self, progress: float) -> None:
        """Move what is annealed to `progress` of the run, 0 to 1."""
        ...

    def cut(self) -> None:
        """End all running episodes: their environments are reset (a checkpoint, a resume)."""
        ...

    def save(self, folder: Path) -> None:
        """Write what is held into files of `folder`."""
        ...

    def load(self, folder: Path) -> None:
        """Become what `save` wrote; CheckpointError where that cannot be used."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the files; JSON."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        ...

    def versions(self, batch: Any) -> NDArray[Any]:
        """The policy versions [n] that acted in a batch, uint64."""
        ...

    def set_samples_per_insert(self, samples_per_insert: float) -> None:
        """Aim at this ratio of transitions learned from to transitions recorded, where the source keeps one."""
        ...

    def law(self) -> NDArray[Any] | None:
        """The probability [picks] of each pick in the next draw, for plots; None where all are alike."""
        ...

    def figures(self) -> dict[str, float]:
        """Gauges by name (replay_size, replay_bytes, ...)."""
        ...


def make_source(config: Config, schema: RowSchema, experience: Experience, areas: Sequence[SampleArea] = ()) -> Source:
    """The source that replay.source names; auto: the one that an algorithm's declaration asks for. `areas`: those that
    explorers write."""
    if config.replay.source == "areas":
        return AreaSource(config, schema, experience, areas)
    if config.replay.source == "pool":
        return PoolSource(config, schema, experience)
    if experience.source == "replay":
        return ReplaySource(config, schema, experience)
    return TrajectorySource(config, schema, experience)

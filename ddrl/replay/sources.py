"""Sources of experience: what a trainer records into and learns from.

`ReplaySource` draws from an ExperienceReplay as often as a rate limiter allows; `AreaSource` draws from what rollouts
write into shared sample areas; `TrajectorySource` (in `trajectories`) hands out each trajectory once, in the order of
recording. A source from outside is a class with the methods of `Experience`, named by replay.source =
package.module:Class. No source knows torch or the network.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from ddrl.channels.area import SampleArea
from ddrl.core import plugins, specs
from ddrl.core.config import Config, ReplayConfig
from ddrl.core.errors import ChannelError, CheckpointError, ConfigError
from ddrl.core.files import DAMAGE, new_file, opened
from ddrl.core.rows import RowSchema
from ddrl.core.specs import Array, Floats
from ddrl.replay.batches import Handles, Sequences, Transitions, as_transitions
from ddrl.replay.evictions import make_eviction
from ddrl.replay.replay import ExperienceReplay
from ddrl.replay.selectors import make_selector

SNAPSHOT = "replay.snapshot"
AREAS_FILE = "areas.npz"
MAX_DRAW_SECONDS = 10.0  # limit of a draw from areas whose blocks are overwritten all the time


# -- pacing ------------------------------------------------------------------------------------------------------------
# How much may be recorded and whether a batch may be drawn, so that recording and learning keep in step. Nothing here
# blocks: pacing answers questions and counts; the caller waits.

UNLIMITED = 1 << 40


class Pacing(Protocol):
    """The rates of recording and drawing that a source of experience allows.

    May be left out: missing() -> int, how many rows to record before `ready` is asked again."""

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
        if self.samples_per_insert == 0:
            return UNLIMITED
        if not self._available():  # more rows of the same environments make what can be drawn, not rows of all of them
            return max(self._batch, self.min_size - self.inserts)
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


# -- sources -----------------------------------------------------------------------------------------------------------


class Used(NamedTuple):
    """What an update has used of a batch."""

    transitions: int
    versions: Handles  # [n], of the policies that acted in it


class Experience(Protocol):
    """What a trainer learns from. One thread calls it. A source may derive from it: the methods with a body are for
    sources to which they do not apply.

    Constructed as cls(config, schema, experience, areas): `experience` is what the algorithm declares, `areas` the
    sample areas that the rollouts write (none where rows go through lanes).
    """

    # Whether rollouts write transitions into sample areas instead of rows into lanes; such a class also has
    # `spare_blocks`, those of an area beyond areas.blocks.
    through_areas: ClassVar[bool] = False

    @property
    def pacing(self) -> Pacing:
        """How much may be recorded now, and whether `sample` may be called."""
        ...

    def record(self, rows: Array, newest_version: int) -> int:
        """Record rows of the schema's dtype in their order; the steps recorded. `newest_version`: of the policies
        published so far."""
        ...

    def arrived(self) -> int:
        """Steps that arrived through sample areas since the last call; 0 for other sources."""
        return 0

    def sample(self) -> Any:
        """One draw of the configured size."""
        ...

    def learned(self, batch: Any, priority: Array | None) -> Used:
        """An update has used the batch: set its priorities [B], count it."""
        ...

    def anneal(self, progress: float) -> None:
        """Move what is annealed to `progress` of the run, 0 to 1."""

    def cut(self) -> None:
        """End all running episodes: their environments are reset (a checkpoint, a resume)."""

    def figures(self) -> dict[str, float]:
        """Gauges by name (replay_size, replay_bytes, ...)."""
        ...

    def save(self, folder: Path) -> dict[str, Any]:
        """Write what is held into files of `folder`; the rest of a checkpoint, as JSON."""
        ...

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Become what `save` wrote and returned; CheckpointError where that cannot be used."""
        ...


def make_source(
    config: Config, schema: RowSchema, experience: specs.Experience, areas: Sequence[SampleArea] = ()
) -> Experience:
    """The source that replay.source names; auto: the one that an algorithm's declaration asks for."""
    name = config.replay.source
    if name == "areas":
        return AreaSource(config, schema, experience, areas)
    if name != "auto":
        return plugins.load("replay.source", "", name)(config, schema, experience, areas)
    if experience.source == "replay":
        return ReplaySource(config, schema, experience)
    from ddrl.replay.trajectories import TrajectorySource  # which is an `Experience`

    return TrajectorySource(config, schema, experience)


CHECKED_BATCH = 8  # draws of a batch of `small_source`
CHECKED_CAPACITY = 10_000  # records of `small_source` at most


def small_source(config: Config, schema: RowSchema, experience: specs.Experience) -> Experience | None:
    """An empty source of the run's kind whose batches have `CHECKED_BATCH` draws, for checks before the run; None where
    replay.source is the user's own."""
    if ":" in config.replay.source:
        return None
    capacity = min(config.replay.capacity, CHECKED_CAPACITY)  # never more memory than the run's own
    replay = ReplayConfig(n_step=config.replay.n_step, selector="uniform", capacity=capacity, min_size=1)
    small = replace(
        config,
        replay=replay,
        rollout=replace(config.rollout, refresh="step"),
        learner=replace(config.learner, batch_size=CHECKED_BATCH),
    )
    return make_source(small, schema, experience)


def rate_limiter(config: Config, batch: int, available: Callable[[], bool]) -> RateLimiter:
    """The rate limiter of the settings, for draws of up to `batch` transitions."""
    settings = config.replay
    return RateLimiter(settings.samples_per_insert, settings.min_size, settings.samples_tolerance, batch, available)


class ReplaySource(Experience):
    """Draws learner.batch_size transitions, or sequences where the experience's pick_len is above 1.

    Recording and drawing are held together by replay.samples_per_insert, counted in transitions: a sequence counts
    each of its positions in use."""

    def __init__(
        self, config: Config, schema: RowSchema, experience: specs.Experience, areas: Sequence[SampleArea] = ()
    ) -> None:
        settings = config.replay
        self._config = config
        self._experience = experience
        try:
            self.replay = ExperienceReplay.of(
                schema,
                settings.capacity,
                pick_len=experience.pick_len,
                short_picks=experience.pick_len > 1,  # else the last positions of an episode would be learned from less
                n_step=settings.n_step if experience.n_step is None else experience.n_step,
                burn_in=experience.burn_in,
                eviction=make_eviction(config),
                seed=config.run.seed,
                file=settings.file or None,
            )
        except RuntimeError as error:  # the kernel's: memory or a file that it cannot have, and what to set
            raise ConfigError(str(error)) from None
        selector = make_selector(config)
        self._uses_priorities = selector.uses_priorities
        self.selector = self.replay.new_pick_selector(selector)
        rollout = config.rollout
        self._weighted_lag = rollout.max_policy_lag if rollout.at_max_lag == "weight" else math.inf
        self._newest_version = 0
        self._increments = config.run.checkpoint_seconds > 0
        self._written = -1  # inode of the file of the last snapshot that was written or loaded
        self._evicted_before = (0, 0)  # records in all, and unseen ones, before the checkpoint that was loaded
        wanted = config.learner.batch_size * experience.pick_len
        self.limiter = rate_limiter(config, wanted, lambda: self.replay.num_picks > 0)

    @property
    def pacing(self) -> RateLimiter:
        """The rate limiter; nothing limits recording while no stream holds a whole window."""
        return self.limiter

    def record(self, rows: Array, newest_version: int) -> int:
        """Record rows; the steps recorded. O(rows)."""
        self._newest_version = max(self._newest_version, newest_version)
        recorded = self.replay.record_rows(rows)
        self.limiter.inserted(recorded)
        return recorded

    def sample(self, size: int = 0) -> Transitions | Sequences:
        """One draw, of `size` instead of learner.batch_size where it is given. ValueError where nothing can be
        drawn."""
        learner = self._config.learner
        draw = self.replay.sample if self._experience.pick_len == 1 else self.replay.sample_sequences
        batch = draw(size or learner.batch_size, self.selector, learner.discount)
        return batch if math.isinf(self._weighted_lag) else self._weighted(batch)

    def _weighted(self, batch: Transitions | Sequences) -> Transitions | Sequences:
        """With weights that fall with the lag beyond rollout.max_policy_lag; the lag of a sequence is that of its first
        record."""
        versions = np.maximum(self._newest_version - batch.policy_version.astype(np.float64), 0.0)
        lag = versions * self._config.learner.publish_period  # [updates]
        factor = np.minimum(1.0, (1.0 + self._weighted_lag) / (1.0 + lag))
        return batch._replace(weight=(batch.weight * factor).astype(np.float32))

    def learned(self, batch: Transitions | Sequences, priority: Array | None) -> Used:
        """Count the batch, and set its picks' priorities [B] to priority + replay.priority_offset (Schaul et al. 2016,
        section 3.3: p = |delta| + epsilon), so that a TD error of zero is drawn again."""
        if self._uses_priorities and priority is not None:
            raised = np.asarray(priority, np.float32) + np.float32(self._config.replay.priority_offset)
            self.replay.set_priority(self.selector, batch.pick_epi, batch.pick_pos, raised)
        transitions = len(batch.pick_epi) if isinstance(batch, Transitions) else int(batch.length.sum())
        self.limiter.sampled(transitions)
        return Used(transitions, batch.policy_version)

    def anneal(self, progress: float) -> None:
        """Beta of the importance weights rises linearly from replay.importance_exponent to 1."""
        start = self._config.replay.importance_exponent
        self.replay.set_importance_exponent(self.selector, start + min(1.0, progress) * (1.0 - start))

    def cut(self) -> None:
        """End all running episodes without a final state."""
        self.replay.cut_streams()

    def probabilities(self) -> Floats | None:
        """The probability of each pick in the next draw; None where all are equal or there is none."""
        return self.replay.probabilities(self.selector) if self._uses_priorities and len(self.replay) else None

    def figures(self) -> dict[str, float]:
        """Records held, their memory [bytes], and records evicted with episodes that were never drawn from."""
        return {
            "replay_size": len(self.replay),
            "replay_bytes": self.replay.nbytes,
            "records_evicted_unseen": self.evicted[1],
        }

    @property
    def evicted(self) -> tuple[int, int]:
        """Records evicted in the whole run, and those of them that no batch has drawn from."""
        before, unseen_before = self._evicted_before
        return before + self.replay.evicted, unseen_before + self.replay.evicted_unseen

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the replay with its selector; the rate limiter's state, and what was evicted.

        Where checkpoints are taken by time, what changed since the last one is written alone, and the files before it
        are linked, so that each folder is whole. Once such increments exceed half of their base, a new one is
        written."""
        chain = self._link_last(folder) if self._increments else 0
        path = folder / (f"{SNAPSHOT}.{chain}" if chain else SNAPSHOT)
        self.replay.save(path, increment=chain > 0)
        self._written = path.stat().st_ino
        return {**self.limiter.state(), "evicted": list(self.evicted)}

    def _link_last(self, folder: Path) -> int:
        """Link the replay's files of the newest checkpoint into `folder`; how many. 0 where that is not the one that
        this replay has written or loaded last, or its increments have become long."""
        last = max(folder.parent.glob("[0-9]*"), default=folder)
        files = _snapshots(last)
        sizes = [path.stat().st_size for path in files]
        if not files or files[-1].stat().st_ino != self._written or sum(sizes[1:]) > sizes[0] / 2:
            return 0
        try:
            for path in files:
                os.link(path, folder / path.name)
        except OSError:  # a file system without links
            for path in _snapshots(folder):
                path.unlink()
            return 0
        return len(files)

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Become what `save` wrote; CheckpointError where it cannot be used."""
        files = _snapshots(folder) or [folder / SNAPSHOT]
        self.replay.load(*files)
        self._written = files[-1].stat().st_ino
        self.limiter.load_state(state)
        try:  # older checkpoints have none: all that were recorded and are not held were evicted
            evicted, unseen = map(int, state.get("evicted", (self.limiter.inserts - len(self.replay), 0)))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the counts of evicted records {state['evicted']!r} cannot be used") from error
        self._evicted_before = evicted - self.replay.evicted, unseen - self.replay.evicted_unseen


def _snapshots(folder: Path) -> list[Path]:
    """The files of a replay in a checkpoint: the base, then its increments in their order."""
    files: list[Path] = []
    path = folder / SNAPSHOT
    while path.exists():
        files.append(path)
        path = folder / f"{SNAPSHOT}.{len(files)}"
    return files


class AreaSource(Experience):
    """Experience that rollouts write into sample areas (ddrl/channels/area.py). Each batch is drawn from one area, the
    areas in turn; neither side waits for the other.

    A batch is drawn from the complete blocks of an area that is full enough (areas.min_fill); where a block was
    overwritten during the draw, the draw is repeated. replay.samples_per_insert makes the learner wait where too little
    was written for another batch; in a serial run the rollout acts while the learner has drawn its share."""

    through_areas: ClassVar[bool] = True
    spare_blocks: ClassVar[int] = 1

    def __init__(
        self, config: Config, schema: RowSchema, experience: specs.Experience, areas: Sequence[SampleArea]
    ) -> None:
        if experience.source != "replay" or experience.pick_len > 1:
            raise ConfigError(
                f"replay.source = {config.replay.source} gives single transitions, but learner.algorithm = "
                f"{config.learner.algorithm} learns from trajectories or sequences: set replay.source = auto"
            )
        self._schema = schema
        self._batch_size = config.learner.batch_size
        self._limiter = rate_limiter(config, self._batch_size, self._available)
        self._rng = np.random.default_rng([config.run.seed, 0xA5EA])
        self._areas = areas
        self._min_blocks = max(1, round(config.areas.min_fill * config.areas.blocks))
        self._turn = 0  # index of the area to draw from next
        self._counted = [0] * len(areas)  # blocks that `arrived` has counted
        self.drawn = [0] * len(areas)  # batches by area
        self.repeated = 0
        self.torn = 0  # batches that a source derived from this one has learned from

    @property
    def pacing(self) -> RateLimiter:
        """The rate limiter."""
        return self._limiter

    def record(self, rows: Array, newest_version: int) -> int:
        """Areas take no rows."""
        raise ValueError("rows arrived through a lane, but experience is in sample areas")

    def arrived(self) -> int:
        """Samples written into the areas since the last call."""
        steps = 0
        for index, area in enumerate(self._areas):
            area.update()
            steps += (area.written - self._counted[index]) * area.block
            self._counted[index] = area.written
        self._limiter.inserted(steps)
        return steps

    def _available(self) -> bool:
        """Whether an area can be read. The areas are tried in turn, from the one after that of the last batch on."""
        for offset in range(len(self._areas)):
            index = (self._turn + offset) % len(self._areas)
            if self._readable(self._areas[index]):
                self._turn = index
                return True
        return False

    def _readable(self, area: SampleArea) -> bool:
        return area.update() >= self._min_blocks

    def learned(self, batch: Transitions, priority: Array | None) -> Used:
        """Count the batch; there are no priorities."""
        self._limiter.sampled(len(batch.pick_epi))
        return Used(len(batch.pick_epi), batch.policy_version)

    def sample(self) -> Transitions:
        """A batch of the area whose turn it is, or, where rollouts have overwritten too much of it since, of the next
        that can be read. ChannelError where none can be for MAX_DRAW_SECONDS."""
        end = time.monotonic() + MAX_DRAW_SECONDS
        while time.monotonic() < end:
            if not self._limiter.ready():
                os.sched_yield()  # the rollouts are in the middle of a block, which is short
                continue
            columns = self._draw(self._areas[self._turn])
            if columns is None:
                continue
            self.drawn[self._turn] += 1
            self._turn = (self._turn + 1) % len(self._areas)
            return as_transitions(self._schema, columns)
        raise ChannelError(
            f"no sample area could be read for {MAX_DRAW_SECONDS:g} s: rollouts write over what is drawn; raise "
            "areas.blocks or areas.block"
        )

    def _draw(self, area: SampleArea) -> dict[str, Array] | None:
        """Samples of an area by column, or None where they are to be drawn again."""
        complete = area.update()
        if not complete:
            return None
        columns, whole = area.draw(self._rng.integers(0, complete * area.block, self._batch_size))
        self.repeated += not whole
        return columns if whole else None

    def figures(self) -> dict[str, float]:
        """Samples in complete blocks, areas that can be read, repeated draws, and torn batches (none here)."""
        samples = sum(area.update() * area.block for area in self._areas)
        return {
            "replay_size": float(samples),
            "areas_readable": float(sum(map(self._readable, self._areas))),
            "draws_repeated": float(self.repeated),
            "torn_batches": float(self.torn),
        }

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the complete blocks of the areas."""
        arrays = {f"area_{index}": area.save() for index, area in enumerate(self._areas)}
        with new_file(folder / AREAS_FILE) as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        return self._state() | {"turn": self._turn}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Fill the areas as `save` found them, as far as there are so many; CheckpointError where that cannot be."""
        try:
            with opened(folder / AREAS_FILE) as file, np.load(file, allow_pickle=False) as saved:
                for index, area in enumerate(self._areas):
                    if f"area_{index}" in saved:
                        area.load(saved[f"area_{index}"])
        except (OSError, ValueError, ChannelError) as error:
            raise CheckpointError(f"{folder / AREAS_FILE} cannot be used: {error}") from None
        self._counted = [area.written for area in self._areas]
        self._load_state(state)
        self._turn = int(state.get("turn", 0)) % max(len(self._areas), 1)

    def _state(self) -> dict[str, Any]:
        """The rate limiter's, and the state of the random draws."""
        return self._limiter.state() | {"rng": json.dumps(self._rng.bit_generator.state)}

    def _load_state(self, state: dict[str, Any]) -> None:
        self._limiter.load_state(state)
        try:
            self._rng.bit_generator.state = json.loads(state["rng"])
        except (KeyError, TypeError, OverflowError, *DAMAGE) as error:
            raise CheckpointError(f"the state of the random draws cannot be used ({error!r})") from None

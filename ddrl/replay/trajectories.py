"""Experience that is learned from once, in order: trajectories, and the queue in which they wait."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.area import SampleArea
from ddrl.core import specs
from ddrl.core.config import Config
from ddrl.core.errors import CheckpointError, ConfigError
from ddrl.core.files import new_file, opened
from ddrl.core.rows import RowKind, RowSchema
from ddrl.core.specs import Column, ColumnRole
from ddrl.replay.batches import as_observation
from ddrl.replay.sources import Experience, Used

TRAJECTORIES_FILE = "trajectories.npy"
QUEUED_DRAWS = 2  # that the queue holds: one to draw, one to fill


class Trajectories(NamedTuple):
    """B trajectories of at most T steps; what lies past a length is zero."""

    state: Any  # [B, T + 1, *observation]; the last one in use, at index length, is what to bootstrap from
    action: NDArray[Any]  # [B, T, *action]
    reward: NDArray[np.float32]  # [B, T, *reward]
    terminated: NDArray[np.bool_]  # [B], the state at index length is terminal: no bootstrap
    length: NDArray[np.uint32]  # [B], steps in use
    policy_version: NDArray[np.uint64]  # [B, T], of the policy that acted
    columns: dict[str, NDArray[Any]]  # further ones: [B, T, ...]; MEMORY [B, ...], of the first step; STATE [B, T + 1]


@dataclass(slots=True)
class _Run:
    """The rows of one stream's unfinished trajectory."""

    places: list[int]  # of its rows in the source's memory
    step: int = 0  # of the newest row


class TrajectorySource(Experience):
    """Experience that is learned from once: a bounded queue of trajectories, in the order of recording.

    A trajectory is `length` consecutive steps of one stream with the state after them. An episode's end, a gap in
    `step` and `cut` end one early; it is then shorter. Trajectories overlap in no step. A draw is learner.batch_size x
    length steps, however long its trajectories are: the last one is cut where that is reached, and the next draw begins
    with its rest. The queue holds two draws; a full one takes no rows (`insertable` is 0), so that lanes hold the
    rollouts back. With max_policy_lag a trajectory that holds a step older than that many versions is dropped and
    counted, when it is recorded and again when it would be handed out. It is its own pacing."""

    def __init__(
        self, config: Config, schema: RowSchema, experience: specs.Experience, areas: Sequence[SampleArea] = ()
    ) -> None:
        if experience.length < 1:
            raise ConfigError(f"a trajectory's length ({experience.length}) must be at least 1")
        if schema.frame_stack > 1:
            raise ConfigError(
                f"trajectories of stacked frames (frame_stack {schema.frame_stack}) are not supported: a trajectory "
                "does not hold the frames before its first step"
            )
        self._schema = schema
        self._length = experience.length
        if math.isfinite(config.rollout.max_policy_lag) and config.rollout.at_max_lag == "weight":
            raise ConfigError(
                f"rollout.at_max_lag = weight: learner.algorithm = {config.learner.algorithm} learns from whole "
                "trajectories, which have no weights: choose wait or drop"
            )
        self._max_lag = experience.max_policy_lag
        self._draw = config.learner.batch_size * self._length  # [steps]
        self._queue: deque[NDArray[Any]] = deque()  # each: its steps' rows and the row that holds the state after them
        self._waiting = 0  # steps in the queue
        self._rows = np.zeros(0, schema.dtype)  # of unfinished trajectories, and of those that have ended since
        self._filled = 0  # rows of them
        self._running: dict[int, _Run] = {}  # by stream: its unfinished trajectory
        self._newest = 0
        self._dropped = 0

    @property
    def pacing(self) -> TrajectorySource:
        """The queue itself."""
        return self

    def change(self, samples_per_insert: float) -> None:
        """Nothing: each trajectory is learned from once, however often an algorithm goes over it."""

    def insertable(self) -> int:
        """Rows that may be recorded now: each is one step more, in the queue or of a trajectory that has begun."""
        return max(0, QUEUED_DRAWS * self._draw - self._waiting)

    def missing(self) -> int:
        """Steps by which the queue is short of a draw. Fewer rows may do, where they end trajectories that have begun:
        to notice that, the caller would have to ask after each of them."""
        return max(0, self._draw - self._waiting)

    def record(self, rows: NDArray[Any], newest_version: int) -> int:
        """Record rows; the steps recorded. ValueError for a row of an unknown kind, with nothing recorded."""
        if rows.dtype != self._schema.dtype:
            raise TypeError(f"rows of dtype {rows.dtype} do not fit the schema's {self._schema.dtype}")
        kinds = rows["kind"]
        if (kinds > RowKind.TRUNCATED).any():
            raise ValueError(f"a row of kind {kinds.max()} is no row of experience: it is torn or foreign")
        self._newest = max(self._newest, newest_version)
        steps = kinds == RowKind.STEP
        first = self._keep(rows)
        order = np.argsort(rows["stream"], kind="stable")
        stream = rows["stream"][order]
        step = rows["step"][order].astype(np.int64)
        end = ~steps[order]
        apart = (stream[1:] != stream[:-1]) | (step[1:] != step[:-1] + 1) | end[:-1]
        begins = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)] if len(rows) else [0]
        places = (first + order).tolist()
        finished: list[tuple[int, list[int]]] = []
        for begin, stop in itertools.pairwise(begins):  # rows of a stream that follow each other
            piece = places[begin:stop]
            finished += self._continue(int(stream[begin]), int(step[begin]), piece, bool(end[stop - 1]))
        for _, trajectory in sorted(finished, key=operator.itemgetter(0)):
            self._queue_up(trajectory)
        return int(np.count_nonzero(steps))

    def ready(self) -> bool:
        """Whether the queue holds a draw, of trajectories that are not too old."""
        if self._max_lag is not None:
            fresh = [one for one in self._queue if not self._too_old(one)]
            self._dropped += len(self._queue) - len(fresh)
            self._set_queue(fresh)
        return self._waiting >= self._draw

    def sample(self) -> Trajectories:
        """The oldest trajectories of so many steps as a draw has, which leave the queue. ValueError where there are not
        enough."""
        if not self.ready():
            raise ValueError(f"the queue holds no draw yet: {self._waiting} of {self._draw} steps")
        chosen: list[NDArray[Any]] = []
        missing = self._draw
        while missing:
            rows = self._queue.popleft()
            if len(rows) - 1 > missing:
                self._queue.appendleft(rows[missing:])  # whose first state is the one after the last step taken
                rows = rows[: missing + 1]
            chosen.append(rows)
            missing -= len(rows) - 1
        self._waiting -= self._draw
        return self._assemble(chosen)

    def learned(self, batch: Trajectories, priority: NDArray[Any] | None) -> Used:
        """Nothing is kept of a trajectory that was learned from."""
        versions = batch.policy_version[_before(batch.length, batch.policy_version.shape[1])]
        return Used(len(versions), versions)

    def cut(self) -> None:
        """End all running trajectories; the state after the last step is unknown, so that step is not learned from."""
        for _, run in sorted(self._running.items()):
            self._queue_up(run.places)
        self._running.clear()

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the trajectories that wait; the counts."""
        rows = np.concatenate([*self._queue, np.zeros(0, self._schema.dtype)])
        lengths = np.array([len(one) for one in self._queue], np.int64)
        with new_file(folder / TRAJECTORIES_FILE) as file:
            np.save(file, lengths, allow_pickle=False)
            np.save(file, rows.view(np.uint8), allow_pickle=False)
        return {"newest_version": self._newest, "dropped": self._dropped}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Become what `save` wrote, with no running trajectory; CheckpointError where it cannot be used."""
        try:
            with opened(folder / TRAJECTORIES_FILE) as file:
                lengths = np.load(file, allow_pickle=False)
                rows = np.load(file, allow_pickle=False).view(self._schema.dtype)
            if lengths.sum() != len(rows) or (lengths < 2).any() or (lengths > self._length + 1).any():
                raise ValueError("its trajectories have other lengths")
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / TRAJECTORIES_FILE} cannot be loaded: {error}") from None
        try:
            newest = int(state["newest_version"])
            dropped = int(state["dropped"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of the trajectories {state!r} cannot be used ({error!r})") from None
        self._set_queue(np.split(rows, np.cumsum(lengths)[:-1]) if len(lengths) else [])
        self._running.clear()
        self._newest = newest
        self._dropped = dropped

    def figures(self) -> dict[str, float]:
        """Steps that wait, their memory [bytes], and trajectories dropped for their age."""
        rows = self._waiting + len(self._queue)
        return {
            "replay_size": self._waiting,
            "replay_bytes": rows * self._schema.dtype.itemsize,
            "trajectories_dropped": self._dropped,
        }

    def _keep(self, rows: NDArray[Any]) -> int:
        """Copy rows into memory; the place of the first. Where it is full, those of ended trajectories make room."""
        if self._filled + len(rows) > len(self._rows):
            runs = self._running.values()
            places = [place for run in runs for place in run.places]
            kept = self._rows[places]
            self._rows = np.zeros(2 * (len(kept) + len(rows)) + self._draw, self._schema.dtype)
            self._rows[: len(kept)] = kept
            self._filled = 0
            for run in runs:
                begin = self._filled
                self._filled += len(run.places)
                run.places = list(range(begin, self._filled))
        begin = self._filled
        self._filled += len(rows)
        self._rows[begin : self._filled] = rows
        return begin

    def _continue(self, stream: int, step: int, places: list[int], end: bool) -> Iterator[tuple[int, list[int]]]:
        """Add the next rows of a stream, the first of which is of `step` and which lie at `places`; `end`: the last of
        them is an end. The trajectories that they finish: the place of the row that does so, and those of its rows.

        A run is a sequence of rows without a gap in `step`, up to an end row. It is cut every `length` rows; a row at a
        cut is the last of one trajectory, whose state comes after its steps, and the first of the next."""
        run = self._running.get(stream)
        if run is None:
            run = self._running[stream] = _Run([])
        elif step != run.step + 1:  # the row after the gap finishes what was before it
            yield places[0], run.places
            run.places = []
        run.places += places
        run.step = step + len(places) - 1
        while len(run.places) > self._length:
            yield run.places[self._length], run.places[: self._length + 1]
            del run.places[: self._length]
        if end:
            yield places[-1], run.places
            run.places = []

    def _queue_up(self, places: list[int]) -> None:
        """Put a trajectory into the queue, unless it has no step: its steps' rows, and the row that holds the state
        after them."""
        if len(places) < 2:
            return
        trajectory = self._rows.take(places)  # half the time of [places]
        if self._too_old(trajectory):
            self._dropped += 1
        else:
            self._queue.append(trajectory)
            self._waiting += len(trajectory) - 1

    def _set_queue(self, trajectories: list[NDArray[Any]]) -> None:
        self._queue = deque(trajectories)
        self._waiting = sum(len(one) - 1 for one in trajectories)

    def _too_old(self, rows: NDArray[Any]) -> bool:
        return self._max_lag is not None and int(rows["policy_version"][:-1].min()) + self._max_lag < self._newest

    def _assemble(self, chosen: list[NDArray[Any]]) -> Trajectories:
        length = np.array([len(one) - 1 for one in chosen], np.uint32)
        joined = np.concatenate([one.view(np.uint8) for one in chosen])  # numpy takes 7 times as long to join structs
        rows = joined.view(self._schema.dtype)
        ends = np.cumsum(length + 1, dtype=np.int64) - 1  # the rows that hold the states after the trajectories' steps
        made = {column.name: self._column(column, rows[column.name], length, ends) for column in self._schema.stored}
        return Trajectories(
            as_observation(self._schema, made),
            made["action"],
            made["reward"],
            rows["kind"][ends] == RowKind.TERMINATED,
            length,
            made["policy_version"],
            {column.name: made[column.name] for column in self._schema.further},
        )

    def _column(
        self, column: Column, values: NDArray[Any], length: NDArray[np.uint32], ends: NDArray[np.int64]
    ) -> NDArray[Any]:
        """One column of trajectories whose rows follow each other."""
        if column.role is ColumnRole.MEMORY:
            return values[ends - length]
        at_end = column.role is ColumnRole.STATE
        array = np.zeros((len(length), self._length + at_end, *column.shape), column.dtype)
        array[_before(length + at_end, array.shape[1])] = values if at_end else np.delete(values, ends, axis=0)
        return array


def _before(length: NDArray[np.uint32], count: int) -> NDArray[np.bool_]:
    """[B, count], the first `length` of each row."""
    return np.arange(count) < length[:, None]

"""Experience that is learned from once: a bounded queue of trajectories, in the order of recording.

A trajectory is `length` consecutive steps of one stream with the state after them. An episode's end, a gap in `step`
and `cut` end one early; it is then shorter. Trajectories overlap in no step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddrl.core.algorithm import Experience
from ddrl.core.config import Config
from ddrl.core.errors import CheckpointError, ConfigError
from ddrl.core.files import replacement
from ddrl.core.rows import RowKind, RowSchema
from ddrl.core.specs import Column, ColumnRole

FILE = "trajectories.npy"
MIN_BATCHES = 2  # batches that the queue holds: one to draw, one to fill


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

    rows: NDArray[Any]  # [length + 1], of which `count` are in use
    count: int = 0
    step: int = 0  # of the newest row


class TrajectorySource:
    """A queue of at least two batches of learner.batch_size trajectories.

    A full queue takes no rows (`insertable` is 0), so that lanes hold the rollouts back. With max_policy_lag a
    trajectory that holds a step older than that many versions is dropped and counted, when it is recorded and again
    when it would be handed out."""

    def __init__(self, config: Config, schema: RowSchema, experience: Experience) -> None:
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
        self._batch_size = config.learner.batch_size
        self._capacity = MIN_BATCHES * self._batch_size  # [trajectories]
        self._queue: deque[NDArray[Any]] = deque()  # each: its steps' rows and the row that holds the state after them
        self._running: dict[int, _Run] = {}  # by stream: its unfinished trajectory
        self._newest = 0
        self._dropped = 0

    def insertable(self) -> int:
        """Rows that may be recorded now: each can complete at most one trajectory."""
        return max(0, self._capacity - len(self._queue))

    def record(self, rows: NDArray[Any], newest_version: int) -> int:
        """Record rows; the steps recorded. ValueError for a row of an unknown kind, with nothing recorded."""
        if rows.dtype != self._schema.dtype:
            raise TypeError(f"rows of dtype {rows.dtype} do not fit the schema's {self._schema.dtype}")
        kinds = rows["kind"]
        if (kinds > RowKind.TRUNCATED).any():
            raise ValueError(f"a row of kind {kinds.max()} is no row of experience: it is torn or foreign")
        self._newest = max(self._newest, newest_version)
        places = zip(rows["stream"].tolist(), rows["step"].tolist(), kinds.tolist(), strict=True)
        for place, (stream, step, kind) in enumerate(places):
            self._continue(stream, step, kind != RowKind.STEP, rows[place])
        return int((kinds == RowKind.STEP).sum())

    def arrived(self) -> int:
        """Everything comes through `record`."""
        return 0

    def ready(self) -> bool:
        """Whether a batch of trajectories stands in the queue, none of them too old."""
        fresh = [one for one in self._queue if not self._too_old(one)]
        self._dropped += len(self._queue) - len(fresh)
        self._queue = deque(fresh)
        return len(self._queue) >= self._batch_size

    def sample(self) -> Trajectories:
        """The oldest batch of trajectories, which leave the queue. ValueError where there are not enough."""
        if not self.ready():
            raise ValueError(f"no batch stands in the queue yet: {len(self._queue)} of {self._batch_size} trajectories")
        return self._assemble([self._queue.popleft() for _ in range(self._batch_size)])

    def count(self, batch: Trajectories) -> int:
        """Transitions of a batch."""
        return int(batch.length.sum())

    def learned(self, batch: Trajectories, priority: NDArray[Any] | None) -> None:
        """Nothing is kept of a trajectory that was learned from."""

    def anneal(self, progress: float) -> None:
        """Nothing is annealed."""

    def cut(self) -> None:
        """End all running trajectories; the state after the last step is unknown, so that step is not learned from."""
        for _, run in sorted(self._running.items()):
            self._finish(run)
        self._running.clear()

    def save(self, folder: Path) -> None:
        """Write the trajectories that wait."""
        rows = np.concatenate([*self._queue, np.zeros(0, self._schema.dtype)])
        lengths = np.array([len(one) for one in self._queue], np.int64)
        with replacement(folder / FILE) as temporary, temporary.open("wb") as file:
            np.save(file, lengths, allow_pickle=False)
            np.save(file, rows.view(np.uint8), allow_pickle=False)

    def load(self, folder: Path) -> None:
        """Become what `save` wrote, with no running trajectory; CheckpointError where it cannot be used."""
        try:
            with (folder / FILE).open("rb") as file:
                lengths = np.load(file, allow_pickle=False)
                rows = np.load(file, allow_pickle=False).view(self._schema.dtype)
            if lengths.sum() != len(rows) or (lengths < 2).any() or (lengths > self._length + 1).any():
                raise ValueError("its trajectories have other lengths")
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / FILE} cannot be loaded: {error}") from None
        self._queue = deque(np.split(rows, np.cumsum(lengths)[:-1])) if len(lengths) else deque()
        self._running.clear()

    def state(self) -> dict[str, Any]:
        """The counts."""
        return {"newest_version": self._newest, "dropped": self._dropped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        try:
            self._newest = int(state["newest_version"])
            self._dropped = int(state["dropped"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of the trajectories {state!r} cannot be used ({error!r})") from None

    def versions(self, batch: Trajectories) -> NDArray[np.uint64]:
        """The policy versions [n] that acted in a batch."""
        return batch.policy_version[np.arange(self._length) < batch.length[:, None]]

    def set_samples_per_insert(self, samples_per_insert: float) -> None:
        """Nothing: each trajectory is learned from once, however often an algorithm goes over it."""

    def law(self) -> None:
        """None: trajectories are taken in order."""

    def figures(self) -> dict[str, float]:
        """Steps that wait, their memory [bytes], and trajectories dropped for their age."""
        rows = sum(len(one) for one in self._queue)
        return {
            "replay_size": rows - len(self._queue),
            "replay_bytes": rows * self._schema.dtype.itemsize,
            "trajectories_dropped": self._dropped,
        }

    def _continue(self, stream: int, step: int, end: bool, row: np.void) -> None:
        """Add one stream's next row. Rows mostly come one or a few at a time, so that arrays of them cost more than
        steps of Python do.

        A run is a sequence of rows without a gap in `step`, up to an end row. It is cut every `length` rows; a row at a
        cut is the last of one trajectory, whose state comes after its steps, and the first of the next."""
        run = self._running.get(stream)
        if run is None:
            run = self._running[stream] = _Run(np.zeros(self._length + 1, self._schema.dtype))
        elif step != run.step + 1:  # the row after the gap finishes what was before it
            self._finish(run)
        run.rows[run.count] = row
        run.count = run.count + 1
        run.step = step
        if end or run.count > self._length:
            self._finish(run)
            if not end:
                run.rows[0] = row
                run.count = 1

    def _finish(self, run: _Run) -> None:
        """End a trajectory, unless it has no step."""
        if run.count > 1:
            self._enqueue(run.rows[: run.count].copy())
        run.count = 0

    def _enqueue(self, trajectory: NDArray[Any]) -> None:
        """Put a trajectory into the queue: its steps, and the row whose state comes after them."""
        if self._too_old(trajectory):
            self._dropped += 1
        else:
            self._queue.append(trajectory)

    def _too_old(self, rows: NDArray[Any]) -> bool:
        return self._max_lag is not None and int(rows["policy_version"][:-1].min()) + self._max_lag < self._newest

    def _assemble(self, chosen: list[NDArray[Any]]) -> Trajectories:
        length = np.array([len(one) - 1 for one in chosen], np.uint32)
        made = {column.name: self._column(column, chosen) for column in self._schema.stored}
        observation = {self._schema.array_name(one): made[one.name] for one in self._schema.observation}
        return Trajectories(
            made.get("state", observation),
            made["action"],
            made["reward"],
            np.array([one[-1]["kind"] == RowKind.TERMINATED for one in chosen]),
            length,
            made["policy_version"],
            {column.name: made[column.name] for column in self._schema.further},
        )

    def _column(self, column: Column, chosen: list[NDArray[Any]]) -> NDArray[Any]:
        if column.role is ColumnRole.MEMORY:
            return np.stack([one[column.name][0] for one in chosen])
        ends = column.role is ColumnRole.STATE
        array = np.zeros((len(chosen), self._length + ends, *column.shape), column.dtype)
        for values, one in zip(array, chosen, strict=True):
            values[: len(one) - 1 + ends] = one[column.name][: len(one) - 1 + ends]
        return array

"""Experience in a pool of single transitions: filled first, then each new one replaces a random one.

What asynchronous exploring is compared with: fill a pool of 10,000, then train on a batch, explore a sample, replace a
random one (replay.capacity, replay.samples_per_insert = learner.batch_size).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.algorithm import Experience
from ddrl.core.config import Config
from ddrl.core.errors import CheckpointError
from ddrl.core.files import replacement
from ddrl.core.rows import RowKind, RowSchema
from ddrl.replay.batches import Transitions
from ddrl.replay.sources.assembled import TransitionSource, as_batch

FILE = "pool.npz"


class PoolSource(TransitionSource):
    """Draws learner.batch_size transitions of the pool, uniformly, once it holds replay.min_size of them."""

    def __init__(self, config: Config, schema: RowSchema, experience: Experience) -> None:
        super().__init__(config, schema, experience, stream=0x9001)
        self._capacity = config.replay.capacity
        self._size = 0
        self._pool = {one.name: np.zeros((self._capacity, *one.shape), one.dtype) for one in self._builder.columns}

    def record(self, rows: NDArray[Any], newest_version: int) -> int:
        """Put the transitions that `rows` complete into the pool; the steps recorded."""
        given = self._builder.add(rows)
        count = len(given["discount_t"])
        fresh = min(count, self._capacity - self._size)
        places = np.concatenate(
            [self._size + np.arange(fresh), self._rng.integers(0, self._capacity, count - fresh)]
        ).astype(np.int64)
        for name, array in self._pool.items():
            array[places] = given[name]
        self._size += fresh
        steps = int((rows["kind"] == RowKind.STEP).sum())
        self._limiter.inserted(steps)
        return steps

    def arrived(self) -> int:
        """Everything comes through lanes."""
        return 0

    def ready(self) -> bool:
        """Whether samples_per_insert allows a draw and there is something to draw."""
        return self._size > 0 and self._limiter.can_sample(self._batch_size)

    def sample(self) -> Transitions:
        """One draw. ValueError where nothing can be drawn."""
        rows = self._rng.integers(0, self._size, self._batch_size)
        return as_batch(self._schema, {name: array[rows] for name, array in self._pool.items()})

    def cut(self) -> None:
        """End all running episodes."""
        self._builder.cut()

    def save(self, folder: Path) -> None:
        """Write the pool."""
        with replacement(folder / FILE) as temporary, temporary.open("wb") as file:
            np.savez(file, **{name: array[: self._size] for name, array in self._pool.items()})  # pyright: ignore[reportArgumentType]

    def load(self, folder: Path) -> None:
        """Become the pool that `save` wrote; CheckpointError where it cannot be used."""
        try:
            with np.load(folder / FILE, allow_pickle=False) as saved:
                self._size = len(saved["discount_t"])
                for name, array in self._pool.items():
                    array[: self._size] = saved[name]
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{folder / FILE} cannot be used: {error}") from None

    def figures(self) -> dict[str, float]:
        """Transitions held and their memory [bytes]."""
        return {"replay_size": float(self._size), "replay_bytes": float(sum(a.nbytes for a in self._pool.values()))}

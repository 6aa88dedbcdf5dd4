"""Sources of experience that sample areas are compared with; replay.source = benchmarks.admix.sources:CLASS.

`RandomPool` is the serial procedure: fill a pool of transitions, then learn from a batch, explore a sample, replace a
random one. `PlainFlag` is sample areas guarded by a plain flag alone, which can tear batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.area import SampleArea
from ddrl.core.config import Config
from ddrl.core.errors import CheckpointError, ConfigError
from ddrl.core.files import replacement
from ddrl.core.rows import RowKind, RowSchema, TransitionBuilder
from ddrl.core.specs import Experience
from ddrl.replay.batches import Transitions, as_transitions
from ddrl.replay.sources import AreaSource

FILE = "pool.npz"


class RandomPool(AreaSource):
    """Draws from replay.capacity single transitions: filled first, then each new one replaces a random one."""

    name = "random_pool"
    through_areas: ClassVar[bool] = False

    def __init__(
        self, config: Config, schema: RowSchema, experience: Experience, areas: Sequence[SampleArea] = ()
    ) -> None:
        super().__init__(config, schema, experience, areas)
        self._rng = np.random.default_rng([config.run.seed, 0x9001])
        if config.rollout.at_max_lag == "weight":
            raise ConfigError("rollout.at_max_lag = weight: the transitions of a random pool have no weights")
        n_step = config.replay.n_step if experience.n_step is None else experience.n_step
        self._builder = TransitionBuilder(schema, n_step, config.learner.discount)
        self._capacity = config.replay.capacity
        self._size = 0
        self._pool = {one.name: np.zeros((self._capacity, *one.shape), one.dtype) for one in self._builder.columns}

    def _available(self) -> bool:
        return self._size > 0

    def record(self, rows: NDArray[Any], newest_version: int) -> int:
        """Put the transitions that `rows` complete into the pool; the steps recorded."""
        given = self._builder.add(rows)
        count = len(given["discount_t"])
        fresh = min(count, self._capacity - self._size)
        replaced = self._rng.integers(0, self._capacity, count - fresh)
        places = np.concatenate([self._size + np.arange(fresh), replaced]).astype(np.int64)
        for name, array in self._pool.items():
            array[places] = given[name]
        self._size += fresh
        steps = int((rows["kind"] == RowKind.STEP).sum())
        self._limiter.inserted(steps)
        return steps

    def sample(self) -> Transitions:
        """One draw. ValueError where nothing can be drawn."""
        rows = self._rng.integers(0, self._size, self._batch_size)
        return as_transitions(self._schema, {name: array[rows] for name, array in self._pool.items()})

    def cut(self) -> None:
        """End all running episodes."""
        self._builder.cut()

    def figures(self) -> dict[str, float]:
        """Transitions held and their memory [bytes]."""
        return {"replay_size": float(self._size), "replay_bytes": float(sum(a.nbytes for a in self._pool.values()))}

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the pool."""
        with replacement(folder / FILE) as temporary, temporary.open("wb") as file:
            np.savez(file, **{name: array[: self._size] for name, array in self._pool.items()})  # pyright: ignore[reportArgumentType]
        return self._state()

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Become the pool that `save` wrote; CheckpointError where it cannot be used."""
        try:
            with np.load(folder / FILE, allow_pickle=False) as saved:
                self._size = len(saved["discount_t"])
                for name, array in self._pool.items():
                    array[: self._size] = saved[name]
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{folder / FILE} cannot be used: {error}") from None
        self._load_state(state)


class PlainFlag(AreaSource):
    """Sample areas without a spare block: one can be read while no block is being written, and nothing is looked at
    after the copy. A write that begins meanwhile tears the batch, which is learned from as it is and counted."""

    name = "plain_flag"
    spare_blocks: ClassVar[int] = 0

    def _readable(self, area: SampleArea) -> bool:
        return area.update() == area.slots

    def _draw(self, area: SampleArea) -> dict[str, NDArray[Any]] | None:
        if not self._readable(area):
            return None
        columns, whole = area.draw(self._rng.integers(0, area.slots * area.block, self._batch_size))
        self.torn += not whole
        return columns

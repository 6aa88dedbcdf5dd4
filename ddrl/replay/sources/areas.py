"""Experience that explorers write into sample areas: each batch from one area, in turn; nobody waits.

A batch is drawn from the blocks that stand whole in an area that is full enough (areas.min_fill); where a block was
written over meanwhile, it is drawn again from what still stands. With areas.guard = flag it is learned from as it is,
and counted: the ablation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.area import SampleArea
from ddrl.core.algorithm import Experience
from ddrl.core.config import Config
from ddrl.core.errors import ChannelError, CheckpointError
from ddrl.core.files import replacement
from ddrl.core.rows import RowSchema
from ddrl.replay.batches import Transitions
from ddrl.replay.sources.assembled import TransitionSource, as_batch

FILE = "areas.npz"
LONGEST_DRAW = 10.0  # [s]


class AreaSource(TransitionSource):
    """Draws learner.batch_size transitions of the areas' blocks.

    replay.samples_per_insert holds the learner back where what is written is too little for another batch; explorers
    are never held back. A serial run explores while the learner has drawn its share."""

    def __init__(self, config: Config, schema: RowSchema, experience: Experience, areas: Sequence[SampleArea]) -> None:
        super().__init__(config, schema, experience, stream=0xA5EA)
        self._areas = areas
        self._least = max(1, round(config.areas.min_fill * config.areas.blocks))  # blocks
        self._turn = 0  # the area that comes next
        self._seen = [0] * len(areas)  # blocks that were counted as arrived
        self.drawn = [0] * len(areas)  # batches by area
        self.repeated = self.torn = 0

    def record(self, rows: NDArray[Any], newest_version: int) -> int:
        """Areas take no rows."""
        raise ValueError("rows came through a lane, but experience is in sample areas")

    def arrived(self) -> int:
        """Samples written into the areas since the last call."""
        steps = 0
        for index, area in enumerate(self._areas):
            area.update()
            steps += (area.written - self._seen[index]) * area.block
            self._seen[index] = area.written
        self._limiter.inserted(steps)
        return steps

    def ready(self) -> bool:
        """Whether an area can be read and samples_per_insert allows a draw. The areas are asked in turn, from the one
        after that of the last batch on."""
        if not self._limiter.can_sample(self._batch_size):
            return False
        count = len(self._areas)
        for index in ((self._turn + offset) % count for offset in range(count)):
            if self._readable(self._areas[index]):
                self._turn = index
                return True
        return False

    def sample(self) -> Transitions:
        """A batch of the area that `ready` has chosen, or, where explorers have written over too much of it since, of
        the next that can be read. ChannelError where none can for LONGEST_DRAW seconds."""
        end = time.monotonic() + LONGEST_DRAW
        while time.monotonic() < end:
            if not self.ready():
                os.sched_yield()  # explorers are in the middle of a block, which is short
                continue
            area = self._areas[self._turn]
            standing = area.update()
            if not standing or (area.guard == "flag" and standing < area.blocks):
                continue
            columns, whole = area.draw(self._rng.integers(0, standing * area.block, self._batch_size))
            if not whole and area.guard == "generations":
                self.repeated += 1
                continue
            self.torn += not whole
            self.drawn[self._turn] += 1
            self._turn = (self._turn + 1) % len(self._areas)
            return as_batch(self._schema, columns)
        raise ChannelError(
            f"no sample area could be read for {LONGEST_DRAW:g} s: explorers write over what is drawn; raise "
            "areas.blocks or areas.block"
        )

    def cut(self) -> None:
        """Samples are whole transitions; explorers drop what they have not written."""

    def save(self, folder: Path) -> None:
        """Write the blocks that stand whole in the areas."""
        arrays = {f"area_{index}": area.save() for index, area in enumerate(self._areas)}
        with replacement(folder / FILE) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

    def load(self, folder: Path) -> None:
        """Fill the areas as `save` found them, as far as there are so many; CheckpointError where that cannot be."""
        try:
            with np.load(folder / FILE, allow_pickle=False) as saved:
                for index, area in enumerate(self._areas):
                    if f"area_{index}" in saved:
                        area.load(saved[f"area_{index}"])
        except (OSError, ValueError, ChannelError) as error:
            raise CheckpointError(f"{folder / FILE} cannot be used: {error}") from None
        self._seen = [area.written for area in self._areas]

    def state(self) -> dict[str, Any]:
        """Also whose turn it is."""
        return super().state() | {"turn": self._turn}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `TransitionSource`."""
        super().load_state(state)
        self._turn = int(state.get("turn", 0)) % max(len(self._areas), 1)

    def figures(self) -> dict[str, float]:
        """Samples that stand whole, areas that can be read, draws that were repeated, and torn batches learned from."""
        standing = [area.update() for area in self._areas]
        return {
            "replay_size": float(sum(blocks * area.block for blocks, area in zip(standing, self._areas, strict=True))),
            "areas_readable": float(sum(map(self._readable, self._areas))),
            "draws_repeated": float(self.repeated),
            "torn_batches": float(self.torn),
        }

    def _readable(self, area: SampleArea) -> bool:
        return area.update() >= (area.blocks if area.guard == "flag" else self._least)

"""The explorer's end of a sample area: vector steps in, transitions of the area out, k at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddrl import _kernel
from ddrl.channels.area import SampleArea
from ddrl.channels.lane import Lane
from ddrl.channels.step_writer import StepWriter
from ddrl.core.rows import RowSchema
from ddrl.core.transitions import TransitionBuilder

COLLECTED_ROWS = 256  # that are made into transitions at once


class AreaWriter(StepWriter):
    """A StepWriter whose lane is this process's own. It never waits: what the trainer has not drawn is overwritten.

    `cut` also drops the samples of a block that is not full yet, so that a run depends on nothing before it."""

    def __init__(
        self,
        area: SampleArea,
        schema: RowSchema,
        first_stream: int,
        num_envs: int,
        *,
        n_step: int,
        discount: float,
        bell: _kernel.Doorbell | None = None,
        **options: Any,
    ) -> None:
        """`bell` is rung when a block is written; `options` are StepWriter's."""
        self._builder = TransitionBuilder(schema, n_step, discount)
        lane = Lane.create(None, schema.dtype, COLLECTED_ROWS + 4 * num_envs)
        super().__init__(lane, schema, first_stream, **options)
        self._area = area
        self._bell = bell
        self._rows = np.zeros(lane.capacity, schema.dtype)
        self._filled = 0
        self._samples = {one.name: np.zeros((area.block, *one.shape), one.dtype) for one in area.columns}
        self.blocks = 0  # written so far

    def write(self, *step: Any, **options: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See StepWriter."""
        made = super().write(*step, **options)
        if len(self.lane) >= COLLECTED_ROWS:
            self._collect()
        return made

    def cut(self) -> None:
        """See the class."""
        super().cut()
        self.lane.pop(self._rows)
        self._builder.cut()
        self._filled = 0

    def _collect(self) -> None:
        given = self._builder.add(self._rows[: self.lane.pop(self._rows)])
        count = len(given["discount_t"])
        used = 0
        while used < count:
            taken = min(count - used, self._area.block - self._filled)
            for name, samples in self._samples.items():
                samples[self._filled : self._filled + taken] = given[name][used : used + taken]
            self._filled += taken
            used += taken
            if self._filled == self._area.block:
                self._area.write(self._samples)
                self._filled = 0
                self.blocks += 1
                if self._bell is not None:
                    self._bell.ring()

"""The accumulator of one rollout: vector steps in, rows of a lane out.

Written to by the rollout alone, in one call a vector step (about a microsecond for eight small environments); the work
is ddrl/kernel/step_writer.hpp. Rows are core.layouts.row_dtype: STEP for every environment that was not in its reset
step, and TERMINATED or TRUNCATED with the final state for each that ended (TERMINATED where both hold)."""

from __future__ import annotations

import numpy as np

from ddrl import _kernel
from ddrl.channels.lane import Lane
from ddrl.core.errors import ChannelError
from ddrl.core.layouts import row_dtype
from ddrl.core.specs import EnvSpec

_FIELDS = ("policy_version", "stream", "step", "reward", "kind", "action", "state")


class StepWriter(_kernel.StepWriter):
    """Records the environments `first_stream`, `first_stream` + 1, ... of one rollout; their number N is that of the
    first write.

    `write(state, action, reward, terminated, truncated, next_state, policy_version, timeout=None) -> int`: one vector
    step, arrays [N, ...] of the spec's shapes and dtypes (reward float32, flags bool); returns the rows made. Waits at
    a full lane until there is room, the lane is closed, or `timeout` [s] has passed; then `pending` rows wait here and
    `flush(timeout) -> bool` goes on (True: none is left); writing again before that is a ValueError. A lane that drops
    leaves a gap in `step`. `cut()`: the environments were reset, the running episodes are over; the next write is step
    0 of new ones."""

    def __init__(self, lane: Lane, spec: EnvSpec, first_stream: int) -> None:
        dtype = row_dtype(spec)
        if lane.dtype != dtype:
            raise ChannelError(f"lane {lane.segment.name} carries {lane.dtype}, but {spec.env_id} makes rows {dtype}")
        fields = dtype.fields
        assert fields is not None
        offsets = [fields[name][1] for name in _FIELDS]
        state = np.empty((0, *spec.observation.shape), spec.observation.dtype)
        action = np.empty((0, *spec.action.shape), spec.action.dtype)
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            lane.ring, dtype.itemsize, offsets, spec.frame.nbytes, state, action, first_stream
        )
        self.lane = lane
        self.spec = spec

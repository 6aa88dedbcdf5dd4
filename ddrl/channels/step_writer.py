"""The accumulator of one rollout: vector steps in, rows of a lane out.

Written to by the rollout alone, in one call a vector step (about a microsecond for eight small environments); the work
is ddrl/kernel/step_writer.hpp. Rows are core.rows.RowSchema: STEP for every environment that was not in its reset
step, and TERMINATED or TRUNCATED with the final state for each that ended (TERMINATED where both hold)."""

from __future__ import annotations

from typing import Literal

from ddrl import _kernel
from ddrl.channels.lane import Lane
from ddrl.core.errors import ChannelError
from ddrl.core.rows import RowSchema, buffer_format


class StepWriter(_kernel.StepWriter):
    """Records the environments `first_stream`, `first_stream` + 1, ... of one rollout; their number N is that of the
    first write.

    `write(state, action, reward, terminated, truncated, next_state, policy_version, columns=None, timeout=None) ->
    int`: one vector step, arrays [N, ...] of the schema's shapes and dtypes (observations stacked, reward float32,
    flags bool); returns the rows made. `columns` holds the schema's further columns by name; one of role STATE also
    comes as name_next, for the next state. Waits at a full lane until there is room, the lane is closed, or `timeout`
    [s] has passed; then `pending` rows wait here and `flush(timeout) -> bool` goes on (True: none is left); writing
    again before that is a ValueError. TypeError where an array does not fit. A lane that drops leaves a gap in `step`.
    `cut()`: the environments were reset, the running episodes are over; the next write is step 0 of new ones.

    A reward or state that is NaN or infinite raises EnvError with `env_id`, the environment and the step, nothing
    written; with
    nonfinite="drop" the row is dropped instead, which leaves a gap in `step` too, and counted (`nonfinite`)."""

    def __init__(
        self,
        lane: Lane,
        schema: RowSchema,
        first_stream: int,
        *,
        nonfinite: Literal["refuse", "drop"] = "refuse",
        env_id: str = "",
    ) -> None:
        if lane.dtype != schema.dtype:
            raise ChannelError(
                f"lane {lane.segment.name} carries {lane.dtype}, but {env_id or 'the schema'} makes rows {schema.dtype}"
            )
        if nonfinite not in ("refuse", "drop"):
            raise ValueError(f"nonfinite ({nonfinite!r}) must be 'refuse' or 'drop'")
        frame = schema.frame
        stack = [schema.frame_stack] if schema.frame_stack > 1 else []
        super().__init__(
            ring=lane.ring,
            row_nbytes=schema.dtype.itemsize,
            table=schema.table,
            observation=(buffer_format(frame.numpy), [*stack, *frame.shape]),
            stack=schema.frame_stack,
            first_stream=first_stream,
            env_id=env_id,
            drop_nonfinite=nonfinite == "drop",
        )
        self.lane = lane
        self.schema = schema

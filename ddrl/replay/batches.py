"""What replay hands out: the batches as named tuples of arrays, and the fresh arrays behind them.

Written by the kernel, read by learners. A batch owns its memory; once nobody holds the tuple or any of its arrays
(views included), the arrays are used again for a later batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddrl.core.specs import ArraySpec


class Windows(NamedTuple):
    """Windows of L = pick_len records; data past a length is zero.

    `seq_len_next` is `seq_len` where the state after the last record is known, else one less.
    """

    batch_state: Any  # [B, L, *observation]
    batch_action: NDArray[Any]  # [B, L, *action]
    batch_reward: NDArray[np.float32]  # [B, L]
    batch_state_next: Any  # [B, L, *observation]
    seq_len: NDArray[np.uint32]  # [B], records
    seq_len_next: NDArray[np.uint32]  # [B], next states
    batch_pick_epi: NDArray[np.uint64]  # [B]
    batch_pick_pos: NDArray[np.uint32]  # [B]


class Transitions(NamedTuple):
    """n-step transitions: r_t = sum of discount^j r_{t+j} over k steps, discount_t = discount^k, or 0 where s_t is
    terminal.

    k = n_step, less where the episode ends sooner.
    """

    s_tm1: Any  # [B, *observation]
    a_tm1: NDArray[Any]  # [B, *action]
    r_t: NDArray[np.float32]  # [B]
    discount_t: NDArray[np.float32]  # [B]
    s_t: Any  # [B, *observation]
    pick_epi: NDArray[np.uint64]  # [B]
    pick_pos: NDArray[np.uint32]  # [B]
    weight: NDArray[np.float32]  # [B], importance weights, largest 1
    policy_version: NDArray[np.uint64]  # [B], of the policy that acted


class Sequences(NamedTuple):
    """Sequences for recurrent learners: up to burn_in records before the pick, its L = pick_len records, and n_step
    states after.

    Row b uses states 0 .. burn_len + length + (states after) - 1 of its axis; position t of the pick (t < length)
    stands at index burn_len + t, its bootstrap state at index burn_len + t + ahead[t]. What lies past is zero."""

    state: Any  # [B, burn_in + L + n_step, *observation]
    action: NDArray[Any]  # [B, burn_in + L, *action]
    r_t: NDArray[np.float32]  # [B, L], n-step sums
    discount_t: NDArray[np.float32]  # [B, L]
    ahead: NDArray[np.uint32]  # [B, L], steps to the bootstrap state
    burn_len: NDArray[np.uint32]  # [B], records of burn-in in use
    length: NDArray[np.uint32]  # [B], positions in use
    pick_epi: NDArray[np.uint64]  # [B]
    pick_pos: NDArray[np.uint32]  # [B]
    weight: NDArray[np.float32]  # [B]
    policy_version: NDArray[np.uint64]  # [B], of the pick's first record
    memory: NDArray[np.float32] | None  # [B, *memory], recurrent state stored with the first state (before burn-in)


class BatchShapes:
    """Makes fresh arrays for the batches of one replay; called by the kernel when no used batch is free."""

    def __init__(
        self,
        state: ArraySpec | Mapping[str, ArraySpec],
        action: ArraySpec,
        memory: ArraySpec | None,
        *,
        pick_len: int,
        n_step: int,
        frame_stack: int,
        burn_in: int,
    ) -> None:
        self._state = state
        self._action = action
        self._memory = memory
        self._pick_len = pick_len
        self._n_step = n_step
        self._stack = (frame_stack,) if frame_stack > 1 else ()
        self._burn_in = burn_in

    def windows(self, size: int) -> Windows:
        """Arrays for get_batch."""
        lead = (size, self._pick_len)
        return Windows(
            self._observation(lead),
            _array(lead, self._action),
            np.empty(lead, np.float32),
            self._observation(lead),
            np.empty(size, np.uint32),
            np.empty(size, np.uint32),
            np.empty(size, np.uint64),
            np.empty(size, np.uint32),
        )

    def transitions(self, size: int) -> Transitions:
        """Arrays for sample."""
        return Transitions(
            self._observation((size,)),
            _array((size,), self._action),
            np.empty(size, np.float32),
            np.empty(size, np.float32),
            self._observation((size,)),
            np.empty(size, np.uint64),
            np.empty(size, np.uint32),
            np.empty(size, np.float32),
            np.empty(size, np.uint64),
        )

    def sequences(self, size: int) -> Sequences:
        """Arrays for sample_sequences."""
        room, lead = self._burn_in + self._pick_len, (size, self._pick_len)
        return Sequences(
            self._observation((size, room + self._n_step)),
            _array((size, room), self._action),
            np.empty(lead, np.float32),
            np.empty(lead, np.float32),
            np.empty(lead, np.uint32),
            np.empty(size, np.uint32),
            np.empty(size, np.uint32),
            np.empty(size, np.uint64),
            np.empty(size, np.uint32),
            np.empty(size, np.float32),
            np.empty(size, np.uint64),
            None if self._memory is None else _array((size,), self._memory),
        )

    def _observation(self, lead: tuple[int, ...]) -> Any:
        if isinstance(self._state, ArraySpec):
            return _array(lead + self._stack, self._state)
        return {name: _array(lead + self._stack, spec) for name, spec in self._state.items()}


def _array(lead: tuple[int, ...], spec: ArraySpec) -> NDArray[Any]:
    return np.empty(lead + spec.shape, spec.dtype)

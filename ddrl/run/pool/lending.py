"""A task's end of a pool: before a move that needs the device it takes a lease, and moves the learner there.

A round is the GRADIENT and APPLY moves up to the next PUBLISH or DRAIN; RECORD moves do not end it. So the device is
taken when there is something to compute, once a round, and is back before the parameters are published. In between
learning has no device: on a torch device the learner's state moves off with the lease, so that the tasks' states need
not fit together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ddrl.pool.devices import Device
from ddrl.pool.leases import LeaseHolder
from ddrl.pool.slots import CpuSlot, make_group
from ddrl.run.training import Move, Training

if TYPE_CHECKING:
    from ddrl.core.config import RunConfig

HOME = "cpu"  # torch device of a learner without a lease


def group_name(pool_id: str, index: int) -> str:
    """Name of the quota group of a pool's device: the same in the master and in every task."""
    return f"ddrl-pool-{pool_id}-{index}"


class Lender:
    """Lends the pool's devices to the training of one task. `splits`: also between two updates of one round."""

    def __init__(
        self, training: Training, holder: LeaseHolder, devices: Sequence[Device], pool_id: str, *, splits: bool = False
    ) -> None:
        self.rounds = 0  # that have ended
        self.switch_seconds = 0.0  # entering and leaving devices, the learner's moves included
        self._training = training
        self._holder = holder
        self._devices = devices
        self._splits = splits
        self._slots = [
            CpuSlot(device, make_group(device, group_name(pool_id, index))) if device.is_slot else None
            for index, device in enumerate(devices)
        ]
        self._part = 0
        self._place: ExitStack | None = None  # what is left with the lease
        self._updates = 0  # when the lease began
        self._began = self._ended = 0.0  # [s] of the time on the device
        self._first_steps = training.state.env_steps

    def take(self) -> None:
        """Wait for a device and move there; nothing where the task has one. PoolError where the pool has none."""
        if self._place is not None:
            return
        training = self._training
        rounds = training.rounds
        number = self.rounds if rounds is None else rounds.number
        index = self._holder.acquire(number, part=self._part, remaining=self._remaining(training.config.run))
        assert index is not None, "a wait without a limit ends with a device or an error"
        begin = time.perf_counter()
        self._place = place = ExitStack()
        device = self._devices[index]
        slot = self._slots[index]
        place.callback(self._release, slot, 0.0 if slot is None else slot.busy)
        if slot is not None:
            place.enter_context(slot)
        if str(training.learner.device) != device.torch:
            training.learner.to(device.torch)
            place.callback(training.learner.to, HOME)
        self._updates = training.state.updates
        self._began = time.perf_counter()
        self.switch_seconds += self._began - begin

    def give_back(self, move: Move) -> None:
        """Leave the device where the round ends before `move`; between two updates, where the policy splits rounds."""
        if move in (Move.GRADIENT, Move.APPLY, Move.RECORD):
            if self._splits and (move is Move.RECORD or self._training.state.updates > self._updates):
                self.pause()
            return
        if self._place is not None:
            self._leave()
        elif not self._part:
            return  # nothing was computed
        self.rounds += 1
        self._part = 0

    def pause(self) -> None:
        """Leave the device within the round; what comes then is a further part of it."""
        if self._place is not None:
            self._leave()
            self._part += 1

    def close(self) -> None:
        """Leave the device, if there is one, and the pool."""
        if self._place is not None:
            self._leave()
        self._holder.close()

    def _leave(self) -> None:
        assert self._place is not None
        place = self._place
        self._place = None
        self._ended = time.perf_counter()
        place.close()
        self.switch_seconds += time.perf_counter() - self._ended

    def _release(self, slot: CpuSlot | None, busy_before: float) -> None:
        """A slot counts its own processor seconds; on a torch device busy is the time between the two moves."""
        self._holder.release(self._ended - self._began if slot is None else slot.busy - busy_before)

    def _remaining(self, run: RunConfig) -> float:
        """Rounds to run.max_env_steps, by the steps of a round so far; nan in the first one."""
        steps = self._training.state.env_steps - self._first_steps
        if not self.rounds or steps <= 0:
            return math.nan
        left = run.max_env_steps - self._training.state.env_steps
        return max(1.0, left * self.rounds / steps)

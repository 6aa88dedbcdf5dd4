"""Batches of experience: numpy arrays from replay become tensors on the learner's device.

Read from replay's `Transitions` (or anything with its fields), written for `dqn`. On the CPU the tensors share the
arrays' memory. On a GPU they travel through two pinned staging buffers in turn, so that filling one does not wait for
the copy out of the other."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Batch(Protocol):
    """What an update reads; replay's Transitions has these fields and more."""

    @property
    def s_tm1(self) -> NDArray[Any]:
        """States [B, *observation.shape]."""
        ...

    @property
    def a_tm1(self) -> NDArray[np.int64]:
        """Actions taken in them [B]."""
        ...

    @property
    def r_t(self) -> NDArray[np.float32]:
        """Discounted sums of the rewards that followed [B]."""
        ...

    @property
    def discount_t(self) -> NDArray[np.float32]:
        """Discounts of the bootstraps [B]: gamma ** n, 0 where s_t is terminal."""
        ...

    @property
    def s_t(self) -> NDArray[Any]:
        """States after n steps [B, *observation.shape]."""
        ...

    @property
    def weight(self) -> NDArray[np.float32]:
        """Importance weights [B]."""
        ...


class TensorBatch(NamedTuple):
    """A `Batch` on the device."""

    s_tm1: torch.Tensor
    a_tm1: torch.Tensor
    r_t: torch.Tensor
    discount_t: torch.Tensor
    s_t: torch.Tensor
    weight: torch.Tensor


class BatchLoader:
    """Brings batches to `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging: list[dict[str, torch.Tensor]] = [{}, {}]
        self._copied: list[Any] = [None, None]
        self._turn = 0

    def load(self, batch: Batch) -> TensorBatch:
        """The batch as tensors; on the CPU they are views, so the batch must outlive them (torch holds the arrays)."""
        arrays = {name: getattr(batch, name) for name in TensorBatch._fields}
        if self._device.type == "cpu":
            return TensorBatch(
                *(torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays.values())
            )
        self._turn ^= 1
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        staging, tensors = self._staging[self._turn], []
        for name, array in arrays.items():
            pinned = staging.get(name)
            if pinned is None or pinned.shape != array.shape:
                pinned = staging[name] = torch.empty(
                    array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=True
                )
            np.copyto(pinned.numpy(), array)
            tensors.append(pinned.to(self._device, non_blocking=True))
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._copied[self._turn] = event
        return TensorBatch(*tensors)

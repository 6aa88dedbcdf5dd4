"""Batches of experience: numpy arrays become tensors on the learner's device.

A batch is a named tuple of arrays, as replay gives it (Transitions, Sequences), with further columns by name in
`columns`. On the CPU the tensors share the arrays' memory. On a GPU they travel through two pinned staging buffers in
turn, so that filling one does not wait for the copy out of the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BOOKKEEPING = frozenset({"pick_epi", "pick_pos", "policy_version"})  # of replay and run: no network reads them


class TensorBatch(SimpleNamespace):
    """A batch on the device: its fields as tensors (an observation of several arrays as a dict of them), and `columns`,
    a dict of tensors by name. `place`: (its first row, rows of the whole) where it is a part of a larger batch."""

    columns: dict[str, torch.Tensor]
    place: tuple[int, int] | None


class BatchLoader:
    """Brings batches to `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging: list[dict[str, torch.Tensor]] = [{}, {}]
        self._copied: list[Any] = [None, None]
        self._turn = 0

    def load(self, batch: Any) -> TensorBatch:
        """The batch as tensors; on the CPU they are views, so the batch must outlive them (torch holds the arrays)."""
        if self._device.type == "cpu":
            return self._loaded(batch, lambda key, array: _shared(array))
        self._turn ^= 1
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        loaded = self._loaded(batch, self._copy)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._copied[self._turn] = event
        return loaded

    def _loaded(self, batch: Any, tensor: Callable[[str, NDArray[Any]], torch.Tensor]) -> TensorBatch:
        """All that networks may read, by `tensor` of a key and an array."""
        loaded: dict[str, Any] = {"columns": {}, "place": getattr(batch, "place", None)}
        for field in batch._fields:
            value = getattr(batch, field)
            if isinstance(value, np.ndarray):
                if field not in BOOKKEEPING:
                    loaded[field] = tensor(field, value)
            elif isinstance(value, dict):
                arrays: dict[str, NDArray[Any]] = value
                loaded[field] = {name: tensor(f"{field}.{name}", array) for name, array in arrays.items()}
        return TensorBatch(**loaded)

    def _copy(self, key: str, array: NDArray[Any]) -> torch.Tensor:
        staging, dtype = self._staging[self._turn], _torch_dtype(array)
        pinned = staging.get(key)
        if pinned is None or pinned.shape != array.shape or pinned.dtype != dtype:
            pinned = staging[key] = torch.empty(array.shape, dtype=dtype, pin_memory=True)
        np.copyto(pinned.numpy(), array)
        return pinned.to(self._device, non_blocking=True)


def rows_of(inputs: Any) -> int:
    """B of a tensor [B, ...] or of a dict of them."""
    tensors: dict[str, torch.Tensor] = inputs if isinstance(inputs, dict) else {"": inputs}
    return next(iter(tensors.values())).shape[0]


def draw_rows(batch: Any, width: int, draw: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Random numbers [B, width] for the rows of a batch with `r_t`: `draw` fills an empty tensor in place. Where the
    batch is a part of a larger one they are its rows of what the whole would draw from the same random state, so that
    the parts together are given what the whole would be."""
    rows = len(batch.r_t)
    first, whole = getattr(batch, "place", None) or (0, rows)
    return draw(batch.r_t.new_empty((whole, width)))[first : first + rows]


def _shared(array: NDArray[Any]) -> torch.Tensor:
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch computes with signed integers
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _torch_dtype(array: NDArray[Any]) -> torch.dtype:
    wide = array.dtype.kind == "u" and array.dtype.itemsize > 1
    return torch.int64 if wide else getattr(torch, array.dtype.name)

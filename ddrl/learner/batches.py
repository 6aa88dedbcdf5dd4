"""Batches of experience: numpy arrays become tensors on the learner's device.

A batch is a named tuple of arrays, as replay gives it (Transitions, Sequences), with further columns by name in
`columns`. On the CPU the tensors share the arrays' memory. To a device all of them travel in one copy, through two
staging memories on the host in turn, so that filling one does not wait for the copy out of the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddrl.learner.devices import host_memory, mark

ALIGNMENT = 64  # [bytes] of each array within a batch on its way to a device
BOOKKEEPING = frozenset({"pick_epi", "pick_pos", "policy_version"})  # of replay and run: no network reads them


class TensorBatch(SimpleNamespace):
    """A batch on the device: its fields as tensors (an observation of several arrays as a dict of them), and `columns`,
    a dict of tensors by name. `place`: (its first row, rows of the whole) where it is a part of a larger batch."""

    columns: dict[str, torch.Tensor]
    place: tuple[int, int] | None


class BatchLoader:
    """Brings batches to `device`. The parts of an algorithm that learn from one batch share its copy there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = [host_memory(0, device)] * 2
        self._copied: list[Any] = [None, None]
        self._turn = 0
        self._batch: Any = None  # whose copy is there
        self._there = TensorBatch()
        self._served: set[str] = set()  # parts that have been given it

    def load(self, batch: Any, part: str = "") -> TensorBatch:
        """The batch as tensors; on the CPU they are views, so the batch must outlive them (torch holds the arrays). A
        part that asks for a batch again gets what its arrays hold by then."""
        if self._device.type == "cpu":
            return _as_tensors(batch, _shared)
        if batch is not self._batch or part in self._served:
            self._batch, self._there, self._served = batch, self._copy(batch), set()
        self._served.add(part)
        return self._there

    def _copy(self, batch: Any) -> TensorBatch:
        self._turn ^= 1
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        places: list[tuple[int, int]] = []  # of each array: first and last byte
        _as_tensors(batch, lambda array: places.append(_place(array, places[-1][1] if places else 0)))
        nbytes = places[-1][1] if places else 0
        if len(self._staging[self._turn]) < nbytes:
            self._staging[self._turn] = host_memory(nbytes, self._device)
        host = self._staging[self._turn]
        there = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        left = iter(places)

        def placed(array: NDArray[Any]) -> torch.Tensor:
            begin, end = next(left)
            views = (memory[begin:end].view(_torch_dtype(array)).view(array.shape) for memory in (host, there))
            np.copyto(next(views).numpy(), array)
            return next(views)

        tensors = _as_tensors(batch, placed)
        there.copy_(host[:nbytes], non_blocking=True)
        self._copied[self._turn] = mark(self._device)
        return tensors


def _as_tensors(batch: Any, tensor: Callable[[NDArray[Any]], Any]) -> TensorBatch:
    """All that networks may read, each array by `tensor`, in the same order whenever it is called."""
    loaded: dict[str, Any] = {"columns": {}, "place": getattr(batch, "place", None)}
    for field in batch._fields:
        value = getattr(batch, field)
        if isinstance(value, np.ndarray):
            if field not in BOOKKEEPING:
                loaded[field] = tensor(value)
        elif isinstance(value, dict):
            arrays: dict[str, NDArray[Any]] = value
            loaded[field] = {name: tensor(array) for name, array in arrays.items()}
    return TensorBatch(**loaded)


def _place(array: NDArray[Any], after: int) -> tuple[int, int]:
    """First and last byte of an array as a tensor, behind byte `after`."""
    begin = math.ceil(after / ALIGNMENT) * ALIGNMENT
    return begin, begin + array.size * _torch_dtype(array).itemsize


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

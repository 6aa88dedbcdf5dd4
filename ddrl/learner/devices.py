"""Torch's devices: by the name that a setting gives, their random states, how batches get there, and how operations
that never change are launched at once."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddrl.core.errors import ConfigError

# -- devices -----------------------------------------------------------------------------------------------------------


def resolve_device(name: str) -> torch.device:
    """The device that learner.device names; auto is cuda where there is one. ConfigError where torch lacks it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    other = torch.accelerator.current_accelerator()  # mps, xpu, or the fake one of the tests
    if device.type not in ("cpu", "cuda") and (other is None or device.type != other.type):
        raise ConfigError(f"learner.device = {name} is not a device: choose auto, cpu, cuda or cuda:N")
    count = 1 if device.type == "cpu" else torch.get_device_module(device).device_count()
    if (device.index or 0) >= count:
        raise ConfigError(
            f"learner.device = {name}: torch sees {count} {device.type.upper()} device(s) here: choose auto or cpu, "
            f"or install a torch with {device.type.upper()}"
        )
    return device


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Of the processor, then of `device` where that is CUDA."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Go on from `random_states(device)`."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


_torch_alone = False  # set by `without_kernel`


@cache
def gemm_of_torch() -> int:
    """The address of the matrix product in the BLAS library that torch itself calls; 0 where it shows none."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).sgemm_, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


def has_kernel(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the C++ kernel's loops compute in the memory of such tensors there."""
    return device.type == "cpu" and dtype == torch.float32 and not _torch_alone


@contextmanager
def without_kernel() -> Generator[None]:
    """Networks and losses are computed by torch alone, as on any other device."""
    global _torch_alone
    before = _torch_alone
    _torch_alone = True
    try:
        yield
    finally:
        _torch_alone = before


# -- transfers ---------------------------------------------------------------------------------------------------------
# Memory on the host for copies to and from a device.
#
# On CUDA it is page-locked, so copies run beside the host's work until somebody waits for them (torch keeps such memory
# for the next who asks). On other devices it is ordinary memory, and a copy has ended when the call returns.


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on the host, for copies to and from `device`; its contents are arbitrary."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def mark(device: torch.device) -> Any:
    """An event behind all copies begun so far; None where copies have ended when they return."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(device: torch.device) -> None:
    """Return when all copies begun so far have ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def move(vectors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of `vectors` (uint8 [n] each) on `device`: they run behind each other, and one wait ends them all. What
    comes to the host is page-locked there, so that the way back to the device is as fast.

    Raises torch.OutOfMemoryError with nothing changed."""
    fresh = [
        host_memory(len(vector), vector.device) if device.type == "cpu" else torch.empty_like(vector, device=device)
        for vector in vectors
    ]
    for to, of in zip(fresh, vectors, strict=True):
        to.copy_(of, non_blocking=True)
    for place in {device, *(vector.device for vector in vectors)}:
        wait_for(place)
    return fresh


# -- batches -----------------------------------------------------------------------------------------------------------
# Batches of experience: numpy arrays become tensors on the learner's device.
#
# A batch is a named tuple of arrays, as replay gives it (Transitions, Sequences), with further columns by name in
# `columns`. On the CPU the tensors share the arrays' memory. To a device all of them travel in one copy, through two
# staging memories on the host in turn, so that filling one does not wait for the copy out of the other. Batches of the
# same shapes come to the same place there: it is overwritten behind the operations that read it.


ALIGNMENT = 64  # [bytes] of each array within a batch on its way to a device
MAX_LAYOUTS = 8  # of batches, whose memory is kept; the oldest goes: a node's batch may differ in size at each update
BOOKKEEPING = frozenset({"pick_epi", "pick_pos", "policy_version"})  # of replay and run: no network reads them


class TensorBatch(SimpleNamespace):
    """A batch on the device: its fields as tensors (an observation of several arrays as a dict of them), and `columns`,
    a dict of tensors by name. `place`: (its first row, rows of the whole) where it is a part of a larger batch.
    `layout`: equal for batches whose tensors are at the same place."""

    columns: dict[str, torch.Tensor]
    place: tuple[int, int] | None
    layout: Hashable


class BatchLoader:
    """Brings batches to `device`. The parts of an algorithm that learn from one batch share its copy there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layouts: dict[Hashable, _Layout] = {}
        self._batch: Any = None  # whose copy is there
        self._there = TensorBatch()
        self._served: set[str] = set()  # parts that have been given it

    def load(self, batch: Any, part: str = "") -> TensorBatch:
        """The batch as tensors; a part that asks for a batch again gets what its arrays hold by then. On the CPU they
        are views, so the batch must outlive them (torch holds the arrays); on a device they are valid until another
        batch is loaded."""
        if self._device.type == "cpu":
            return _as_tensors(batch, _shared)
        if batch is not self._batch or part in self._served:
            self._batch, self._there, self._served = batch, self._copy(batch), set()
        self._served.add(part)
        return self._there

    def _copy(self, batch: Any) -> TensorBatch:
        arrays: list[NDArray[Any]] = []
        made = _as_tensors(batch, arrays.append)
        key = (made.place, batch._fields, *((array.shape, array.dtype.str) for array in arrays))
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) == MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            layout = self._layouts[key] = _Layout(batch, arrays, self._device)
            layout.tensors.layout = key
        return layout.fill(arrays)


class _Layout:
    """Memory for batches of the same shapes: two staging memories on the host, and their place on the device."""

    def __init__(self, batch: Any, arrays: list[NDArray[Any]], device: torch.device) -> None:
        places: list[tuple[int, int]] = []  # of each array: first and last byte
        for array in arrays:
            begin = math.ceil((places[-1][1] if places else 0) / ALIGNMENT) * ALIGNMENT
            places.append((begin, begin + array.size * _torch_dtype(array).itemsize))
        nbytes = places[-1][1] if places else 0

        def views(memory: torch.Tensor) -> list[torch.Tensor]:
            return [
                memory[begin:end].view(_torch_dtype(array)).view(array.shape)
                for array, (begin, end) in zip(arrays, places, strict=True)
            ]

        self._device = device
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._staging = [host_memory(nbytes, device) for _ in range(2)]
        self._hosts = [[view.numpy() for view in views(memory)] for memory in self._staging]
        self._copied: list[Any] = [None, None]
        self._turn = 0
        there = iter(views(self._memory))
        self.tensors = _as_tensors(batch, lambda array: next(there))

    def fill(self, arrays: list[NDArray[Any]]) -> TensorBatch:
        """The arrays on the device, behind all operations begun so far."""
        turn = self._turn = self._turn ^ 1
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        for host, array in zip(self._hosts[turn], arrays, strict=True):
            np.copyto(host, array)
        self._memory.copy_(self._staging[turn], non_blocking=True)
        self._copied[turn] = mark(self._device)
        return self.tensors


def _as_tensors(batch: Any, tensor: Callable[[NDArray[Any]], Any]) -> TensorBatch:
    """All that networks may read, each array by `tensor`, in the same order whenever it is called."""
    loaded: dict[str, Any] = {"columns": {}, "place": getattr(batch, "place", None), "layout": None}
    for field in batch._fields:
        value = getattr(batch, field)
        if isinstance(value, np.ndarray):
            if field not in BOOKKEEPING:
                loaded[field] = tensor(value)
        elif isinstance(value, dict):
            arrays: dict[str, NDArray[Any]] = value
            loaded[field] = {name: tensor(array) for name, array in arrays.items()}
    return TensorBatch(**loaded)


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


# -- operations that never change --------------------------------------------------------------------------------------

WARM_UPS = 16  # launches before a capture, which takes as long as some of them: a pool's leases are short
MAX_CAPTURES = 8  # of one `Captures`; the oldest goes


class Captures:
    """Launches of operations on a device that never change; on CUDA, where `active`, after some times as one, a CUDA
    graph:

        result = captures.replay(key)
        if result is None:
            with captures.launch(key) as keep:
                result = ...
                keep(result)

    What is launched there must be the same operations on tensors at the same places each time, of which none is waited
    for, and leave nothing to be done on the host. The result is overwritten by the next replay of its key."""

    def __init__(self, device: torch.device, *, active: bool = True) -> None:
        # Runs that must be reproducible bit for bit do not depend on when something is captured.
        self._active = active and device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        self._device = device
        self._launches: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, tuple[Any, Any]] = {}  # (graph, result)

    def replay(self, key: Hashable) -> Any:
        """Launch what was captured; its result, None where nothing was."""
        if key not in self._captured:
            return None
        graph, result = self._captured[key]
        graph.replay()
        return result

    @contextmanager
    def launch(self, key: Hashable) -> Generator[Callable[[Any], object]]:
        """What is launched inside is of this key; gives the function that takes the result."""
        kept: list[Any] = []
        if self._active:
            self._launches[key] += 1
        if self._launches[key] <= WARM_UPS:
            yield kept.append
            return
        if len(self._captured) == MAX_CAPTURES:
            oldest = next(iter(self._captured))
            del self._captured[oldest], self._launches[oldest]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield kept.append
        self._captured[key] = graph, kept[0]
        graph.replay()  # a capture computes nothing

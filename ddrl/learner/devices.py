"""Torch's devices: by the name that a setting gives, their random states, how batches get there, how operations
that never change are launched at once, and how long they compute."""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddrl.core.errors import ConfigError, first_line
from ddrl.core.specs import Array

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


MAX_PINNED = 1024  # addresses of arrays of which it is known whether they are page-locked
_torch_alone = False  # set by `without_kernel`


@cache
def gemm_of_torch() -> int:
    """The address of the matrix product in the BLAS library that torch itself calls; 0 where it shows none."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).sgemm_, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


def has_kernel(tensor: torch.Tensor) -> bool:
    """Whether the C++ kernel's loops compute in this tensor's memory."""
    return tensor.is_cpu and not _torch_alone


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


def host_array(shape: tuple[int, ...], dtype: Any, device: torch.device) -> Array:
    """An array of arbitrary contents, for copies to `device`."""
    if device.type != "cuda":
        return np.empty(shape, dtype)
    memory = host_memory(math.prod(shape) * np.dtype(dtype).itemsize, device)
    return memory.numpy().view(dtype).reshape(shape)


def is_page_locked(array: Array, device: torch.device) -> bool:
    """Whether a copy from where the array lies to `device` blocks nobody."""
    flags = array.flags
    return device.type == "cuda" and flags.writeable and flags.c_contiguous and _is_pinned(array)


_pinned: dict[int, bool] = {}  # by address: the driver's answer takes as long as some launches


def _is_pinned(array: Array) -> bool:
    """Of memory that has been replaced by other memory the answer may be old: then a copy is slower, not wrong."""
    address = array.ctypes.data
    if address not in _pinned:
        if len(_pinned) == MAX_PINNED:
            _pinned.clear()
        _pinned[address] = torch.from_numpy(array).is_pinned()
    return _pinned[address]


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
# staging memories on the host in turn, so that filling one does not wait for the copy out of the other; large arrays
# that are page-locked, as replay's are, travel from where they lie. Batches of the same shapes come to the same place
# there: it is overwritten behind the operations that read it.


ALIGNMENT = 64  # [bytes] of each array within a batch on its way to a device
LARGE = 2**16  # [bytes] of an array that is worth a copy of its own
MAX_LAYOUTS = 8  # of batches, whose memory is kept; the oldest goes: a node's batch may differ in size at each update
BOOKKEEPING = frozenset({"pick_epi", "pick_pos", "policy_version"})  # of replay and run: no network reads them


class TensorBatch(SimpleNamespace):
    """A batch on the device: its fields as tensors (an observation of several arrays as a dict of them), and `columns`,
    a dict of tensors by name. `place`: (its first row, rows of the whole) where it is a part of a larger batch.
    `layout`: a number, equal for batches whose tensors are at the same place; None on the CPU."""

    columns: dict[str, torch.Tensor]
    place: tuple[int, int] | None
    layout: int | None


class BatchLoader:
    """Brings batches to `device`, and what they give back to the host. The parts of an algorithm that learn from one
    batch share its copy there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"  # asked three times an update; a device makes its name anew each time
        self._layouts: dict[Hashable, _Layout] = {}
        self._batch: Any = None  # whose copy is there
        self._there = TensorBatch()
        self._served: set[str] = set()  # parts that have been given it
        self._fetched: tuple[torch.Tensor, torch.Tensor, Any] | None = None  # a tensor, its memory on the host, the end

    def load(self, batch: Any, part: str = "") -> TensorBatch:
        """The batch as tensors; a part that asks for a batch again gets what its arrays hold by then. On the CPU they
        are views, so the batch must outlive them (torch holds the arrays); on a device they are valid until another
        batch is loaded."""
        if self._on_host:
            return _as_tensors(batch, _shared)
        if batch is not self._batch or part in self._served:
            self._batch = batch
            self._there = self._copy(batch)
            self._served = set()
        self._served.add(part)
        return self._there

    def begin_fetch(self, tensor: torch.Tensor | None) -> None:
        """Begin to copy a tensor to the host, behind what computes it and before what is launched from here on."""
        if tensor is None or self._on_host:
            return
        if self._fetched is None or self._fetched[1].nbytes != tensor.nbytes:
            memory = host_memory(tensor.nbytes, self._device)
        else:
            memory = self._fetched[1]
        memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        self._fetched = tensor, memory, mark(self._device)

    def fetch(self, tensor: torch.Tensor) -> Array:
        """A tensor's values; waits for the device."""
        if self._on_host:
            return tensor.numpy()
        if self._fetched is None or self._fetched[0] is not tensor:
            return tensor.cpu().numpy()
        _, memory, copied = self._fetched
        if copied is not None:
            copied.synchronize()
        return memory.view(tensor.dtype).view(tensor.shape).numpy().copy()

    def _copy(self, batch: Any) -> TensorBatch:
        arrays: list[Array] = []
        made = _as_tensors(batch, arrays.append)
        key = (made.place, batch._fields, *((array.shape, array.dtype.str) for array in arrays))
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) == MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            layout = self._layouts[key] = _Layout(batch, arrays, self._device)
        return layout.fill(arrays)


_layouts = itertools.count()  # numbers of those made so far


class _Layout:
    """Memory for batches of the same shapes: two staging memories on the host, and their place on the device."""

    def __init__(self, batch: Any, arrays: list[Array], device: torch.device) -> None:
        self._large = [index for index, array in enumerate(arrays) if array.nbytes >= LARGE and not _is_wide(array)]
        places = [(0, 0)] * len(arrays)  # of each array: first and last byte, the large ones behind the others
        self._small = nbytes = 0  # bytes of the others, and of all
        for index in sorted(range(len(arrays)), key=self._large.__contains__):
            begin = math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
            nbytes = begin + arrays[index].size * _torch_dtype(arrays[index]).itemsize
            places[index] = (begin, nbytes)
            if index not in self._large:
                self._small = nbytes

        def views(memory: torch.Tensor) -> list[torch.Tensor]:
            return [
                memory[begin:end].view(_torch_dtype(array)).view(array.shape)
                for array, (begin, end) in zip(arrays, places, strict=True)
            ]

        self._device = device
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._views = views(self._memory)
        staging = [host_memory(nbytes, device) for _ in range(2)]
        self._hosts = [[view.numpy() for view in views(memory)] for memory in staging]
        self._whole = [(self._memory, memory) for memory in staging]  # copies of one turn: to, from
        self._rest = [(self._memory[: self._small], memory[: self._small]) for memory in staging]
        self._copied: list[Any] = [None, None]
        self._sources: list[Any] = [None, None]  # arrays that are copied from where they lie, until that has ended
        self._turn = 0
        there = iter(self._views)
        self.tensors = _as_tensors(batch, lambda array: next(there))
        self.tensors.layout = next(_layouts)

    def fill(self, arrays: list[Array]) -> TensorBatch:
        """The arrays on the device, behind all operations begun so far."""
        turn = self._turn = self._turn ^ 1
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        large = self._large if all(is_page_locked(arrays[index], self._device) for index in self._large) else []
        for index, (host, array) in enumerate(zip(self._hosts[turn], arrays, strict=True)):
            if index not in large:
                np.copyto(host, array)
        to, of = (self._rest if large else self._whole)[turn]
        to.copy_(of, non_blocking=True)
        for index in large:
            self._views[index].copy_(torch.from_numpy(arrays[index]), non_blocking=True)
        self._sources[turn] = [arrays[index] for index in large]
        self._copied[turn] = mark(self._device)
        return self.tensors


def _as_tensors(batch: Any, tensor: Callable[[Array], Any]) -> TensorBatch:
    """All that networks may read, each array by `tensor`, in the same order whenever it is called."""
    loaded: dict[str, Any] = {"columns": {}, "place": getattr(batch, "place", None), "layout": None}
    for field in batch._fields:
        if field in BOOKKEEPING:
            continue
        value = getattr(batch, field)
        if isinstance(value, np.ndarray):
            loaded[field] = tensor(value)
        elif isinstance(value, dict):
            arrays: dict[str, Array] = value
            loaded[field] = {name: tensor(array) for name, array in arrays.items()}
    return TensorBatch(**loaded)


def rows_of(inputs: Any) -> int:
    """B of a tensor [B, ...] or of a dict of them."""
    return len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)


def draw_rows(batch: Any, width: int, draw: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Random numbers [B, width] for the rows of a batch with `r_t`: `draw` fills an empty tensor in place. Where the
    batch is a part of a larger one they are its rows of what the whole would draw from the same random state, so that
    the parts together are given what the whole would be."""
    rows = len(batch.r_t)
    first, whole = getattr(batch, "place", None) or (0, rows)
    return draw(batch.r_t.new_empty((whole, width)))[first : first + rows]


def _shared(array: Array) -> torch.Tensor:
    if _is_wide(array):
        array = array.astype(np.int64)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _torch_dtype(array: Array) -> torch.dtype:
    return torch.int64 if _is_wide(array) else getattr(torch, array.dtype.name)


def _is_wide(array: Array) -> bool:
    """Whether its integers become signed ones, with which torch computes."""
    return array.dtype.kind == "u" and array.dtype.itemsize > 1


# -- operations that never change --------------------------------------------------------------------------------------

WARM_UPS = 16  # launches before a capture, which takes as long as some of them: a pool's leases are short
MAX_CAPTURES = 8  # of one `Captures`; the oldest goes
MAX_COUNTED = 64  # keys whose launches are counted; the one not launched for longest goes


class CudaGraph:
    """A CUDA graph: operations that are launched as one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capture(self) -> Generator[None]:
        """What is launched inside becomes the graph; it computes nothing. RuntimeError where it waits for the device
        or copies from memory that is not page-locked."""
        with torch.cuda.device(self._device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            yield

    def replay(self) -> None:
        """Launch it."""
        self._graph.replay()


GRAPHS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaGraph}  # by the type of a device that has them


class _Reads(TorchDispatchMode):
    """Keeps the tensors that operations take from outside: a graph reads their memory, which must stay."""

    def __init__(self) -> None:
        super().__init__()
        self._outside: dict[int, torch.Tensor] = {}  # by the address of their memory
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs)):
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made:
                self._outside.setdefault(address, tensor.detach())
        self._made.update(
            address
            for tensor in _tensors(result)
            if (address := tensor.untyped_storage().data_ptr()) not in self._outside
        )
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class NotCapturedError(RuntimeError):
    """A capture has failed: nothing was computed, and from now on operations are launched one by one."""


NO_CONTEXT = nullcontext()  # one for all: making one takes as long as entering it
_ONE_BY_ONE = nullcontext[Callable[[Any], object]](lambda result: None)


class Captures:
    """Launches of operations on a device that never change; where the device has graphs, and `active`, after some times
    as one:

        result = captures.replay(key)
        if result is None:
            with captures.launch(key) as keep:
                result = ...
                keep(result)

    What is launched there must be the same operations on tensors at the same places each time, of which none is waited
    for, and leave nothing to be done on the host. The result is overwritten by the next replay of its key."""

    def __init__(self, device: torch.device, *, active: bool = True) -> None:
        # Runs that must be reproducible bit for bit do not depend on when something is captured.
        self._active = active and device.type in GRAPHS and not torch.are_deterministic_algorithms_enabled()
        self._device = device
        self._launches: dict[Hashable, int] = {}  # the key launched last comes last
        self._captured: dict[Hashable, tuple[Any, Any, _Reads]] = {}  # (graph, result, what it reads)

    def replay(self, key: Hashable) -> Any:
        """Launch what was captured; its result, None where nothing was."""
        if key not in self._captured:
            return None
        graph, result, _ = self._captured[key]
        graph.replay()
        return result

    def launch(self, key: Hashable) -> AbstractContextManager[Callable[[Any], object]]:
        """What is launched inside is of this key; gives the function that takes the result. NotCapturedError where it
        must be launched once more."""
        return self._launch(key) if self._active else _ONE_BY_ONE

    @contextmanager
    def _launch(self, key: Hashable) -> Generator[Callable[[Any], object]]:
        kept: list[Any] = []
        count = self._launches[key] = self._launches.pop(key, 0) + 1
        if count <= WARM_UPS:
            if len(self._launches) > MAX_COUNTED:
                del self._launches[next(iter(self._launches))]
            yield kept.append
            return
        del self._launches[key]
        if len(self._captured) == MAX_CAPTURES:
            del self._captured[next(iter(self._captured))]
        graph = GRAPHS[self._device.type](self._device)
        reads = _Reads()
        try:
            with graph.capture(), reads:
                yield kept.append
        except RuntimeError as error:
            self._active = False
            self._captured.clear()
            print(
                f"ddrl: what an update launches on {self._device} cannot be captured and is launched one by one: "
                f"{first_line(error)}",
                file=sys.stderr,
                flush=True,
            )
            raise NotCapturedError(str(error)) from error
        self._captured[key] = graph, kept[0], reads
        graph.replay()  # a capture computes nothing


# -- how long a device computes, by its own clock ----------------------------------------------------------------------

MAX_PENDING = 256  # contexts of `BusySeconds` whose times are not added yet


class HostEvent:
    """A time of the host's clock, for devices that compute while they are asked."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        """Now."""
        self._time = perf_counter()

    def synchronize(self) -> None:
        """It is there at once."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds to `end`."""
        return 1e3 * (end._time - self._time)


class BusySeconds:
    """Seconds that `device` spends on what is launched inside `counted`, by its own clock: from the first operation of
    each context to the last, gaps between operations that are launched one by one among them. Counted from the first
    call of `seconds` on."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._counts = False
        self._pending: list[tuple[Any, Any]] = []  # events before and after
        self._sum = 0.0

    def counted(self) -> AbstractContextManager[None]:
        """Count what is launched inside; nothing waits for it."""
        return self._counted() if self._counts else NO_CONTEXT

    @contextmanager
    def _counted(self) -> Generator[None]:
        begin = self._event()
        end = self._event()
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))
        if len(self._pending) == MAX_PENDING:
            self.seconds()

    def seconds(self) -> float:
        """Those so far; waits for the device."""
        self._counts = True
        for begin, end in self._pending:
            end.synchronize()
            self._sum += begin.elapsed_time(end) / 1e3
        self._pending.clear()
        return self._sum

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else HostEvent()

"""A torch device in pure Python: it computes on the processor and counts what a real one would cost.

    from tests.testing import fakegpu
    fakegpu.install()
    module.to("fake")

It is torch's private-use backend, set up from Python (torch 2.13, experimental there; once a process). A tensor on it
is an ordinary torch tensor with a dispatch key, storage and strides of its own; its memory is host memory that enters
torch as DLPack's extension device. Every operation without a kernel of its own comes to one fallback: arguments are
seen as CPU tensors over the same memory, the CPU's kernel runs, and fresh results become the device's. So results are
the CPU's bit for bit. As on a real device, operands on different devices are refused, and data reach it by counted
copies alone.

Not there, because torch's Python backend has no hook for it: gradients on another device than fake:0, pinned memory,
torch.accelerator.synchronize (use torch.fake.synchronize), torch.accelerator's memory figures and device index (always
0), torch.Event, generators on the device (random numbers come from the CPU's generator), complex numbers viewed as real
ones, copy.deepcopy of a tensor, `parameter.data = tensor` across devices (so module.to makes new parameters, as it does
for every device but cuda and xpu), fused recurrent layers, and autocast.

`Graph` stands for torch.cuda.CUDAGraph: it launches recorded operations anew on the tensors that they had, as one
launch, and refuses to record what waits for the device or copies from or to the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

# ---- memory
# The memory of fake devices: host memory that torch takes for a device's, what it costs, and when there is no more.


NAME = "fake"


@dataclass
class Counters:
    """What one device did since `reset`. Copies are counted by direction, with their bytes."""

    launches: int = 0
    synchronizations: int = 0
    allocations: int = 0
    copies_in: int = 0
    bytes_in: int = 0
    copies_out: int = 0
    bytes_out: int = 0
    copies_within: int = 0
    bytes_within: int = 0
    blocking_copies: int = 0  # of those in and out


class Memory:
    """One device's memory: the host memory of its tensors, by weak references."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.peak = 0  # bytes
        self.limit: int | None = None
        self.failures = 0  # of the next allocations
        self._blocks: list[tuple[StorageWeakRef, int]] = []
        self._most = 0  # live bytes, and those of blocks that have gone since they were counted

    def live(self) -> int:
        """Bytes that tensors hold."""
        self._blocks = [block for block in self._blocks if not block[0].expired()]
        self._most = sum(nbytes for _, nbytes in self._blocks)
        return self._most

    def allocate(self, storage: torch.UntypedStorage, index: int) -> None:
        """Count a block in. OutOfMemoryError beyond the limit."""
        nbytes = storage.nbytes()
        fails = self.failures > 0
        self.failures = max(0, self.failures - 1)
        if fails or (self.limit is not None and self._most + nbytes > self.limit and self.live() + nbytes > self.limit):
            raise torch.OutOfMemoryError(
                f"{NAME}:{index} is out of memory: tried to allocate {nbytes} bytes with {self.live()} live ones"
            )
        self._blocks.append((StorageWeakRef(storage), nbytes))
        self._most += nbytes
        if self._most > self.peak:  # only then is it worth to look which blocks have gone
            self.peak = max(self.peak, self.live())
        self.counters.allocations += 1


MEMORIES: list[Memory] = []
"""By index of the device."""


class _DLManagedTensor(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor (dmlc/dlpack, dlpack.h)."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32))


_CPU = 1  # DLDeviceType
_EXTENSION = 12

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _moved(tensor: torch.Tensor, device_type: int, index: int) -> torch.Tensor:
    """A tensor over the same memory that says it is on another device; it keeps the first one's memory."""
    capsule = torch._C._to_dlpack(tensor)
    managed = _DLManagedTensor.from_address(_pointer_of(capsule, b"dltensor"))
    managed.device_type = device_type
    managed.device_index = index
    return torch._C._from_dlpack(capsule)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a device's tensor."""
    return _moved(tensor, _CPU, 0)


def on_device(cpu: torch.Tensor, index: int) -> torch.Tensor:
    """Fresh CPU memory becomes the device's."""
    MEMORIES[index].allocate(cpu.untyped_storage(), index)
    return _moved(cpu, _EXTENSION, index)


# -- fakegpu -----------------------------------------------------------------------------------------------------------

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
except ImportError:
    _setup_privateuseone_for_python_backend = None

_libraries: list[torch.library.Library] = []  # torch keeps what they register as long as they live


def install(devices: int = 1) -> None:
    """Register the device type and its devices fake:0 ... fake:{devices - 1}; later calls only change their number."""
    if _setup_privateuseone_for_python_backend is None:
        raise ImportError(f"tests.testing.fakegpu needs torch 2.13 or newer, this is {torch.__version__}")
    if not 1 <= devices <= 127:
        raise ValueError(f"{devices} fake devices: 1 to 127 are possible")
    del MEMORIES[devices:]
    MEMORIES.extend(Memory() for _ in range(devices - len(MEMORIES)))
    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        own = torch.library.Library("aten", "IMPL")
        others = torch.library.Library("_", "IMPL")
        for operation, kernel in _KERNELS.items():
            own.impl(operation, kernel, "PrivateUse1")
        others.fallback(_fallback, "PrivateUse1")
        _libraries.extend((own, others))


def counters(index: int = 0) -> Counters:
    """What fake:{index} has counted; a live object."""
    return MEMORIES[index].counters


def live_bytes(index: int = 0) -> int:
    """Bytes of all tensors' memory on fake:{index}."""
    return MEMORIES[index].live()


def peak_bytes(index: int = 0) -> int:
    """The most live bytes since `reset`."""
    return MEMORIES[index].peak


def reset(index: int = 0) -> None:
    """Counters to 0, the peak to what is live; no limit and no failure to come."""
    memory = MEMORIES[index]
    memory.counters, memory.peak, memory.limit, memory.failures = Counters(), memory.live(), None, 0


def limit_memory(nbytes: int | None, index: int = 0) -> None:
    """Let allocations fail beyond so many live bytes; None: never."""
    MEMORIES[index].limit = nbytes


def fail_allocations(count: int = 1, index: int = 0) -> None:
    """Let the next `count` allocations fail, whatever their size."""
    MEMORIES[index].failures = count


class _Module:
    """torch.fake."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers come from the CPU's generator, which torch.manual_seed seeds."""

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return len(MEMORIES)

    def synchronize(self, device: Any = None) -> None:
        counters(torch.device(device).index or 0 if device is not None else 0).synchronizations += 1


def _is_fake(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _index(device: torch.device | None) -> int:
    index = 0 if device is None else device.index or 0  # torch gives None for a device without a number
    if index >= len(MEMORIES):
        raise RuntimeError(f"{NAME}:{index} does not exist: there are {len(MEMORIES)} fake devices")
    return index


def _empty(
    size: Sequence[int],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    cpu = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format, device="cpu")
    return on_device(cpu, _index(device))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), _index(device))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between a device and the host, or from device to device; counted where the device is."""
    nbytes = target.numel() * target.itemsize
    if Graph.recording is not None:
        if not (_is_fake(source) and _is_fake(target)):
            raise RuntimeError("a copy from or to the host cannot be recorded")
        Graph.recording.calls.append((_copy_from, (source, target), {}, None))
    if not _is_fake(source):
        counted = counters(target.device.index)
        counted.copies_in += 1
        counted.bytes_in += nbytes
        counted.blocking_copies += not non_blocking
    elif not _is_fake(target):
        counted = counters(source.device.index)
        counted.copies_out += 1
        counted.bytes_out += nbytes
        counted.blocking_copies += not non_blocking
    else:
        counted = counters(target.device.index)
        counted.copies_within += 1
        counted.bytes_within += nbytes
    from_host, to_host = (on_host(tensor) if _is_fake(tensor) else tensor for tensor in (source, target))
    to_host.copy_(from_host)
    return target


_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _view(tensor: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> torch.Tensor:
    """A tensor over the same storage; torch's CPU kernel for it does not look at the device."""
    return torch.ops.aten.as_strided.default.redispatch(_CPU_KEYS, tensor, size, stride, offset)


def _resize(tensor: torch.Tensor, size: Sequence[int], memory_format: Any = None) -> torch.Tensor:
    """In place; the memory grows where it must, and keeps its first elements."""
    fresh = torch.empty(size, dtype=tensor.dtype, memory_format=memory_format or torch.contiguous_format)
    storage = tensor.untyped_storage()
    room = storage.nbytes() // tensor.itemsize - tensor.storage_offset()
    if fresh.numel() <= room:
        tensor.data = _view(tensor, fresh.shape, fresh.stride(), tensor.storage_offset())
    else:
        if room > 0:
            fresh.view(-1)[:room] = on_host(_view(tensor, (room,), (1,), tensor.storage_offset()))
        tensor.data = on_device(fresh, tensor.device.index)
    return tensor


def _convolution_backward(
    gradient: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any
) -> tuple[torch.Tensor, ...]:
    """torch asks backends for convolutions by names of their own; sizes of the bias are what the CPU's wants
    besides."""
    operation = torch.ops.aten.convolution_backward.default
    sizes = [gradient.shape[1]]
    return _fallback(operation, gradient, given, weight, sizes, *rest, **named)


def _convolution(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _fallback(torch.ops.aten.convolution.default, *args, **kwargs)


_KERNELS = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "as_strided": _view,
    "resize_": _resize,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}


class Graph:
    """Operations recorded on a device, launched as one. What is recorded is computed then and there, and the first
    replay does nothing in its place."""

    recording: Graph | None = None

    def __init__(self, device: torch.device) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []  # (kernel, arguments, result)
        self._device = device
        self._computed = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what is launched inside."""
        Graph.recording = self
        try:
            yield
        finally:
            Graph.recording = None
        self._computed = True

    def replay(self) -> None:
        """Launch all of it on the same memory."""
        launches = counters(self._device.index or 0).launches
        for kernel, args, kwargs, result in [] if self._computed else self.calls:
            fresh = kernel(*args, **kwargs)
            for to, of in zip(pytree.tree_leaves(result), pytree.tree_leaves(fresh), strict=True):
                if _is_fake(to) and to.data_ptr() != of.data_ptr():
                    on_host(to).copy_(on_host(of))
        self._computed = False
        counters(self._device.index or 0).launches = launches + 1


def _fallback(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the CPU's kernel over the device's memory."""
    result = _compute(operation, *args, **kwargs)
    if Graph.recording is not None and not operation.is_view:
        if _waits(operation):
            raise RuntimeError(f"{operation} waits for the device and cannot be recorded")
        Graph.recording.calls.append((_compute, (operation, *args), kwargs, result))
    return result


def _waits(operation: Any) -> bool:
    """Whether the host reads a value."""
    return torch.Tag.data_dependent_output in operation.tags or torch.Tag.dynamic_output_shape in operation.tags


def _compute(operation: Any, *args: Any, **kwargs: Any) -> Any:
    names = _output_names(operation)
    outputs = [leaf for leaf in pytree.tree_leaves([kwargs.get(name) for name in names]) if _is_fake(leaf)]
    leaves, _ = pytree.tree_flatten((args, kwargs))
    device = _common_device(operation, leaves)
    fakes = [leaf for leaf in leaves if _is_fake(leaf)]
    hosts = {id(fake): on_host(fake) for fake in fakes}
    # A kernel may resize an output on its way, which needs memory that can grow; and an output may be an input as well.
    fresh = {id(output): torch.empty(0, dtype=output.dtype) for output in outputs}
    given = {name: _plain(value, fresh if name in names else hosts) for name, value in kwargs.items()}
    result = operation(*_plain(args, hosts), **given)
    counted = counters(device.index)
    if not operation.is_view:
        counted.launches += 1
    counted.synchronizations += _waits(operation)
    for output in outputs:
        host = fresh[id(output)]
        if host.shape == output.shape:
            on_host(output).copy_(host)
        else:
            output.data = on_device(host, device.index)
    for fake in fakes:
        host = hosts[id(fake)]
        if id(fake) not in fresh and (host.shape != fake.shape or host.stride() != fake.stride()):  # t_, squeeze_
            fake.data = _like(operation, host, fakes, device)

    def give(tensor: torch.Tensor) -> torch.Tensor:
        same = [fake for fake in fakes if tensor is fresh.get(id(fake)) or tensor is hosts[id(fake)]]
        return same[0] if same else _like(operation, tensor, fakes, device)

    return pytree.tree_map_only(torch.Tensor, give, result)


@cache
def _output_names(operation: Any) -> tuple[str, ...]:
    """The arguments into which the operation writes its results (out=)."""
    arguments = [argument for argument in operation._schema.arguments if argument.kwarg_only]
    return tuple(argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write)


def _common_device(operation: Any, leaves: Sequence[Any]) -> torch.device:
    """The one device of all operands; numbers as CPU tensors of no dimension may join them."""
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and (_is_fake(leaf) or leaf.dim() > 0)]
    devices += [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    for other in devices:
        if other != devices[0]:
            raise RuntimeError(
                f"{operation}: expected all tensors to be on the same device, got {devices[0]} and {other}"
            )
    return torch.device(NAME, _index(devices[0] if devices else None))


def _plain(value: Any, hosts: dict[int, torch.Tensor]) -> Any:
    """An argument as the CPU's kernel takes it: `hosts` by id of the device's tensor."""

    def replace(leaf: Any) -> Any:
        return torch.device("cpu") if isinstance(leaf, torch.device) else hosts.get(id(leaf), leaf)

    return pytree.tree_map(replace, value)


def _like(operation: Any, host: torch.Tensor, fakes: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The device's tensor for what the kernel gave: a view of an argument, or fresh memory."""
    for fake in fakes:
        storage = fake.untyped_storage()
        distance = host.data_ptr() - storage.data_ptr()
        if host.numel() and 0 <= distance < storage.nbytes():
            if host.dtype != fake.dtype:
                raise NotImplementedError(f"{operation} views {fake.dtype} as {host.dtype}: {NAME} cannot")
            return _view(fake, host.shape, host.stride(), distance // host.itemsize)
    return on_device(host, device.index)

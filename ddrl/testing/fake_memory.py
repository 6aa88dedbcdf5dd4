"""The memory of fake devices: host memory that torch takes for a device's, what it costs, and when there is no more."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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

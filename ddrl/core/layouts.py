"""Layouts of flat vectors of parameters: one buffer with every tensor at a 64-byte boundary, described by a manifest.

Written by the learner, mapped by rollouts without a copy. Rows of experience are laid out by `ddrl.core.rows`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import CheckpointError

ALIGNMENT = 64  # bytes; a cache line, and the widest vector load


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a parameter vector; `offset` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ParameterLayout:
    """Manifest of a parameter vector: what stands where. `nbytes` is the whole vector, padding included."""

    entries: tuple[TensorEntry, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: dict[str, tuple[tuple[int, ...], str]]) -> ParameterLayout:
        """Lay out {name: (shape, dtype)} in the order given."""
        entries: list[TensorEntry] = []
        offset = 0
        for name, (shape, dtype) in tensors.items():
            entry = TensorEntry(name, tuple(shape), np.dtype(dtype).name, offset)
            entries.append(entry)
            offset += entry.nbytes
            offset += -offset % ALIGNMENT
        return cls(tuple(entries), offset)

    def views(self, vector: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Every tensor as a view into `vector` (uint8, [nbytes]), without a copy."""
        if vector.nbytes != self.nbytes:
            raise CheckpointError(
                f"a parameter vector of {vector.nbytes} bytes does not fit the network's manifest of {self.nbytes} "
                "bytes: it was written for another network"
            )
        return {
            entry.name: vector[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def to_json(self) -> bytes:
        """The manifest as JSON; `from_json` reads it back."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ParameterLayout:
        """Read a manifest; anything else is refused."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"the parameter manifest cannot be read ({error}): it is corrupt or was not written by ddrl"
            ) from None

    @property
    def digest(self) -> str:
        """Short hash of the manifest: equal digests mean interchangeable vectors."""
        return hashlib.blake2b(self.to_json(), digest_size=8).hexdigest()

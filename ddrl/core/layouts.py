"""Layouts of what travels: rows of experience and flat vectors of parameters.

A row is one record of one episode (written by rollouts, moved by lanes and relays as bytes, read by replay). A
parameter vector is one buffer with every tensor at a 64-byte boundary, described by a manifest (written by the learner,
mapped by rollouts without a copy)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import CheckpointError
from ddrl.core.specs import EnvSpec

ALIGNMENT = 64  # bytes; a cache line, and the widest vector load


class RowKind(IntEnum):
    """What a row records."""

    STEP = 0  # state, the action taken in it, and the reward that followed
    TERMINATED = 1  # state is the final one of an episode that reached a terminal state; action and reward are zero
    TRUNCATED = 2  # state is the final one of an episode that was cut by a limit; action and reward are zero


def row_dtype(spec: EnvSpec) -> np.dtype[Any]:
    """Structured dtype of one row, 8-byte aligned.

    `stream` names one environment of one rollout for the whole run: stream = rollout_index * num_envs + environment.
    `step` counts from 0 within an episode, so a reader sees a new episode (step 0) and a gap (a dropped row) without
    any other message."""
    action = np.dtype(spec.action.dtype)
    fields: list[tuple[str, Any] | tuple[str, Any, tuple[int, ...]]] = [
        ("policy_version", np.uint64),
        ("stream", np.uint32),
        ("step", np.uint32),
        ("reward", np.float32),
        ("kind", np.uint32),
        ("action", action, spec.action.shape),
        ("state", np.dtype(spec.frame.dtype), spec.frame.shape),
    ]
    packed = np.dtype(fields)
    padding = -packed.itemsize % 8
    return np.dtype([*fields, ("padding", np.uint8, (padding,))]) if padding else packed


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

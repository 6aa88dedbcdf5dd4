"""What each piece of a model bears on its way, and how a model is put together from its pieces.

A model is one flat buffer (core.layouts.ParameterLayout), cut by `plans.cuts`. Every chunk travels behind a header of
128 bytes with version, index and number of pieces, place and checksum: a receiver needs nothing
else to place and verify it. Written by the root, verified by every receiver, read by nobody else."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.distribution.plans.plan import HEADER_BYTES

Bytes = NDArray[np.uint8]
Checksum = Callable[[Any], int]

MAGIC = 0x6C726464  # "ddrl"
EPOCHS = 1 << 16

HEADER = np.dtype(
    [
        ("magic", np.uint32),
        ("epoch", np.uint16),  # of the plan
        ("back", np.uint16),  # models between this one and its base; 0: it is whole
        ("sequence", np.uint32),  # counts the models that the root sends, whatever their version
        ("index", np.uint32),
        ("count", np.uint32),  # chunks in all
        ("length", np.uint32),  # bytes that follow: of the model, or of its coded form
        ("offset", np.uint64),  # bytes, in the model
        ("version", np.int64),
        ("model_checksum", np.uint64),
        ("time_ns", np.int64),  # when the trainer published, Unix time
        ("values", np.float64, (8,)),
        ("checksum", np.uint64),  # of this chunk and of all that stands before in this header
    ]
)
assert HEADER.itemsize == HEADER_BYTES
_BEFORE_CHECKSUM = HEADER_BYTES - 8
_FIELDS = struct.Struct("=IH2xIIIIQq80xQ")  # of HEADER, without back, model_checksum, time_ns and values
assert _FIELDS.size == HEADER_BYTES


@dataclass(frozen=True)
class Shard:
    """One piece of one version: {version, index, count, offset, length, checksum}; offset and length in bytes."""

    version: int
    index: int
    count: int
    offset: int
    length: int
    checksum: int


def describe_shards(model: Bytes, version: int, bounds: list[int], checksum: Checksum) -> list[Shard]:
    """The shards of a model as records, checksums taken."""
    count = len(bounds) - 1
    return [
        Shard(version, index, count, start, stop - start, checksum(model[start:stop]))
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def write_headers(
    headers: NDArray[Any], model: Bytes, bounds: NDArray[np.int64], checksum: Checksum, **fields: Any
) -> None:
    """Fill `headers` [K] (dtype HEADER) for one model that travels as it is (`fields` as in `fill_headers`); reads the
    whole model once."""
    fill_headers(headers, bounds, **fields)
    headers["length"] = np.diff(bounds)
    heads = headers.view(np.uint8).reshape(len(headers), HEADER_BYTES)
    headers["checksum"] = [
        checksum(model[start:stop]) ^ checksum(heads[index, :_BEFORE_CHECKSUM])
        for index, (start, stop) in enumerate(itertools.pairwise(bounds.tolist()))
    ]


def fill_headers(
    headers: NDArray[Any],
    bounds: NDArray[np.int64],
    *,
    epoch: int,
    sequence: int,
    version: int,
    model_checksum: int,
    time_ns: int,
    values: NDArray[np.float64],
    back: int = 0,
) -> None:
    """All but length and checksum of the chunks [K] of one model."""
    headers["magic"], headers["epoch"], headers["back"], headers["sequence"] = MAGIC, epoch % EPOCHS, back, sequence
    headers["index"], headers["count"], headers["offset"] = np.arange(len(headers)), len(headers), bounds[:-1]
    headers["version"], headers["model_checksum"], headers["time_ns"], headers["values"] = (
        version,
        model_checksum,
        time_ns,
        values,
    )


def seal_header(headers: NDArray[Any], index: int, payload: Bytes, checksum: Checksum) -> None:
    """Length and checksum of chunk `index`, whose bytes on the wire are `payload`."""
    headers["length"][index] = len(payload)
    head = headers[index : index + 1].view(np.uint8)[:_BEFORE_CHECKSUM]
    headers["checksum"][index] = checksum(payload) ^ checksum(head)


class Assembly:
    """One version being put together in place: which chunks are there, and whether all are sound.

    Chunks arrive in any order; a chunk that is already there changes nothing. `complete` is True when all are there;
    only if `problem` is then still empty may the model be acted on."""

    def __init__(
        self,
        data: Bytes,
        headers: NDArray[Any],
        bounds: NDArray[np.int64],
        epoch: int,
        sequence: int,
        checksum: Checksum,
    ) -> None:
        self.data, self.headers = data, headers
        self._heads = headers.view(np.uint8).reshape(len(headers), HEADER_BYTES)
        self.problem = ""
        self.version = -1
        self._edges: list[int] = bounds.tolist()
        self._there = bytearray(len(bounds) - 1)
        self._missing = len(bounds) - 1
        self._epoch, self._sequence, self._checksum = epoch % EPOCHS, sequence, checksum

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self._missing == 0

    def has(self, index: int) -> bool:
        """Whether chunk `index` is there."""
        return bool(self._there[index])

    def place(self, header: NDArray[Any], payload: Bytes) -> bool:
        """Copy in a chunk that came elsewhere, then `arrived`; a piece of another version, or one already there, is
        left out (False)."""
        index = int(header["index"])
        if (
            index >= len(self._there)
            or self._there[index]
            or (int(header["epoch"]), int(header["sequence"])) != (self._epoch, self._sequence)
        ):
            return False
        self.headers[index] = header
        self.data[self._edges[index] : self._edges[index + 1]] = payload
        return self.arrived(index)

    def arrived(self, index: int) -> bool:
        """Verify chunk `index`, whose header and payload now stand in place; False if it was there already. Never
        raises: see `problem`."""
        if self._there[index]:
            return False
        self._there[index] = 1
        self._missing -= 1
        magic, epoch, sequence, place, count, length, offset, version, checksum = _FIELDS.unpack_from(
            self._heads.data, index * HEADER_BYTES
        )
        payload = self.payload(index)
        if self.version < 0:
            self.version = version
        where = f"chunk {index} of version {version} (bytes {self._edges[index]}..{self._edges[index + 1]})"
        if (magic, epoch, sequence, place, count) != (MAGIC, self._epoch, self._sequence, index, len(self._there)):
            self.problem = self.problem or f"chunk {index} bears a header of another message"
        elif (offset, length) != (self._edges[index], len(payload)) or version != self.version:
            self.problem = self.problem or f"{where} does not belong there, or not to version {self.version}"
        elif self._checksum(payload) ^ self._checksum(self._heads[index, :_BEFORE_CHECKSUM]) != checksum:
            self.problem = self.problem or f"{where} does not match its checksum"
        elif not self.problem:
            self.accept(index)
        return True

    def payload(self, index: int) -> Bytes:
        """The bytes of chunk `index` as they came."""
        return self.data[self._edges[index] : self._edges[index + 1]]

    def accept(self, index: int) -> None:
        """Chunk `index` is sound; the model already holds it."""

    def model_checksum(self) -> int:
        """Of the whole model, once it is complete; sets `problem` where it is not the trainer's."""
        return int(self.headers["model_checksum"][0])

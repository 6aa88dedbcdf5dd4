"""What each piece of a model bears on its way, and how a model is put together from its pieces.

A model is one flat buffer (core.layouts.ParameterLayout), cut by `plans.cuts`. Every chunk travels behind a header of
24 bytes: of which model of which plan it is, which chunk, how long, and a checksum of all that. What is the same for
all chunks of a model travels once, before the header of chunk 0, and is part of that chunk's checksum: a model is acted
on only when all its chunks are sound. Written by the root, verified by every receiver, read by nobody else."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl._kernel import seal_chunks, sound_chunks
from ddrl.distribution.plans.plan import HEADER_BYTES, MODEL_HEADER_BYTES

Bytes = NDArray[np.uint8]
Checksum = Callable[[Any], int]

MAGIC = 0x6C726464  # "ddrl"
EPOCHS = 1 << 16

HEADER = np.dtype(
    [
        ("sequence", np.uint32),  # counts the models that the root sends, whatever their version
        ("index", np.uint32),
        ("length", np.uint32),  # bytes that follow: of the model, or of its coded form
        ("epoch", np.uint16),  # of the plan
        ("back", np.uint16),  # models between this one and its base; 0: it is whole
        ("checksum", np.uint64),  # of this chunk and of all that stands before in this header
    ]
)
MODEL_HEADER = np.dtype(
    [
        ("magic", np.uint32),
        ("count", np.uint32),  # chunks in all
        ("version", np.int64),
        ("model_checksum", np.uint64),
        ("time_ns", np.int64),  # when the trainer published, Unix time
        ("values", np.float64, (8,)),
    ]
)
_FIELDS = struct.Struct("=IIIH2xQ")  # of HEADER, without back
assert (HEADER.itemsize, _FIELDS.size, MODEL_HEADER.itemsize) == (HEADER_BYTES, HEADER_BYTES, MODEL_HEADER_BYTES)


class Headers:
    """Of one version, as they travel: `model` [1] (dtype MODEL_HEADER), then `chunks` [K] (dtype HEADER)."""

    def __init__(self, chunks: int) -> None:
        self.memory = np.zeros(MODEL_HEADER_BYTES + chunks * HEADER_BYTES, np.uint8)
        self.model = self.memory[:MODEL_HEADER_BYTES].view(MODEL_HEADER)
        self.chunks = self.memory[MODEL_HEADER_BYTES:].view(HEADER)

    def __len__(self) -> int:
        return len(self.chunks)

    @staticmethod
    def span(first: int, count: int) -> tuple[int, int]:
        """Where the headers of a message with these chunks begin in `memory`, and their bytes."""
        start = MODEL_HEADER_BYTES + first * HEADER_BYTES if first else 0
        return start, MODEL_HEADER_BYTES + (first + count) * HEADER_BYTES - start

    def before_checksum(self, index: int) -> Bytes:
        """What the checksum of chunk `index` covers beside the chunk."""
        start, nbytes = self.span(index, 1)
        return self.memory[start : start + nbytes - 8]


def write_headers(headers: Headers, model: Bytes, bounds: NDArray[np.int64], **fields: Any) -> None:
    """All of one model that travels as it is (`fields` as in `fill_headers`); reads the whole model once."""
    fill_headers(headers, **fields)
    seal_chunks(headers.memory, model, bounds)


def fill_headers(
    headers: Headers,
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
    model = headers.model
    chunks = headers.chunks
    chunks["sequence"], chunks["index"] = sequence, np.arange(len(chunks))
    chunks["epoch"] = epoch % EPOCHS
    chunks["back"] = back
    model["magic"], model["count"], model["version"] = MAGIC, len(chunks), version
    model["model_checksum"] = model_checksum
    model["time_ns"] = time_ns
    model["values"] = values


def seal_header(headers: Headers, index: int, payload: Bytes, checksum: Checksum) -> None:
    """Length and checksum of chunk `index`, whose bytes on the wire are `payload`."""
    headers.chunks["length"][index] = len(payload)
    headers.chunks["checksum"][index] = checksum(payload) ^ checksum(headers.before_checksum(index))


class Assembly:
    """One version being put together in place: which chunks are there, and whether all are sound.

    Chunks arrive in any order; a chunk that is already there changes nothing. `complete` is True when all are there;
    only if `problem` is then still empty may the model be acted on."""

    def __init__(
        self,
        data: Bytes,
        headers: Headers,
        bounds: NDArray[np.int64],
        epoch: int,
        sequence: int,
        checksum: Checksum,
    ) -> None:
        self.data = data
        self.headers = headers
        self.problem = ""
        self.version = -1  # known once chunk 0 is there
        self._bounds = bounds
        self._edges = bounds.tolist()
        self._there = bytearray(len(bounds) - 1)
        self._missing = len(bounds) - 1
        self._epoch = epoch % EPOCHS
        self._sequence = sequence
        self._checksum = checksum

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self._missing == 0

    def all_arrived(self, chunks: Sequence[int]) -> bool:
        """`arrived` for several at once, in one call of the kernel; False, and nothing has changed, where each must be
        looked at by itself: one is not sound, or is the first, or was there already."""
        if self.problem or any(self._there[index] for index in chunks) or 0 in chunks:
            return False
        if not sound_chunks(self.headers.memory, self.data, self._bounds, chunks, self._epoch, self._sequence):
            return False
        for index in chunks:
            self._there[index] = 1
        self._missing -= len(chunks)
        return True

    def arrived(self, index: int) -> bool:
        """Verify chunk `index`, whose header and payload now stand in place; False if it was there already. Never
        raises: see `problem`."""
        if self._there[index]:
            return False
        self._there[index] = 1
        self._missing -= 1
        headers = self.headers
        sequence, place, length, epoch, checksum = _FIELDS.unpack_from(
            headers.memory.data, MODEL_HEADER_BYTES + index * HEADER_BYTES
        )
        foreign = (epoch, sequence, place) != (self._epoch, self._sequence, index)
        if index == 0:
            model = headers.model[0]
            self.version = int(model["version"])
            foreign = foreign or (model["magic"], model["count"]) != (MAGIC, len(self._there))
        payload = self.payload(index)
        where = f"chunk {index} (bytes {self._edges[index]}..{self._edges[index + 1]})"
        if foreign:
            self.problem = self.problem or f"chunk {index} bears a header of another message"
        elif length != len(payload):
            self.problem = self.problem or f"{where} does not belong there"
        elif self._checksum(payload) ^ self._checksum(headers.before_checksum(index)) != checksum:
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
        return int(self.headers.model["model_checksum"][0])

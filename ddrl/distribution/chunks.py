"""What is sent before each piece of a model, and how a model is put together from its pieces.

A model is one flat buffer (`core.rows.ParameterLayout`), cut by a plan. Every chunk is sent behind a header of 24
bytes: of which model of which plan it is, which chunk, how long, and a checksum of all that. What is the same for all
chunks of a model is sent once, before the header of chunk 0, and is part of that chunk's checksum. A model is used only
when all its chunks are sound. Headers are written by the root and verified by every receiver. Used by `executor` alone;
imports no MPI.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddrl._kernel import sound_chunks
from ddrl.channels.mailbox import checksum
from ddrl.channels.wire import aligned
from ddrl.core.errors import DdrlError
from ddrl.core.specs import Bytes, Floats, Ints
from ddrl.distribution.plan import HEADER_BYTES, MODEL_HEADER_BYTES

if TYPE_CHECKING:
    from ddrl.distribution.codecs import Codec
    from ddrl.distribution.executor import HeldVersion

MAGIC = 0x6C726464  # "ddrl"
EPOCHS = 1 << 16

HEADER = np.dtype(
    [
        ("sequence", np.uint32),  # counts the models that the root sends, whatever their version
        ("index", np.uint32),
        ("length", np.uint32),  # bytes that follow: of the model, or of its coded form
        ("epoch", np.uint16),  # of the plan
        ("back", np.uint16),  # models between this one and its base; 0: it is whole
        ("checksum", np.uint64),  # of this chunk and of the fields above
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
assert (HEADER.itemsize, MODEL_HEADER.itemsize) == (HEADER_BYTES, MODEL_HEADER_BYTES)


class Headers:
    """The headers of one version as they are sent: `model` [1] (dtype MODEL_HEADER), then `chunks` [K] (dtype
    HEADER)."""

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

    def fill(
        self,
        *,
        epoch: int,
        sequence: int,
        version: int,
        model_checksum: int,
        time_ns: int,
        values: Floats,
        back: int = 0,
    ) -> None:
        """Everything but the lengths and checksums of chunks, which `seal` or the kernel's `seal_chunks` write."""
        self.chunks["sequence"] = sequence
        self.chunks["index"] = np.arange(len(self))
        self.chunks["epoch"] = epoch % EPOCHS
        self.chunks["back"] = back
        self.model[0] = (MAGIC, len(self), version, model_checksum, time_ns, values)

    def seal(self, index: int, payload: Bytes) -> None:
        """Length and checksum of chunk `index`, which is sent as `payload`."""
        self.chunks["length"][index] = len(payload)
        self.chunks["checksum"][index] = self.checksum(index, payload)

    def checksum(self, index: int, payload: Bytes) -> int:
        """Checksum of chunk `index` and its header."""
        start, nbytes = self.span(index, 1)
        return checksum(payload) ^ checksum(self.memory[start : start + nbytes - 8])


class Assembly:
    """One version being put together in place: which chunks are there, and whether all are sound.

    Chunks arrive in any order; a chunk that is already there changes nothing. `complete` is True when all are there;
    only if `problem` is then still empty may the model be used."""

    def __init__(self, data: Bytes, headers: Headers, bounds: Ints, epoch: int, sequence: int) -> None:
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

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self._missing == 0

    def all_arrived(self, chunks: Sequence[int]) -> bool:
        """`arrived` for several at once, in one call of the kernel. False, and nothing has changed, where `arrived`
        must be called for each: one is not sound, or is the first, or was there already."""
        if self.problem or any(self._there[index] for index in chunks) or 0 in chunks:
            return False
        if not sound_chunks(self.headers.memory, self.data, self._bounds, chunks, self._epoch, self._sequence):
            return False
        for index in chunks:
            self._there[index] = 1
        self._missing -= len(chunks)
        return True

    def arrived(self, index: int) -> bool:
        """Verify chunk `index`, whose header and payload are in place; False if it was there already. Never raises: see
        `problem`."""
        if self._there[index]:
            return False
        self._there[index] = 1
        self._missing -= 1
        sequence, place, length, epoch, _, wanted = self.headers.chunks[index].item()
        foreign = (epoch, sequence, place) != (self._epoch, self._sequence, index)
        if index == 0:
            model = self.headers.model[0]
            self.version = int(model["version"])
            foreign = foreign or (model["magic"], model["count"]) != (MAGIC, len(self._there))
        payload = self.payload(index)
        problem = ""
        if foreign:
            problem = "bears a header of another message"
        elif length != len(payload):
            problem = "does not belong there"
        elif wanted != self.headers.checksum(index, payload):
            problem = "does not match its checksum"
        elif not self.problem:
            problem = self.accept(index)
        if problem and not self.problem:
            self.problem = f"chunk {index} (bytes {self._edges[index]}..{self._edges[index + 1]}) {problem}"
        return True

    def payload(self, index: int) -> Bytes:
        """The bytes of chunk `index` as they were sent."""
        return self.data[self._edges[index] : self._edges[index + 1]]

    def accept(self, index: int) -> str:
        """Chunk `index` is sound: put it into the model, where it is already. Returns a problem."""
        return ""

    def model_checksum(self) -> int:
        """Of the whole model, once it is complete; sets `problem` where it is not the trainer's."""
        return int(self.headers.model["model_checksum"][0])


# -- coding ------------------------------------------------------------------------------------------------------------
# Versions in coded form: the root encodes each chunk once, when it is first sent; receivers pass it on as it came and
# decode it into their slot.
#
# A coded version is sent from and received into memory of its own (`Coding.take`), cut like the plan; a decoded chunk
# goes straight into the mailbox's slot. A codec that takes differences encodes a version as its difference from a base:
# the newest one that every receiver has confirmed, named in each chunk's header by how many models ago it was sent. A
# receiver keeps its newest versions (`Bases`); where it lacks a base it refuses the version, and the root sends whole
# versions until one is confirmed.


MAX_BACK = (1 << 16) - 1  # models between a version and its base


def wire_edges(codec: Codec, bounds: list[int]) -> list[int]:
    """Where the coded chunks of a model cut at `bounds` [K + 1] are in memory, [K + 1]: at 64-byte boundaries unless
    their size is fixed."""
    edges = [0]
    for start, stop in itertools.pairwise(bounds):
        size = codec.wire_bytes(start, stop)
        edges.append(edges[-1] + (size if codec.fixed else aligned(size)))
    return edges


class Coding:
    """What all coded versions of one plan share: the codec, where chunks are in memory, and memory that is reused."""

    def __init__(self, codec: Codec, bounds: Ints, *, most_bases: int) -> None:
        self.codec = codec
        self.bounds = [int(bound) for bound in bounds]
        self.edges = wire_edges(codec, self.bounds)
        self.bases: Bases | None = Bases(most_bases) if codec.uses_base else None
        self._free: list[Bytes] = []

    def take(self) -> Bytes:
        """Memory for one coded version."""
        return self._free.pop() if self._free else np.empty(max(1, self.edges[-1]), np.uint8)

    def give(self, wire: Bytes) -> None:
        """Reuse it for another version."""
        self._free.append(wire)


class Encoder:
    """Root: one version, encoded chunk by chunk as chunks are sent. `lengths` [K]: of the coded chunks, which begin at
    `at` [K + 1] in `wire`."""

    def __init__(self, coding: Coding, wire: Bytes, headers: Headers, model: Bytes, base: Bytes | None) -> None:
        self._coding = coding
        self._wire = wire
        self._headers = headers
        self._model = model
        self._base = base
        self._ready = bytearray(len(headers))
        self.at = coding.edges
        self.lengths: list[int] = [0] * len(headers)

    def code(self, first: int, count: int) -> None:
        """Encode these chunks and complete their headers, where that is not done yet."""
        for chunk in range(first, first + count):
            if self._ready[chunk]:
                continue
            self._ready[chunk] = 1
            out = self._wire[self.at[chunk] : self.at[chunk + 1]]
            start, stop = self._coding.bounds[chunk : chunk + 2]
            self.lengths[chunk] = self._coding.codec.encode(out, self._model, self._base, start, stop)
            self._headers.seal(chunk, out[: self.lengths[chunk]])


class CodedAssembly(Assembly):
    """A coded version being put together: `wire` is the coded form, `model` the slot that it is decoded into, chunk by
    chunk. `lengths` [K]: of the coded chunks, which begin at `at` [K] in `wire`."""

    def __init__(self, coding: Coding, wire: Bytes, model: Bytes, headers: Headers, epoch: int, sequence: int) -> None:
        super().__init__(wire, headers, np.asarray(coding.bounds, np.int64), epoch, sequence)
        self._coding = coding
        self._model = model
        self.at: list[int] = coding.edges[:-1]
        self.lengths: list[int] = [stop - start for start, stop in itertools.pairwise(coding.edges)]

    def all_arrived(self, chunks: Sequence[int]) -> bool:
        """False: each chunk must be decoded."""
        return False

    def locate(self, first: int, count: int) -> None:
        """Where the chunks of one message of varying size are: one behind the other. Impossible lengths are cut; their
        checksums do not match then."""
        edges = self._coding.edges
        at = edges[first]
        end = edges[first + count]
        for chunk in range(first, first + count):
            length = int(self.headers.chunks["length"][chunk])
            self.at[chunk] = at
            self.lengths[chunk] = min(length, end - at, edges[chunk + 1] - edges[chunk])
            at += self.lengths[chunk]

    def payload(self, index: int) -> Bytes:
        """The coded chunk `index`."""
        return self.data[self.at[index] : self.at[index] + self.lengths[index]]

    def accept(self, index: int) -> str:
        """Decode chunk `index`, which is sound. Returns a problem."""
        back = int(self.headers.chunks["back"][index])
        base: Bytes | None = None
        if back:
            bases = self._coding.bases
            base = bases.find(self._sequence - back) if bases is not None else None
            if base is None:
                return "is a difference from one that this host does not have"
        try:
            self._coding.codec.decode(
                self._model, self.payload(index), base, self._edges[index], self._edges[index + 1]
            )
        except DdrlError as error:
            return f"cannot be decoded: {error}"
        return ""

    def model_checksum(self) -> int:
        """Of the decoded model; where the codec is lossless, `problem` is set unless it is what the trainer
        published."""
        decoded = checksum(self._model)
        if self._coding.codec.lossless and decoded != int(self.headers.model["model_checksum"][0]):
            self.problem = "it was decoded to another model than the trainer's"
        return decoded


class Bases:
    """A receiver's newest versions, at most `most`, by sequence: later ones may be differences from them. Once the
    oldest is dropped, versions that reference it are refused."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, tuple[Bytes, Callable[[], None]]] = {}

    def find(self, sequence: int) -> Bytes | None:
        """The version that was sent as that model, if it is held."""
        entry = self._held.get(sequence)
        return None if entry is None else entry[0]

    def keep(self, sequence: int, data: Bytes, let_go: Callable[[], None]) -> None:
        """Keep a whole version; `let_go` is called once it is dropped."""
        self._held[sequence] = (data, let_go)
        while len(self._held) > self._most:
            self._drop(min(self._held))

    def clear(self) -> None:
        """Drop everything."""
        for sequence in list(self._held):
            self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        _, let_go = self._held.pop(sequence)
        let_go()


class SentVersions:
    """Root: from which sent version the next one may be a difference. Whole versions are sent until one that was sent
    since the last refusal is confirmed."""

    def __init__(self) -> None:
        self._sent: dict[int, HeldVersion] = {}
        self._base = -1
        self._since = 0  # models before this one cannot be bases

    def base(self, next_sequence: int) -> tuple[int, HeldVersion] | None:
        """Sequence and version that every receiver holds; None: send a whole one."""
        if self._base < 0 or next_sequence - self._base > MAX_BACK:
            return None
        return self._base, self._sent[self._base]

    def sent(self, sequence: int, version: HeldVersion) -> None:
        """A version is sent; it is kept until a newer one is confirmed."""
        self._sent[sequence] = version.share()

    def confirmed(self, sequence: int) -> None:
        """Every receiver has sealed it."""
        if sequence < max(self._since, self._base + 1):
            return
        self._base = sequence
        self._drop([old for old in self._sent if old < sequence])

    def refused(self, next_sequence: int) -> None:
        """Some receiver has refused a version: begin again with a whole one."""
        self._since = next_sequence
        self._base = -1
        self._drop(list(self._sent))

    def clear(self) -> None:
        """A new plan, with sequences from 0."""
        self.refused(0)

    def _drop(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._sent.pop(sequence).release()

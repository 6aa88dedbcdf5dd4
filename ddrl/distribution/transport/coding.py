"""Versions in coded form: the root codes each chunk once, when it first leaves; receivers pass it on as it came and
decode it into their slot.

A coded version travels out of and into memory of its own (`Coding.take`), cut like the plan; a decoded chunk goes
straight into the mailbox's slot. With a codec that takes differences, a version is encoded as its difference from a
base: the newest one that every receiver has confirmed, named in each chunk's header by how many models ago it left. A
receiver keeps what may still become a base (`Bases`); where it lacks one it refuses the version, and the root sends
whole ones until one is confirmed. Used by `executor` alone; must not import MPI."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import DdrlError
from ddrl.distribution.transport.codec import Codec, wire_edges
from ddrl.distribution.transport.flights import Held
from ddrl.distribution.transport.shards import Assembly, Bytes, Checksum, Headers, seal_header

MAX_BACK = (1 << 16) - 1  # models between a version and its base


class Coding:
    """What all coded versions of one plan share: the codec, where chunks stand, and memory that is used again."""

    def __init__(self, codec: Codec, bounds: NDArray[np.int64], *, most_bases: int) -> None:
        self.codec = codec
        self.bounds = [int(bound) for bound in bounds]
        self.edges = wire_edges(codec, self.bounds)
        self.bases: Bases | None = Bases(most_bases) if codec.uses_base else None
        self._free: list[Bytes] = []

    def take(self) -> Bytes:
        """Memory for one coded version."""
        return self._free.pop() if self._free else np.empty(max(1, self.edges[-1]), np.uint8)

    def give(self, wire: Bytes) -> None:
        """Done with it."""
        self._free.append(wire)


class Encoder:
    """Root: one version, coded chunk by chunk as chunks are asked for. Keeps version and base until `release`."""

    def __init__(
        self, coding: Coding, wire: Bytes, headers: Headers, version: Held, base: Held | None, checksum: Checksum
    ) -> None:
        self._coding = coding
        self._wire = wire
        self._headers = headers
        self._checksum = checksum
        self._version = version
        self._base = base
        self._ready = bytearray(len(headers))
        self.lengths: list[int] = [0] * len(headers)

    def code(self, first: int, count: int) -> None:
        """See to it that these chunks are coded, their headers complete."""
        bounds = self._coding.bounds
        edges = self._coding.edges
        base = None if self._base is None else self._base.data
        for chunk in range(first, first + count):
            if self._ready[chunk]:
                continue
            self._ready[chunk] = 1
            out = self._wire[edges[chunk] : edges[chunk + 1]]
            self.lengths[chunk] = self._coding.codec.encode(
                out, self._version.data, base, bounds[chunk], bounds[chunk + 1]
            )
            seal_header(self._headers, chunk, out[: self.lengths[chunk]], self._checksum)

    def release(self) -> None:
        """Nothing of it is needed any more."""
        self._version.release()
        if self._base is not None:
            self._base.release()


class CodedAssembly(Assembly):
    """A coded version being put together: `data` is the coded form, `model` the slot that it is decoded into, chunk by
    chunk."""

    def __init__(
        self,
        coding: Coding,
        wire: Bytes,
        model: Bytes,
        headers: Headers,
        epoch: int,
        sequence: int,
        checksum: Checksum,
    ) -> None:
        super().__init__(wire, headers, np.asarray(coding.bounds, np.int64), epoch, sequence, checksum)
        self._coding = coding
        self._model = model
        self.at: list[int] = coding.edges[:-1]  # where each chunk begins in `data`
        self.lengths: list[int] = [stop - start for start, stop in itertools.pairwise(coding.edges)]
        self.back = 0  # models between the base and this one; 0: none is needed

    def all_arrived(self, chunks: Sequence[int]) -> bool:
        """See Assembly. Each must be decoded."""
        return False

    def locate(self, first: int, count: int) -> None:
        """Chunks of one message lie one behind the other: find where. Impossible lengths are cut; their checksums do
        not match then."""
        if self._coding.codec.fixed:
            return
        edges = self._coding.edges
        at = edges[first]
        end = edges[first + count]
        for chunk in range(first, first + count):
            self.at[chunk] = at
            self.lengths[chunk] = min(
                int(self.headers.chunks["length"][chunk]), end - at, edges[chunk + 1] - edges[chunk]
            )
            at += self.lengths[chunk]

    def payload(self, index: int) -> Bytes:
        """See Assembly."""
        return self.data[self.at[index] : self.at[index] + self.lengths[index]]

    def accept(self, index: int) -> None:
        """Decode a chunk that is sound."""
        back = int(self.headers.chunks["back"][index])
        base: Bytes | None = None
        if back:
            self.back = back
            bases = self._coding.bases
            base = bases.find(self._sequence - back) if bases is not None else None
            if base is None:
                self.problem = "it is a difference from one that this host does not have"
                return
        try:
            self._coding.codec.decode(
                self._model, self.payload(index), base, self._edges[index], self._edges[index + 1]
            )
        except DdrlError as error:
            self.problem = f"chunk {index}: {error}"

    def model_checksum(self) -> int:
        """Of the decoded model; where the codec gives the model back, compared with what the trainer published."""
        decoded = self._checksum(self._model)
        if self._coding.codec.lossless and decoded != int(self.headers.model["model_checksum"][0]):
            self.problem = "it was decoded to another model than the trainer's"
        return decoded


class Bases:
    """A receiver's versions that later ones may be differences from, by sequence; at most `most`. Once the oldest is
    dropped, versions that reference it are refused."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, tuple[Bytes, Callable[[], None]]] = {}
        self._needs: dict[
            int, int
        ] = {}  # oldest base that a model that has ended asked for; only what comes later counts
        self._next = 0  # all models before have ended here

    def find(self, sequence: int) -> Bytes | None:
        """The version that left as that model, if it is held."""
        entry = self._held.get(sequence)
        return None if entry is None else entry[0]

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, sequence: int, data: Bytes, let_go: Callable[[], None]) -> None:
        """Keep a whole version; `let_go` is called once it is not needed."""
        self._held[sequence] = (data, let_go)
        while len(self._held) > self._most:
            self._drop(min(self._held))

    def ended(self, sequence: int, back: int) -> None:
        """A model has ended here, a difference from the one `back` models before. Bases never go back, so once all up
        to it have ended, versions older than its base are not referenced again."""
        self._needs[sequence] = sequence - back if back else -1
        while self._next in self._needs:
            need = self._needs.pop(self._next)
            self._next += 1
            for old in [held for held in self._held if held < need]:
                self._drop(old)

    def clear(self) -> None:
        """Let go of everything."""
        for sequence in list(self._held):
            self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        _, let_go = self._held.pop(sequence)
        let_go()


class SentVersions:
    """Root: from which sent version the next one may be a difference. Whole versions are sent until one that left since
    the last refusal is confirmed."""

    def __init__(self) -> None:
        self._sent: dict[int, Held] = {}
        self._base = -1
        self._since = 0  # models before this one are no bases any more

    def base(self, next_sequence: int) -> tuple[int, Held] | None:
        """Sequence and version that every receiver holds; None: send a whole one."""
        if self._base < 0 or next_sequence - self._base > MAX_BACK:
            return None
        return self._base, self._sent[self._base]

    def sent(self, sequence: int, version: Held) -> None:
        """A version has left; it is kept until a newer one is confirmed."""
        self._sent[sequence] = version.share()

    def confirmed(self, sequence: int) -> None:
        """Every receiver has sealed it."""
        if sequence < max(self._since, self._base + 1):
            return
        self._base = sequence
        self._drop([old for old in self._sent if old < sequence])

    def refused(self, next_sequence: int) -> None:
        """Some receiver has refused a version: begin anew with a whole one."""
        self._since = next_sequence
        self._base = -1
        self._drop(list(self._sent))

    def clear(self) -> None:
        """A new plan, with sequences from 0."""
        self.refused(0)

    def _drop(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._sent.pop(sequence).release()

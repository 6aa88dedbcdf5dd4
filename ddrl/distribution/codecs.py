"""Codecs: how a piece of a model becomes fewer bytes on its way, and the piece again.

Pure transforms of one chunk at a time, called by `coding`; they know where float32 values stand, nothing of versions,
relays or MPI. `bf16` and `int8` give an acting copy, close to the model but not equal to it; `xor_zstd` gives the model
back bit for bit, and is shortest against another version. The same bytes decode to the same values on every machine.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import Any, Protocol

import numpy as np

from ddrl import _kernel
from ddrl.core.errors import ConfigError, MessageError, MissingExtraError
from ddrl.core.layouts import ALIGNMENT, ParameterLayout
from ddrl.distribution.shards import Bytes

LEVEL = 1  # of zstd: higher ones gain next to nothing on parameters (docs/codecs.md)


class Codec(Protocol):
    """A chunk of a model is its bytes [start, stop), both on 64-byte boundaries (the last may end anywhere)."""

    name: str
    lossless: bool
    uses_base: bool  # may take another version, so both ends must hold it
    fixed: bool  # always as long as `wire_bytes` says

    def wire_bytes(self, start: int, stop: int) -> int:
        """Most bytes that the chunk takes when coded."""
        ...

    def encode(self, out: Bytes, model: Bytes, base: Bytes | None, start: int, stop: int) -> int:
        """Code the chunk of `model` into `out`; bytes used. `base`: the same chunk of another version will be at hand
        for decoding."""
        ...

    def decode(self, model: Bytes, wire: Bytes, base: Bytes | None, start: int, stop: int) -> None:
        """Write the chunk into `model`. MessageError where `wire` is no coded chunk of that place."""
        ...


def make_codec(name: str, layout: ParameterLayout | None) -> Codec | None:
    """The codec of that name; None for "none". `layout` says where float32 values stand; xor_zstd needs none.

    ConfigError for another name or a missing layout, MissingExtraError for a missing package.
    """
    if name == "none":
        return None
    if name == "xor_zstd":
        return XorZstd()
    if name not in ("bf16", "int8"):
        raise ConfigError(f"cluster.codec ({name!r}) must be one of none, bf16, int8, xor_zstd")
    if layout is None:
        raise ConfigError(f"cluster.codec = {name} needs the manifest of the model's parameters: hand it to the relay")
    return Reduced(name, layout)


class Reduced:
    """bf16 or int8 for float32 tensors, every other byte as it is."""

    lossless = uses_base = False
    fixed = True

    def __init__(self, name: str, layout: ParameterLayout) -> None:
        self.name = name
        self._bf16 = name == "bf16"
        self._nbytes = layout.nbytes
        self._starts: list[int] = []  # of tensors, padding included; tensors tile the vector
        self._float: list[bool] = []
        for entry in layout.entries:
            if not entry.nbytes:
                continue
            self._starts.append(entry.offset)
            self._float.append(entry.dtype == "float32")
        self._stops = [*self._starts[1:], layout.nbytes]

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """(first byte, end, tensor, coded bytes) of the parts of a chunk that belong to one tensor each."""
        pieces: list[tuple[int, int, int, int]] = []
        place = max(0, bisect_right(self._starts, start) - 1)
        while start < stop:
            end = min(stop, self._stops[place])
            size = end - start
            if self._float[place]:
                size = size // 2 if self._bf16 else _kernel.int8_bytes((start - self._starts[place]) // 4, size // 4)
            pieces.append((start, end, place, size))
            start, place = end, place + 1
        return pieces

    def wire_bytes(self, start: int, stop: int) -> int:
        """Half (bf16), or a quarter and a scale for 256 values (int8)."""
        return sum(size for _, _, _, size in self._pieces(start, stop))

    def encode(self, out: Bytes, model: Bytes, base: Bytes | None, start: int, stop: int) -> int:
        """See Codec."""
        at = 0
        for first, end, place, size in self._pieces(start, stop):
            part, begin = out[at : at + size], self._starts[place]
            if not self._float[place]:
                part[:] = model[first:end]
            elif self._bf16:
                _kernel.encode_bf16(part, model[first:end])
            else:  # scales are those of whole blocks of the tensor, wherever the chunk begins and ends
                _kernel.encode_int8(part, model[begin : self._stops[place]], (first - begin) // 4, (end - first) // 4)
            at += size
        return at

    def decode(self, model: Bytes, wire: Bytes, base: Bytes | None, start: int, stop: int) -> None:
        """See Codec."""
        at = 0
        for first, end, place, size in self._pieces(start, stop):
            part = wire[at : at + size]
            if not self._float[place]:
                model[first:end] = part
            elif self._bf16:
                _kernel.decode_bf16(model[first:end], part)
            else:
                _kernel.decode_int8(model[first:end], part, (first - self._starts[place]) // 4)
            at += size


class XorZstd:
    """The chunk XOR the base's (or alone), as four byte planes, each compressed by itself or, where that gains nothing,
    as it is.

    Coded: four uint32 lengths of the planes (equal to a plane's own: not compressed), the planes from the lowest bytes
    to the highest, and up to three bytes that make no word."""

    name = "xor_zstd"
    lossless = uses_base = True
    fixed = False
    _HEAD = 16

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise MissingExtraError("zstandard", "codecs", "cluster.codec = xor_zstd") from None
        self._compress = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False, write_content_size=True).compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._error: type[Exception] = zstandard.ZstdError
        self._planes = np.empty(0, np.uint8)

    def wire_bytes(self, start: int, stop: int) -> int:
        """The chunk itself and four lengths."""
        return stop - start + self._HEAD if stop > start else 0

    def _scratch(self, nbytes: int) -> Bytes:
        if len(self._planes) < nbytes:
            self._planes = np.empty(nbytes, np.uint8)
        return self._planes[:nbytes]

    def encode(self, out: Bytes, model: Bytes, base: Bytes | None, start: int, stop: int) -> int:
        """See Codec."""
        if stop <= start:
            return 0
        planes = self._scratch(stop - start)
        _kernel.split_planes(planes, model[start:stop], None if base is None else base[start:stop])
        words = (stop - start) // 4
        lengths, at = out[: self._HEAD].view(np.uint32), self._HEAD
        for plane in range(4):
            data = planes[plane * words : (plane + 1) * words]
            coded = np.frombuffer(self._compress(data), np.uint8) if words else data  # type: ignore[arg-type]
            if len(coded) >= words:
                coded = data
            out[at : at + len(coded)] = coded
            lengths[plane] = len(coded)
            at += len(coded)
        rest = planes[4 * words :]
        out[at : at + len(rest)] = rest
        return at + len(rest)

    def decode(self, model: Bytes, wire: Bytes, base: Bytes | None, start: int, stop: int) -> None:
        """See Codec."""
        if stop <= start:
            return
        words, planes, at = (stop - start) // 4, self._scratch(stop - start), self._HEAD
        lengths: list[int] = np.frombuffer(wire[: self._HEAD].tobytes(), np.uint32).tolist()
        rest = stop - start - 4 * words
        if len(wire) < self._HEAD or self._HEAD + sum(lengths) + rest != len(wire) or max(lengths, default=0) > words:
            raise MessageError(
                f"{len(wire)} bytes are no coded form of bytes {start}..{stop}: their planes have {lengths} bytes"
            )
        for plane, length in enumerate(lengths):
            coded, target = wire[at : at + length], planes[plane * words : (plane + 1) * words]
            if length < words:
                target[:] = self._expand(coded, words)
            else:
                target[:] = coded
            at += length
        planes[4 * words :] = wire[at:]
        _kernel.join_planes(model[start:stop], planes, None if base is None else base[start:stop])

    def _expand(self, coded: Any, words: int) -> Bytes:
        try:
            data = self._decompress(coded, max_output_size=words)
        except self._error as error:
            raise MessageError(f"a compressed plane of {len(coded)} bytes cannot be read: {error}") from None
        if len(data) != words:
            raise MessageError(f"a compressed plane of {len(coded)} bytes gave {len(data)} bytes, not {words}")
        return np.frombuffer(data, np.uint8)


def wire_edges(codec: Codec, bounds: list[int]) -> list[int]:
    """Where the coded chunks of a model cut at `bounds` [K + 1] stand in memory, [K + 1]: at 64-byte boundaries unless
    the size is fixed."""
    edges = [0]
    for start, stop in itertools.pairwise(bounds):
        size = codec.wire_bytes(start, stop)
        edges.append(edges[-1] + (size if codec.fixed else -(-size // ALIGNMENT) * ALIGNMENT))
    return edges

"""Codecs: how a chunk of a model is encoded in fewer bytes, and decoded.

A codec is a plug-in (`core.plugins`): a class of this module, or package.module:Class from outside, named by
cluster.codec; its settings are the table [cluster.NAME]. It encodes one chunk at a time for `chunks`; it knows where
float32 values are, and nothing of versions, relays or MPI. The same bytes decode to the same values on every machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from ddrl import _kernel
from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, MessageError, MissingExtraError
from ddrl.core.rows import ParameterLayout
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Bytes

PACKAGE = "ddrl.distribution.codecs"
SETTING = "cluster.codec"


class Codec(Protocol):
    """A chunk of a model is its bytes [start, stop), both on 64-byte boundaries (the last may end anywhere)."""

    name: ClassVar[str]
    lossless: ClassVar[bool]  # restores the model bit for bit
    uses_base: ClassVar[bool]  # may encode a difference from another version, which both ends must hold
    fixed: ClassVar[bool]  # a coded chunk is always `wire_bytes` long

    @classmethod
    def check(cls) -> None:
        """Raise MissingExtraError where a package that it needs is not installed."""

    @classmethod
    def make(cls, layout: ParameterLayout | None, settings: Any) -> Self | None:
        """A codec for models of this manifest (ConfigError where it needs one and there is none); None where models
        travel as they are. `settings`: its checked table, None where it has none."""
        ...

    def wire_bytes(self, start: int, stop: int) -> int:
        """Most bytes of the coded chunk."""
        ...

    def encode(self, out: Bytes, model: Bytes, base: Bytes | None, start: int, stop: int) -> int:
        """Code the chunk of `model` into `out`; bytes used. `base`: another version, which the receiver holds too."""
        ...

    def decode(self, model: Bytes, wire: Bytes, base: Bytes | None, start: int, stop: int) -> None:
        """Write the chunk into `model`. MessageError where `wire` is no coded chunk of that place."""
        ...


def load_codec(name: str) -> type[Codec]:
    """The codec that cluster.codec names; ConfigError where there is none."""
    return plugins.load(SETTING, PACKAGE, name)


def make_codec(config: Config, layout: ParameterLayout | None) -> Codec | None:
    """The codec of the settings; None where models travel as they are. `layout` gives the places of float32 values."""
    codec = load_codec(config.cluster.codec)
    return codec.make(layout, plugin_settings(config, "cluster", codec))


class Plain:
    """No codec: models travel as they are, straight out of and into mailbox slots."""

    name = "none"
    lossless = fixed = True
    uses_base = False

    @classmethod
    def check(cls) -> None:
        """Needs nothing."""

    @classmethod
    def make(cls, layout: ParameterLayout | None, settings: Any) -> None:
        """No codec."""


class Part(NamedTuple):
    """Bytes [start, stop) of a model, all of one tensor, whose bytes are [begin, end)."""

    start: int
    stop: int
    begin: int
    end: int


class FloatCodec(Codec, ABC):
    """Rounds float32 tensors, every other byte travels as it is. A subclass codes a part of one tensor."""

    lossless = uses_base = False
    fixed = True

    def __init__(self, layout: ParameterLayout) -> None:
        entries = [entry for entry in layout.entries if entry.nbytes]
        self._starts = [entry.offset for entry in entries]  # of tensors, padding included; tensors tile the vector
        self._float = [entry.dtype == "float32" for entry in entries]
        self._stops = [*self._starts[1:], layout.nbytes]

    @classmethod
    def make(cls, layout: ParameterLayout | None, settings: Any) -> Self:
        """ConfigError without a manifest."""
        if layout is None:
            raise ConfigError(
                f"{SETTING} = {cls.name} needs the manifest of the model's parameters: hand it to the relay"
            )
        return cls(layout)

    @abstractmethod
    def part_bytes(self, part: Part) -> int:
        """Coded bytes of a part."""

    @abstractmethod
    def encode_part(self, out: Bytes, model: Bytes, part: Part) -> None:
        """Code a part of the model into `out`."""

    @abstractmethod
    def decode_part(self, model: Bytes, wire: Bytes, part: Part) -> None:
        """Write a part into the model."""

    def _parts(self, start: int, stop: int) -> list[tuple[Part, bool, int]]:
        """(part, whether it is float32, coded bytes) of a chunk."""
        parts: list[tuple[Part, bool, int]] = []
        place = max(0, bisect_right(self._starts, start) - 1)
        while start < stop:
            end = min(stop, self._stops[place])
            part = Part(start, end, self._starts[place], self._stops[place])
            parts.append((part, self._float[place], self.part_bytes(part) if self._float[place] else end - start))
            start = end
            place += 1
        return parts

    def wire_bytes(self, start: int, stop: int) -> int:
        """Sum of the coded parts."""
        return sum(size for _, _, size in self._parts(start, stop))

    def encode(self, out: Bytes, model: Bytes, base: Bytes | None, start: int, stop: int) -> int:
        """Part by part; `base` is not used."""
        at = 0
        for part, is_float, size in self._parts(start, stop):
            if is_float:
                self.encode_part(out[at : at + size], model, part)
            else:
                out[at : at + size] = model[part.start : part.stop]
            at += size
        return at

    def decode(self, model: Bytes, wire: Bytes, base: Bytes | None, start: int, stop: int) -> None:
        """Part by part; `base` is not used."""
        at = 0
        for part, is_float, size in self._parts(start, stop):
            if is_float:
                self.decode_part(model, wire[at : at + size], part)
            else:
                model[part.start : part.stop] = wire[at : at + size]
            at += size


class Bf16(FloatCodec):
    """Values rounded to the nearest even bfloat16, 8 significant bits: 2 bytes a parameter."""

    name = "bf16"

    def part_bytes(self, part: Part) -> int:
        """Half."""
        return (part.stop - part.start) // 2

    def encode_part(self, out: Bytes, model: Bytes, part: Part) -> None:
        """Round."""
        _kernel.encode_bf16(out, model[part.start : part.stop])

    def decode_part(self, model: Bytes, wire: Bytes, part: Part) -> None:
        """Widen."""
        _kernel.decode_bf16(model[part.start : part.stop], wire)


class Int8(FloatCodec):
    """Values as multiples of a scale shared by each block of 256: 1 byte a parameter. Scales are those of whole blocks
    of the tensor, wherever a chunk begins and ends."""

    name = "int8"

    def part_bytes(self, part: Part) -> int:
        """A quarter, and the scales of the blocks that the part touches."""
        return _kernel.int8_bytes((part.start - part.begin) // 4, (part.stop - part.start) // 4)

    def encode_part(self, out: Bytes, model: Bytes, part: Part) -> None:
        """Scales, then multiples."""
        tensor = model[part.begin : part.end]
        _kernel.encode_int8(out, tensor, (part.start - part.begin) // 4, (part.stop - part.start) // 4)

    def decode_part(self, model: Bytes, wire: Bytes, part: Part) -> None:
        """Multiples times scales."""
        _kernel.decode_int8(model[part.start : part.stop], wire, (part.start - part.begin) // 4)


class XorZstd:
    """The difference from another version, compressed: the model bit for bit.

    The chunk XOR the base's (or alone) as four byte planes, each compressed by itself or, where that gains nothing, as
    it is. Coded: four uint32 lengths of the planes (equal to a plane's own: not compressed), the planes from the lowest
    bytes to the highest, and up to three bytes that make no word."""

    name = "xor_zstd"
    lossless = uses_base = True
    fixed = False
    _HEAD = 16  # bytes of the four lengths
    _LEVEL = 1  # of zstd; higher ones save next to nothing on parameters

    @classmethod
    def check(cls) -> None:
        """MissingExtraError without zstandard."""
        if find_spec("zstandard") is None:
            raise MissingExtraError("zstandard", "codecs", "cluster.codec = xor_zstd")

    @classmethod
    def make(cls, layout: ParameterLayout | None, settings: Any) -> XorZstd:
        """Needs no manifest."""
        return cls()

    def __init__(self) -> None:
        self.check()
        import zstandard

        self._compress = zstandard.ZstdCompressor(
            level=self._LEVEL, write_checksum=False, write_content_size=True
        ).compress
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
        """Split into planes, compress each."""
        if stop <= start:
            return 0
        planes = self._scratch(stop - start)
        _kernel.split_planes(planes, model[start:stop], None if base is None else base[start:stop])
        words = (stop - start) // 4
        lengths = out[: self._HEAD].view(np.uint32)
        at = self._HEAD
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
        """Expand each plane, join them."""
        if stop <= start:
            return
        words = (stop - start) // 4
        rest = stop - start - 4 * words
        planes = self._scratch(stop - start)
        lengths: list[int] = np.frombuffer(wire[: self._HEAD].tobytes(), np.uint32).tolist()
        if len(wire) < self._HEAD or self._HEAD + sum(lengths) + rest != len(wire) or max(lengths, default=0) > words:
            raise MessageError(
                f"{len(wire)} bytes are no coded form of bytes {start}..{stop}: their planes have {lengths} bytes"
            )
        at = self._HEAD
        for plane, length in enumerate(lengths):
            coded = wire[at : at + length]
            planes[plane * words : (plane + 1) * words] = self._expand(coded, words) if length < words else coded
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

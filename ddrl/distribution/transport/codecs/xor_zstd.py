"""The difference from another version, compressed: the model bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from ddrl import _kernel
from ddrl.core.config import setting
from ddrl.core.errors import MessageError, MissingExtraError
from ddrl.core.rows import ParameterLayout
from ddrl.distribution.chunks import Bytes


class XorZstd:
    """The chunk XOR the base's (or alone), as four byte planes, each compressed by itself or, where that gains nothing,
    as it is.

    Coded: four uint32 lengths of the planes (equal to a plane's own: not compressed), the planes from the lowest bytes
    to the highest, and up to three bytes that make no word."""

    name = "xor_zstd"
    lossless = uses_base = True
    fixed = False
    _HEAD = 16

    @dataclass(frozen=True)
    class Settings:
        """[cluster.xor_zstd]."""

        level: int = setting(1, "", "Level of zstd; higher ones gain next to nothing on parameters.", ge=1, le=19)

    @classmethod
    def check(cls) -> None:
        """See Codec."""
        if find_spec("zstandard") is None:
            raise MissingExtraError("zstandard", "codecs", "cluster.codec = xor_zstd")

    @classmethod
    def make(cls, layout: ParameterLayout | None, settings: Settings) -> XorZstd:
        """See Codec; needs no manifest."""
        return cls(settings.level)

    def __init__(self, level: int = 1) -> None:
        self.check()
        import zstandard

        self._compress = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True).compress
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
        """See Codec."""
        if stop <= start:
            return
        words = (stop - start) // 4
        planes = self._scratch(stop - start)
        at = self._HEAD
        lengths: list[int] = np.frombuffer(wire[: self._HEAD].tobytes(), np.uint32).tolist()
        rest = stop - start - 4 * words
        if len(wire) < self._HEAD or self._HEAD + sum(lengths) + rest != len(wire) or max(lengths, default=0) > words:
            raise MessageError(
                f"{len(wire)} bytes are no coded form of bytes {start}..{stop}: their planes have {lengths} bytes"
            )
        for plane, length in enumerate(lengths):
            coded = wire[at : at + length]
            target = planes[plane * words : (plane + 1) * words]
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

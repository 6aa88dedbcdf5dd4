"""What codecs of rounded float32 values share: which parts of a chunk belong to which tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import Any, ClassVar, NamedTuple, Self

from ddrl.core.rows import ParameterLayout
from ddrl.distribution.chunks import Bytes
from ddrl.distribution.transport.codec import require_layout


class Part(NamedTuple):
    """Bytes [start, stop) of a model, all of one float32 tensor, which stands at [begin, end)."""

    start: int
    stop: int
    begin: int
    end: int


class FloatCodec(ABC):
    """Rounds float32 tensors, every other byte travels as it is. A subclass codes a part of one tensor."""

    name: ClassVar[str]
    lossless = uses_base = False
    fixed = True

    def __init__(self, layout: ParameterLayout) -> None:
        entries = [entry for entry in layout.entries if entry.nbytes]
        self._starts = [entry.offset for entry in entries]  # of tensors, padding included; tensors tile the vector
        self._float = [entry.dtype == "float32" for entry in entries]
        self._stops = [*self._starts[1:], layout.nbytes]

    @classmethod
    def check(cls) -> None:
        """See Codec; the kernel has all that is needed."""
        return

    @classmethod
    def make(cls, layout: ParameterLayout | None, settings: Any) -> Self:
        """See Codec."""
        return cls(require_layout(cls.name, layout))

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
            place = place + 1
        return parts

    def wire_bytes(self, start: int, stop: int) -> int:
        """See Codec."""
        return sum(size for _, _, size in self._parts(start, stop))

    def encode(self, out: Bytes, model: Bytes, base: Bytes | None, start: int, stop: int) -> int:
        """See Codec."""
        at = 0
        for part, is_float, size in self._parts(start, stop):
            if is_float:
                self.encode_part(out[at : at + size], model, part)
            else:
                out[at : at + size] = model[part.start : part.stop]
            at += size
        return at

    def decode(self, model: Bytes, wire: Bytes, base: Bytes | None, start: int, stop: int) -> None:
        """See Codec."""
        at = 0
        for part, is_float, size in self._parts(start, stop):
            if is_float:
                self.decode_part(model, wire[at : at + size], part)
            else:
                model[part.start : part.stop] = wire[at : at + size]
            at += size

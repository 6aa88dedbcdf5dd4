"""Values as multiples of a scale that each block of 256 shares: 1 byte a parameter."""

from __future__ import annotations

from ddrl import _kernel
from ddrl.distribution.chunks import Bytes
from ddrl.distribution.transport.floats import FloatCodec, Part


class Int8(FloatCodec):
    """Scales are those of whole blocks of the tensor, wherever a chunk begins and ends."""

    name = "int8"

    def part_bytes(self, part: Part) -> int:
        """A quarter, and the scales of the blocks that begin or go on there."""
        return _kernel.int8_bytes((part.start - part.begin) // 4, (part.stop - part.start) // 4)

    def encode_part(self, out: Bytes, model: Bytes, part: Part) -> None:
        """See FloatCodec."""
        tensor = model[part.begin : part.end]
        _kernel.encode_int8(out, tensor, (part.start - part.begin) // 4, (part.stop - part.start) // 4)

    def decode_part(self, model: Bytes, wire: Bytes, part: Part) -> None:
        """See FloatCodec."""
        _kernel.decode_int8(model[part.start : part.stop], wire, (part.start - part.begin) // 4)

"""Values rounded to 8 significant bits: 2 bytes a parameter."""

from __future__ import annotations

from ddrl import _kernel
from ddrl.distribution.chunks import Bytes
from ddrl.distribution.transport.floats import FloatCodec, Part


class Bf16(FloatCodec):
    """float32 to the nearest even bfloat16."""

    name = "bf16"

    def part_bytes(self, part: Part) -> int:
        """Half."""
        return (part.stop - part.start) // 2

    def encode_part(self, out: Bytes, model: Bytes, part: Part) -> None:
        """See FloatCodec."""
        _kernel.encode_bf16(out, model[part.start : part.stop])

    def decode_part(self, model: Bytes, wire: Bytes, part: Part) -> None:
        """See FloatCodec."""
        _kernel.decode_bf16(model[part.start : part.stop], wire)

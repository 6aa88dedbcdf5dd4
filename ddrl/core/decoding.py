"""Bytes that come from outside, a message or a file, become values here: whatever they hold, they can at most be
refused, in one line of bounded length."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from ddrl.core.errors import DdrlError, shortened

T = TypeVar("T")

# What a parser raises for damaged data. Invalid UTF-8 and numbers out of range are ValueErrors, deep nesting is a
# RecursionError.
DAMAGE = (msgspec.MsgspecError, ValueError, RecursionError)


def decode(
    data: bytes, kind: type[T] | msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], error: type[DdrlError], what: str
) -> T:
    """`data` as a value of `kind`, in JSON where that is a type; `error`, whose words begin with `what`, for anything
    else."""
    try:
        decodes = isinstance(kind, (msgspec.json.Decoder, msgspec.msgpack.Decoder))
        return kind.decode(data) if decodes else msgspec.json.decode(data, type=kind)
    except DAMAGE as damage:
        raise error(f"{what} ({shortened(damage)})") from None


def read_json(path: Path, kind: type[T], error: type[DdrlError], what: str) -> T:
    """The value that the file `path` holds; `error`, whose words begin with `what`, also where it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as trouble:
        raise error(f"{what} ({trouble.strerror or trouble})") from None
    return decode(data, kind, error, what)

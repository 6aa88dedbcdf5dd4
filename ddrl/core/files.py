"""Files written whole, and bytes from outside read strictly.

A reader of a file sees the old one or the new one; a full disk or a kill leaves the old one. Bytes of a message or a
file become values by `decode`: whatever they hold, they can at most be refused, in one line of bounded length.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from ddrl.core.errors import DdrlError, shortened


@contextmanager
def replacement(path: Path, *, mode: int = 0o644, sync: bool = True) -> Generator[Path]:
    """A new file beside `path`, to be written inside the `with`; it then replaces `path`, or is removed after an error.

    `mode`: its permissions. `sync`: the data reach the disk before the name does; without it a power cut may leave an
    empty file. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        yield temporary
        if sync:
            os.fsync(handle)
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, sync: bool = True) -> None:
    """Replace the file by `data`; otherwise as `replacement`."""
    with replacement(path, mode=mode, sync=sync) as temporary:
        temporary.write_bytes(data)


# ---- Bytes from outside ----


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file, or of one that a link names. ValueError for anything else (a fifo would wait for a
    writer) and for more than `max_bytes`; OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise ValueError(f"it is longer than {max_bytes >> 20} MiB")
    return data


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

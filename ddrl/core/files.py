"""The one reader and the one writer of files that a run directory, or another folder from outside, holds.

Read is a regular file of bounded length, or one that a link names; never a fifo, which would wait for a writer, or a
device. Written is a new file that takes the old one's name, so that a reader sees the old one or the new one, a full
disk or a kill leaves the old one, and a link is replaced and never written through; or lines are appended to a regular
file that is no link, and that no other name shares. Modes are the umask's; of secrets 0600. Bytes become values by
`decode`: whatever they hold, they can at most be refused, in one line of bounded length.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ddrl.core.errors import DdrlError, RunDirError, shortened

MAX_STATUS = 1 << 16  # [B] of a status, an address, a key
MAX_DOCUMENT = 16 << 20  # [B] of settings, a manifest, a summary
MAX_GRAPH = 256 << 20  # [B] of an ONNX graph, whose parameters are apart
MAX_ARRAYS = 1 << 32  # [B] of parameters and other arrays
MAX_HEADER = 1 << 20  # [B] of names and shapes in a file of tensors, which take 30 times as much to decode
MAX_NAME = 400  # letters of a name in a document
MAX_DEPTH = 64  # of values in values
MAX_HOLES = 100  # times the data of a file
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def opened(path: Path) -> Generator[BufferedReader]:
    """A regular file, or one that a link names, to be read; OSError, also for anything else."""
    descriptor = os.open(path, _READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        if _is_hollow(descriptor, status):
            raise OSError(errno.EFBIG, "it is far longer than what it holds", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _is_hollow(descriptor: int, status: os.stat_result) -> bool:
    """Whether almost all of a file is a hole, which takes no disk but as much memory and time as data."""
    if status.st_size <= MAX_DOCUMENT + MAX_HOLES * 512 * status.st_blocks:
        return False
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)  # the end, where the file system counts no blocks
    os.lseek(descriptor, 0, os.SEEK_SET)
    return hole < status.st_size


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file as `opened` opens it; OSError also for more than `max_bytes`."""
    with opened(path) as file:
        length = os.fstat(file.fileno()).st_size
        data = b"" if length > max_bytes else file.read(length + 1)  # asked for `max_bytes`, so much would be reserved
        if len(data) > length:  # it grows
            data += file.read(max_bytes + 1 - len(data))
    if max(len(data), length) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes / (1 << 20):g} MiB", str(path))
    return data


def load_tensors(source: bytes | Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The arrays of a safetensors file, and what it says of itself (nothing where its bytes are given); OSError where
    it is no file that `opened` opens, ValueError where it is damaged."""
    try:
        if isinstance(source, bytes):
            _refuse_long_header(source[:8])
            return safetensors.numpy.load(source), {}
        with opened(source) as file:
            _refuse_long_header(file.read(8))
        found: Any = safe_open(source, "numpy")  # its methods have no types
        with found as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}, tensors.metadata() or {}  # noqa: SIM118
    except (SafetensorError, TypeError, KeyError, AttributeError) as error:  # the last three: dtypes that numpy lacks
        raise ValueError(str(error)) from None


def _refuse_long_header(length: bytes) -> None:
    if int.from_bytes(length, "little") > MAX_HEADER:
        raise ValueError(f"its names and shapes are said to take more than {MAX_HEADER >> 20} MiB")


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log, as `opened` opens it; at most MAX_STATUS bytes of it are read."""
    with opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_STATUS))
        return file.read(MAX_STATUS).decode(errors="replace").splitlines()[-count:]


def digest_of_file(path: Path) -> str:
    """Of the bytes of a file as `opened` opens it."""
    with opened(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@contextmanager
def replacement(path: Path, *, secret: bool = False, sync: bool = True) -> Generator[Path]:
    """A new file beside `path`, to be written inside the `with`; it then replaces `path`, or is removed after an error.

    `secret`: readable by its owner alone. `sync`: the data reach the disk before the name does; without it a power cut
    may leave an empty file. Raises OSError, also where `path` is a device, a fifo or a folder."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    temporary = path.with_name(f".{path.name.removeprefix('.')}.{secrets.token_hex(4)}")
    handle = os.open(temporary, _NEW, 0o600 if secret else 0o666)
    try:
        yield temporary
        if sync:
            os.fsync(handle)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # an interrupt may come once it has its name
        raise
    finally:
        os.close(handle)


@contextmanager
def new_file(path: Path) -> Generator[BinaryIO]:
    """As `replacement`, open to be written."""
    with replacement(path) as temporary, temporary.open("wb") as file:
        yield file


def write_atomically(path: Path, data: bytes, *, secret: bool = False, sync: bool = True) -> None:
    """Replace the file by `data`; otherwise as `replacement`."""
    with replacement(path, secret=secret, sync=sync) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file atomically; values JSON does not know are refused."""
    write_atomically(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def unshare(path: Path) -> None:
    """Before a file is changed in place: where other names share it (hard links), `path` becomes a copy, of the same
    mode, and they keep the file as it is. OSError where it cannot be copied; what is no regular file stays."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            with opened(path) as file, replacement(path, secret=True) as temporary, temporary.open("wb") as copy:
                shutil.copyfileobj(file, copy)
                os.fchmod(copy.fileno(), status.st_mode & 0o777)


def open_to_append(path: Path) -> BinaryIO:
    """A log: each `write` goes to its end, at once. OSError, also where it is a link, a fifo or a device; a hard link
    becomes a file of its own."""
    unshare(path)
    descriptor = os.open(path, _APPEND, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return open(descriptor, "ab", buffering=0)


def sync(path: Path) -> None:
    """Wait until a file's data, or a folder's names, are on the disk."""
    descriptor = os.open(path, _READ)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_links(folders: Iterable[Path]) -> None:
    """Raise RunDirError where a folder of a run directory is a link, through which another one would be written."""
    for folder in folders:
        if os.path.islink(folder) or (os.path.exists(folder) and not os.path.isdir(folder)):
            raise RunDirError(
                f"{folder} is not a folder but a link or a file: nothing is written through it; put the folder that it "
                "names in its place, or remove it"
            )


def is_full_disk(error: BaseException | None) -> bool:
    """Whether a disk, or a quota, without room is what is behind an error."""
    while error is not None and not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        error = error.__cause__ or error.__context__
    return error is not None


def refuse_odd_files(paths: Iterable[Path]) -> None:
    """Raise RunDirError where what is to be written is there as a folder, a device or a fifo."""
    for path in paths:
        if os.path.exists(path) and not os.path.isfile(path):  # no error where this user may not look
            raise RunDirError(f"{path} is no file, and could not be written: remove it")


T = TypeVar("T")

# What a parser raises for damaged data. Invalid UTF-8 and numbers out of range are ValueErrors, deep nesting is a
# RecursionError.
DAMAGE = (msgspec.MsgspecError, ValueError, RecursionError)


def _values(value: Any) -> Iterable[Any]:
    kind: Any = value.__class__
    return value.values() if kind is dict else value if kind is list else ()


def refuse_deep(tree: Any) -> None:
    """ValueError where values are in values, in lists and tables, so deeply that who walks them by recursion fails."""
    level: list[Any] = [tree]
    depth = 0
    while level and depth < MAX_DEPTH:
        level = [inner for value in level for inner in _values(value)]
        depth += 1
    if level:
        raise ValueError(f"its values are in one another more than {MAX_DEPTH} deep")


def decode(
    data: bytes, kind: type[T] | msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], error: type[DdrlError], what: str
) -> T:
    """`data` as a value of `kind`, in JSON where that is a type; `error`, whose words begin with `what`, for anything
    else."""
    try:
        if isinstance(kind, (msgspec.json.Decoder, msgspec.msgpack.Decoder)):
            return kind.decode(data)
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
            refuse_deep(msgspec.json.decode(data))
        return msgspec.json.decode(data, type=kind)
    except DAMAGE as damage:
        raise error(f"{what} ({shortened(damage)})") from None


def read_json(path: Path, kind: type[T], error: type[DdrlError], what: str) -> T:
    """The value that the file `path` holds; `error`, whose words begin with `what`, also where it cannot be read."""
    try:
        data = read_regular(path, MAX_DOCUMENT)
    except OSError as trouble:
        raise error(f"{what} ({trouble.strerror or trouble})") from None
    return decode(data, kind, error, what)

"""Named shared memory of one host, with a header that names its owner.

A segment is a file in /dev/shm: one header page (magic, layout version, kind, payload size, owner's process id and
start time), then the payload. It appears under its name only when it is complete, all its pages are reserved before
they are used (so no access can fail later), and it outlives its owner at most until the next `sweep_dead`, which
every start of ddrl calls. Without a name the same memory is private to the process and its forks: one code path for
--serial, tests and shared runs."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from ddrl import _kernel
from ddrl.core.errors import ChannelError
from ddrl.core.specs import Bytes

SHM = Path("/dev/shm")
PREFIX = "ddrl-"
LAYOUT_VERSION = 2
HEADER_NBYTES = 4096
POISON = 0xA5

_MAGIC = b"ddrl.shm"
_HEADER = struct.Struct("<8sI16sQIQQ")  # magic, layout version, kind, payload bytes, owner pid, start time, namespace


def segment_name(run_id: str, host: int, kind: str, index: int = 0) -> str:
    """Name of a segment of a run: every process of the host makes the same one."""
    return f"{PREFIX}{run_id}-h{host}-{kind}-{index}"


def start_time(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 where no such process lives. With the pid it names a process
    for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def namespace() -> int:
    """Which process ids this process's are: containers can share /dev/shm, but not process ids. 0 where unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def is_alive(pid: int, started: int) -> bool:
    """Whether the process (pid, start time) still runs; a zombie does not."""
    return pid != 0 and start_time(pid) == started


class Segment:
    """One mapped segment; `array` is the payload, uint8 [nbytes], 64-byte aligned."""

    def __init__(self, name: str | None, kind: str, memory: Bytes) -> None:
        self.name = name
        self.kind = kind
        self.nbytes = memory.nbytes - HEADER_NBYTES
        self._memory: Bytes | None = memory

    @classmethod
    def create(
        cls, name: str | None, kind: str, nbytes: int, initialize: Callable[[Bytes], object] | None = None
    ) -> Segment:
        """Make a segment of `nbytes` of payload, poisoned; `initialize(array)` runs before others can attach.

        A segment of that name left by a dead process is replaced; one of a living process is a ChannelError, and so is
        a payload that does not fit in /dev/shm. Without a name (None) the memory is private."""
        if nbytes < 1 or len(kind.encode()) > 16:
            raise ValueError(
                f"segment {name}: {nbytes} bytes of kind {kind!r} is no segment (at least 1 byte, kind at most 16 "
                "letters)"
            )
        _need_linux()
        if name is None:
            segment = cls(None, kind, _kernel.map_memory(-1, HEADER_NBYTES + nbytes))
            segment._fill(initialize)
            return segment
        if not name.startswith(PREFIX) or "/" in name or "~" in name:
            raise ValueError(f"segment {name!r}: names begin with {PREFIX!r} and hold neither '/' nor '~'")
        # Named so that `sweep_dead` can remove it, should this process die here.
        draft = SHM / f"{name}~{os.getpid()}~{start_time(os.getpid())}~{namespace()}"
        try:
            draft.unlink(missing_ok=True)
            segment = cls(name, kind, _map_new(draft, name, HEADER_NBYTES + nbytes))
            segment._fill(initialize)
            _give_name(draft, name)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR):
                raise
            remedy = "let this user write there" if SHM.is_dir() else "mount it (mount -t tmpfs none /dev/shm)"
            raise ChannelError(f"shared memory {name} cannot be made ({SHM}: {error.strerror}): {remedy}") from None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        return segment

    @classmethod
    def attach(cls, name: str, kind: str) -> Segment:
        """Map an existing segment. ChannelError where it is missing, foreign, of another kind or layout version, or cut
        short."""
        _need_linux()
        try:
            descriptor = os.open(SHM / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise ChannelError(
                f"shared memory {name} does not exist on this machine: its owner has ended or has not started; "
                "start the run anew"
            ) from None
        except OSError as error:
            raise ChannelError(
                f"shared memory {name} cannot be opened ({error.strerror}): it belongs to another user or is no file "
                f"of ddrl; remove {SHM / name}"
            ) from None
        try:
            status = os.fstat(descriptor)
            size = status.st_size
            header = _parse(os.pread(descriptor, _HEADER.size, 0)) if stat.S_ISREG(status.st_mode) else None
            if header is None or size < HEADER_NBYTES:
                raise ChannelError(
                    f"shared memory {name} was not written by ddrl: remove {SHM / name} or choose another run"
                )
            version, found, nbytes, *_ = header
            if version != LAYOUT_VERSION:
                raise ChannelError(
                    f"shared memory {name} has layout version {version}, this ddrl speaks {LAYOUT_VERSION}: "
                    "run the same ddrl in all processes"
                )
            if found != kind:
                raise ChannelError(
                    f"shared memory {name} is a {found}, not a {kind}: two channels of the run share a name"
                )
            if size != HEADER_NBYTES + nbytes:
                raise ChannelError(
                    f"shared memory {name} has {size} bytes where its header says {HEADER_NBYTES + nbytes}: "
                    f"it is corrupt; remove {SHM / name}"
                )
            return cls(name, kind, _kernel.map_memory(descriptor, size))
        finally:
            os.close(descriptor)

    @property
    def array(self) -> Bytes:
        """The payload, uint8 [nbytes]."""
        return self._mapped[HEADER_NBYTES:]

    @property
    def owner(self) -> tuple[int, int]:
        """Process id and start time of the process that made it."""
        header = _parse(self._mapped[: _HEADER.size].tobytes())
        assert header is not None
        return header[3], header[4]

    def close(self) -> None:
        """Drop it in this process; it is unmapped with the last view of it."""
        self._memory = None

    @property
    def _mapped(self) -> Bytes:
        if self._memory is None:
            raise ChannelError(f"shared memory {self.name} was closed in this process")
        return self._memory

    def unlink(self) -> None:
        """Remove the name; the memory goes when the last process has unmapped it. A name already gone is no error."""
        if self.name is not None:
            (SHM / self.name).unlink(missing_ok=True)

    def _fill(self, initialize: Callable[[Bytes], object] | None) -> None:
        self.array.fill(POISON)
        if initialize is not None:
            initialize(self.array)
        header = _header(self.kind, self.nbytes)
        self._mapped[: len(header)] = np.frombuffer(header, np.uint8)


class Channel:
    """What channels share that are each one segment of their `kind`."""

    kind: ClassVar[str]

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    @classmethod
    def attach(cls, name: str) -> Self:
        """Map an existing one; ChannelError as `Segment.attach`."""
        return cls(Segment.attach(name, cls.kind))

    def unlink(self) -> None:
        """Remove its name."""
        self.segment.unlink()


def sweep_dead() -> list[str]:
    """Remove every segment of ddrl whose owner is dead, but for those of a run that has a living process yet: what a
    process left for its keeper is the keeper's to remove. Returns their names. Files of other programs, users and
    process id namespaces (containers) stay."""
    dead: list[Path] = []
    living_runs: set[str] = set()
    for path in _segments(""):
        owner = _owner(path)
        if owner is not None and is_alive(*owner):
            living_runs.add(_run_of(path))
        elif owner is not None:
            dead.append(path)
    swept: list[str] = []
    for path in dead:
        if _run_of(path) not in living_runs:
            with contextlib.suppress(OSError):
                path.unlink()
                swept.append(path.name)
    return sorted(swept)


def _run_of(path: Path) -> str:
    return path.name.removeprefix(PREFIX).partition("-h")[0]


def adopt_run(run_id: str, host: int) -> None:
    """Become the owner of the segments of a host of a run whose owners have died: no start of another run takes them
    for leftovers."""
    for path in _segments(f"{run_id}-h{host}-"):
        owner = _owner(path)
        if owner is None or is_alive(*owner):
            continue
        with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
            found = _parse(file.read(_HEADER.size))
            if found is not None:
                os.pwrite(file.fileno(), _header(found[1], found[2]), 0)


def unlink_run(run_id: str, host: int | None = None) -> list[str]:
    """Remove every segment of one run (of one of its hosts where that is given), also those of living owners; returns
    their names."""
    removed: list[str] = []
    for path in _segments(f"{run_id}-h" if host is None else f"{run_id}-h{host}-"):
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path.name)
    return sorted(removed)


def _segments(start: str) -> list[Path]:
    return [path for path in SHM.iterdir() if path.name.startswith(PREFIX + start)] if SHM.is_dir() else []


def _owner(path: Path) -> tuple[int, int] | None:
    """Who made the file; None where it is not ours to judge."""
    parts = path.name.split("~")
    if len(parts) == 4 and all(part.isdigit() for part in parts[1:]):
        return (int(parts[1]), int(parts[2])) if int(parts[3]) == namespace() else None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:  # a fifo of that name must not hang a start
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        header = _parse(os.pread(descriptor, _HEADER.size, 0)) if regular else None
    finally:
        os.close(descriptor)
    return None if header is None or header[5] != namespace() else (header[3], header[4])


def _header(kind: str, nbytes: int) -> bytes:
    """Of a segment that this process owns."""
    pid = os.getpid()
    return _HEADER.pack(_MAGIC, LAYOUT_VERSION, kind.encode(), nbytes, pid, start_time(pid), namespace())


def _parse(data: bytes) -> tuple[int, str, int, int, int, int] | None:
    """(layout version, kind, payload bytes, pid, start time, namespace); None where the magic is not ours."""
    if len(data) < _HEADER.size:
        return None
    magic, version, kind, *numbers = _HEADER.unpack(data)
    nbytes, pid, started, space = numbers
    if magic != _MAGIC:
        return None
    return version, kind.rstrip(b"\0").decode("ascii", "replace"), nbytes, pid, started, space


def _map_new(draft: Path, name: str, size: int) -> Bytes:
    """A fresh file of `size` bytes, every page of it reserved, mapped."""
    statistics = os.statvfs(SHM)
    free = statistics.f_bavail * statistics.f_frsize
    if size > free:
        raise _no_room(name, size, free)
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return _kernel.map_memory(descriptor, size)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ChannelError(
                f"shared memory {name} needs {size / 2**20:.1f} MiB, and this process may write no file of that size: "
                "raise `ulimit -f`"
            ) from None
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _no_room(name, size, os.statvfs(SHM).f_bavail * statistics.f_frsize) from None
        raise
    finally:
        os.close(descriptor)


def _no_room(name: str, size: int, free: int) -> ChannelError:
    return ChannelError(
        f"shared memory {name} needs {size / 2**20:.1f} MiB, {SHM} has {free / 2**20:.1f} MiB free: enlarge it (in a "
        "container: --shm-size), or lower channels.lane_rows or the number of rollouts"
    )


def _give_name(draft: Path, name: str) -> None:
    """Let the finished draft appear as `name`, without ever replacing what a living process owns."""
    path = SHM / name
    for _ in range(2):
        try:
            os.link(draft, path)
            return
        except FileExistsError:
            owner = _owner(path)
            if owner is not None and not is_alive(*owner):
                path.unlink(missing_ok=True)
    owner = _owner(path)
    whose = f"process {owner[0]} owns it" if owner else "it is not ours"
    raise ChannelError(f"shared memory {name} exists already ({whose}): end that run first, or remove {path}")


def _need_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise ChannelError(
            f"ddrl's shared memory needs Linux (/dev/shm and futex), this is {sys.platform}: run it on Linux or in a "
            "container"
        )

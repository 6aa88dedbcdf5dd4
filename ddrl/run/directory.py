"""The run directory: what a run leaves behind, and where each thing is.

    RUN/config.toml         the effective settings
    RUN/run.json            run id, ddrl version, ranks, when it began
    RUN/telemetry.sqlite    what was measured (ddrl.telemetry)
    RUN/checkpoints/<n>/    learner, replay and counters after n environment steps
    RUN/output/rank-N.txt   what the environments of rank N print, the newest MiB (on the trainer's host)
    RUN/policy.*            the best policy so far: ONNX model, manifest, parameters
    RUN/summary.json        written at the end
    RUN/lock                held by the process that the run belongs to (ddrl.run.directory)

Written by rank 0 alone, while it holds the lock; reading needs neither the lock nor a disk that can be written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import socket
import stat
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ddrl import __version__
from ddrl.core.config import Config
from ddrl.core.errors import CheckpointError, ConfigError, RunDirError, plain_line, plain_text, shortened
from ddrl.core.files import (
    MAX_DOCUMENT,
    is_full_disk,
    read_regular,
    refuse_links,
    refuse_odd_files,
    write_atomically,
    write_json,
)
from ddrl.core.settings import config_from_toml, config_to_toml, config_tree
from ddrl.telemetry.store import run_id_of

# -- lock --------------------------------------------------------------------------------------------------------------
# One run directory, one process: a lock that the kernel releases when its holder ends, however that happens.
#
# RUN/lock is locked by flock(2) and holds the holder's process id and host as text, for the message that others get.
# The
# file stays when the lock is released: a lock on a name that can be removed protects nothing. It holds between
# processes
# of one machine, containers included; on a network file system only as far as that one carries flock to its server.


NAME = "lock"
WRITABLE = "free some space, change its permissions, or resume a copy"
LONGEST_TEXT = 300  # [B] of the holder's id and host


class RunLock:
    """Held from its creation until `release`, or until the process and its copies have ended."""

    def __init__(self, run: Path, name: str = NAME) -> None:
        """Take the lock of the run directory; RunDirError where another process holds it or it cannot be written.

        `name`: another file to lock, for what is of one process but not the run itself."""
        try:
            self.folder = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            descriptor = _open_lock(self.folder, name)
        except OSError as error:
            raise RunDirError(
                f"the run directory {run} cannot be written ({error.strerror}): change its permissions, or copy it and "
                "resume the copy"
            ) from None
        self.descriptor: int | None = descriptor
        self._found = run
        if not os.path.exists(f"/proc/self/fd/{self.folder}"):  # by which a directory is written though it moves
            _close(descriptor, self.folder)
            raise RunDirError(f"the run directory {run} cannot be written: /proc is not what Linux has there; mount it")
        self.release = weakref.finalize(self, _close, descriptor, self.folder)  # once
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, LONGEST_TEXT, 0).decode(errors="replace").strip() or "another process"
            self.release()
            raise RunDirError(
                f"the run directory {run} is in use by {holder}: wait until that run has ended, or stop it; a run "
                "directory belongs to one run at a time"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            print(
                f"ddrl: the file system of {run} has no locks ({error.strerror}): take care that no other run uses it",
                file=sys.stderr,
                flush=True,
            )
        self.release.detach()
        before = os.pread(descriptor, LONGEST_TEXT, 0)
        self.release = weakref.finalize(self, _release, descriptor, before, self.folder)
        _sign(descriptor)

    @classmethod
    def adopt(cls, descriptor: int, run: Path) -> RunLock:
        """A lock that another process has taken and shared: it holds until both have released it. `run`: where its
        directory was then."""
        lock = cls.__new__(cls)
        lock.descriptor = descriptor
        held = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # follows a directory that has moved
        lock._found = held.parent if held.name == NAME else run
        lock.folder = os.open(lock._found, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock.release = weakref.finalize(lock, _close, descriptor, lock.folder)
        return lock

    def find(self, path: Path) -> Path | None:
        """Where the directory is now: `path` as long as that is it; None where it was removed."""
        if not self.release.alive:
            return self._found
        own = os.fstat(self.folder)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), own):
                self._found = path
                return path
        if own.st_nlink == 0:
            return None
        self._found = Path(os.readlink(f"/proc/self/fd/{self.folder}"))
        return self._found

    def check(self) -> str:
        """Take the lock anew where its file was removed: "removed". Where that cannot be, why; else "held"."""
        assert self.descriptor is not None
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(NAME, dir_fd=self.folder, follow_symlinks=False)
            if os.path.samestat(found, os.fstat(self.descriptor)):
                return "held"
        fresh = -1
        try:
            fresh = _open_lock(self.folder, NAME)
            fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if fresh < 0:  # a link, a folder, a fifo
                return f"what stands in its place cannot be locked ({error.strerror})"
            os.close(fresh)
            return "another process has taken it: the run directory is its"
        _sign(fresh)
        os.dup2(fresh, self.descriptor, inheritable=False)
        os.close(fresh)
        return "removed"


def _open_lock(folder: int, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"its {name} is not a file")
    if not _is_shared(descriptor):
        os.fchmod(descriptor, 0o600)  # who can open it can lock it
    return descriptor


def _is_shared(descriptor: int) -> bool:
    """Whether it is a file of another name too (a hard link): it is locked, for who holds it may have it from before,
    but not changed."""
    return os.fstat(descriptor).st_nlink > 1


def _write(descriptor: int, text: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the text
        if not _is_shared(descriptor):
            os.ftruncate(descriptor, os.pwrite(descriptor, text, 0))


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _sign(descriptor: int) -> None:
    _write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _release(descriptor: int, before: bytes, folder: int) -> None:
    """Close it, with the text that it had: a refused --resume changes nothing."""
    _write(descriptor, before)
    _close(descriptor, folder)


# -- disk --------------------------------------------------------------------------------------------------------------
# What is written while training goes on, on a disk that may be full.
#
# What cannot be written now is written later: training goes on in memory, and says so once, on the terminal and as an
# event, not at each attempt.


RETRY = 20.0  # [s] between attempts to write what was refused


class Disk:
    """The attempts of one task to write, by what is written ("checkpoint", "policy", "summary")."""

    def __init__(self, directory: RunDirectory) -> None:
        self.record_event: Callable[..., object] = lambda *words, **fields: None  # until somebody records events
        self.lost = ""  # why nothing may be written any more
        self._directory = directory
        self._shown = directory.path
        self._refused: dict[str, tuple[float, str]] = {}  # when to try again [s, monotonic], and why it was refused

    @property
    def refused(self) -> str:
        """What has not been written, and why; empty where everything has."""
        return "; ".join(reason for _, reason in self._refused.values())

    def due(self, what: str) -> bool:
        """Whether to try now: nothing was refused, or some time ago."""
        return time.monotonic() >= self._refused.get(what, (0.0, ""))[0]

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Write; whether that worked. Errors other than those of the disk are raised."""
        if self.follow():
            self._refused[what] = (time.monotonic() + RETRY, f"{self.lost}, so the {what} is lost")
            return False
        try:
            write()
        except (RunDirError, CheckpointError, OSError) as error:
            if what not in self._refused:
                remedy = "free some space; " if is_full_disk(error) else ""
                self.notify(
                    f"{error}. TRAINING GOES ON IN MEMORY, the {what} is NOT SAVED: {remedy}it is tried again every "
                    f"{RETRY:g} s"
                )
            self._refused[what] = (time.monotonic() + RETRY, plain_text(str(error)))
            return False
        if self._refused.pop(what, None) is not None:
            self.notify(f"the {what} is saved again")
        return True

    def follow(self) -> str:
        """Look where the run directory is, and whether its lock is held: what is lost, "" for nothing. What has changed
        is said once."""
        lock = self._directory.lock
        if lock is None or self.lost:
            return self.lost
        where = lock.find(self._shown)
        if where is None:
            self.lost = f"the run directory {self._shown} was removed"
        else:
            if where != self._shown:
                self.notify(f"the run directory {self._shown} was moved to {where}: the run continues there")
                self._shown = where
            held = lock.check()
            if held == "removed":
                self.notify(f"{where / NAME} was removed while the run holds it: it was taken anew")
            elif held != "held":
                self.lost = f"{where / NAME} was removed, and {held}"
        if self.lost:
            self.notify(f"{self.lost}. TRAINING GOES ON IN MEMORY, NOTHING IS SAVED any more")
        return self.lost

    def notify(self, text: str) -> None:
        """Print a line, which becomes an event of the run once these are recorded."""
        _say(text)
        self.record_event("disk", text)


# -- directory ---------------------------------------------------------------------------------------------------------

FOLDERS = ("checkpoints", "keys", "keys/clients", "tensorboard", "cells", "output")  # of a run directory
FILES = ("run.json", "status.json", "live.json", "summary.json", "keys/server.secret", "keys/client.secret")
_REPLACED = re.compile(r"\.(\d+)\.replaced")  # a checkpoint that another of the same step replaces
_UNFINISHED = re.compile(r"\.\d+\.\d+")  # a checkpoint that is being written by a process


def planned_path(config: Config, run_id: str) -> Path:
    """Where a new run that begins now is kept. RunDirError where no directory can have that name."""
    env = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in config.env.id)
    path = working_directory() / (config.run.dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{env}-{run_id}")
    try:
        str(path).encode()
        path.exists()
    except (UnicodeEncodeError, OSError) as error:  # a path of other bytes cannot stand in the run's settings
        reason = "its name is not UTF-8" if isinstance(error, UnicodeEncodeError) else error.strerror
        raise RunDirError(
            f"run.dir ({plain_line(shortened(path))}) cannot be written: {reason}; choose another with --set "
            "run.dir=PATH"
        ) from None
    return path


def working_directory() -> Path:
    """Of this process; RunDirError where it was removed."""
    try:
        return Path.cwd()
    except OSError as error:
        raise RunDirError(f"the working directory is gone ({error.strerror}): change to another") from None


def absolute(path: Path) -> Path:
    """The whole path; RunDirError where it is one from a working directory that was removed."""
    return path if path.is_absolute() else working_directory() / path


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run; with a `lock` where it belongs to this process."""

    path: Path
    lock: RunLock | None = field(default=None, compare=False)

    @property
    def place(self) -> Path:
        """The directory for what this process writes: it stays the same one where it is moved."""
        return self.path if self.lock is None else Path(f"/proc/self/fd/{self.lock.folder}")

    @property
    def now(self) -> Path:
        """Where the directory is now, for people."""
        return (self.lock and self.lock.find(self.path)) or self.path

    @property
    def config(self) -> Path:
        """Effective settings."""
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """Figures of the whole run, written at its end."""
        return self.path / "summary.json"

    @classmethod
    def create(cls, config: Config, run_id: str, path: Path | None = None) -> RunDirectory:
        """Make the directory of a new run, at `path` (else as `planned_path`), and write its settings. A directory that
        holds a run already is refused."""
        path = path or planned_path(config, run_id)
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            directory = cls(path, RunLock(path))
            if directory.config.exists():  # asked under the lock: of two starts one makes the run
                raise RunDirError(
                    f"run.dir ({path}) holds a run already: go on with it by --resume {shlex.quote(str(path))}, "
                    "or name another directory"
                )
            write_json(path / "run.json", {"run_id": run_id, "ddrl": __version__, "began": time.time()})
            directory.write_config(config)
        except OSError as error:
            raise RunDirError(
                f"run.dir ({path}) cannot be written: {error.strerror or error}; choose another with --set run.dir=PATH"
            ) from None
        return directory

    def write_config(self, config: Config) -> None:
        """Keep the settings now in force, below a line that says whose they are, and that they are whole."""
        text = config_to_toml(config)
        write_atomically(self.config, f"# run {self.run_id}, settings {_digest(text)}\n{text}".encode())

    @property
    def run_id(self) -> str:
        """The run's id, which its files have in common."""
        return run_id_of(self.path)

    def rewrite_config(self, config: Config) -> None:
        """The same in a resumed run, which may be on a full disk: RunDirError."""
        try:
            self.write_config(config)
        except OSError as error:
            raise RunDirError(
                f"the settings cannot be written into {self.path}: {error.strerror or error}; {WRITABLE}"
            ) from None

    @classmethod
    def open(cls, path: Path, *, claim: bool = False) -> tuple[RunDirectory, Config]:
        """A run that exists, with its settings; `claim`: take its lock too, and remove what a killed process left."""
        path = absolute(path)
        if not path.is_dir():
            raise RunDirError(f"there is no run directory {path}: name the directory that a run printed at its start")
        if claim:
            refuse_links(path / name for name in FOLDERS)
            refuse_odd_files(path / name for name in FILES)
        kept = _settings_of_checkpoint(path)
        try:
            text = read_regular(path / "config.toml", MAX_DOCUMENT).decode()
        except OSError as error:
            if kept is None or not isinstance(error, FileNotFoundError):
                raise RunDirError(
                    f"{path} is not a run directory: its config.toml cannot be read ({error.strerror or error}); "
                    "name the directory that a run printed"
                ) from None
            text = kept
            if claim:
                _say(f"{path / 'config.toml'} is missing: the settings are those of the newest checkpoint")
        except ValueError as error:
            raise RunDirError(f"{path / 'config.toml'} is damaged: {error}{_remedy(kept)}") from None
        directory = cls(path, RunLock(path) if claim else None)
        if claim:
            if text is not kept:
                directory._check_settings(text, kept)
            sweep_unfinished(directory)
        return directory, config_from_toml(text, str(directory.config))

    def _check_settings(self, text: str, kept: str | None) -> None:
        """RunDirError where config.toml is not what this run wrote. `kept`: the newest checkpoint's settings; None: it
        has none, or there is no checkpoint."""
        first, _, rest = text.partition("\n")
        header = _HEADER.fullmatch(first)
        if header is None and kept is None and text.strip():
            _say(f"{self.config} does not say whose it is: an earlier version wrote it; from now on it does")
            return
        if header is None or header[2] != _digest(rest):
            raise RunDirError(
                f"{self.config} is not what the run wrote: it was cut, damaged or edited{_remedy(kept)}"
                f"{_as_overrides(text, kept)}"
            )
        if not self.run_id:  # run.json is lost or damaged
            try:
                write_json(self.path / "run.json", {"run_id": header[1], "ddrl": __version__, "began": time.time()})
            except OSError as error:
                raise RunDirError(
                    f"{self.path / 'run.json'} cannot be written: {error.strerror or error}; {WRITABLE}"
                ) from None
            _say(f"{self.path / 'run.json'} could not be read and was made anew: when the run began is lost")
        if header[1] != self.run_id:
            raise RunDirError(f"{self.config} is of the run {header[1]}, this is the run {self.run_id}{_remedy(kept)}")

    def release(self) -> None:
        """Let others use the directory."""
        if self.lock is not None:
            self.lock.release()


_HEADER = re.compile(r"# run (\w+), settings ([0-9a-f]{32})")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _settings_of_checkpoint(path: Path) -> str | None:
    from ddrl.run.checkpoint import newest_settings

    return newest_settings(path / "checkpoints")


def _remedy(kept: str | None) -> str:
    return (
        ": put a copy of it back, or start a new run" if kept is None
        else ": remove it, and --resume takes the settings of the newest checkpoint"
    )  # fmt: skip


def _as_overrides(text: str, kept: str | None) -> str:
    """The --set that say what an edited file says otherwise than the checkpoint."""
    if kept is None:
        return ""
    try:
        edited, before = (config_tree(config_from_toml(each, "")) for each in (text, kept))
    except ConfigError:
        return ""
    changes = [
        f"--set {section}.{name}={value}"
        for section, values in edited.items()
        for name, value in values.items()
        if before.get(section, {}).get(name) != value
    ]
    return f"; what was edited is said by {' '.join(changes)}" if changes and len(changes) < 6 else ""


def _say(text: str) -> None:
    print(f"ddrl: {plain_text(text)}", file=sys.stderr, flush=True)


def sweep_unfinished(directory: RunDirectory) -> None:
    """Remove what a killed process left half-written. Only under the lock: no other process writes there."""
    if directory.checkpoints.is_dir():
        for path in list(directory.checkpoints.iterdir()):
            replaced = _REPLACED.fullmatch(path.name)
            whole = directory.checkpoints / replaced[1] if replaced else None
            if whole is not None and not whole.exists():
                path.rename(whole)  # killed between two renames: the older of the two is whole
            elif (whole is not None or _UNFINISHED.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
    for name in ("config.toml", "run.json", "summary.json"):
        for path in directory.path.glob(f".{name}.*"):
            if path.is_symlink() or not path.is_dir():  # ddrl never makes a folder of this name
                path.unlink()

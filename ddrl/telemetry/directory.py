"""What a run directory says without its database: its settings, whether it runs and where it listens, and which runs
there are.

config.toml is written by `ddrl.run`, status.json by the recorder, live.json by the live stream and the control server.
All are read by `reading`, dashboards, notebooks and `attach`."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
import tomllib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import tomli_w
from msgspec.structs import replace

from ddrl.channels.segment import start_time
from ddrl.core.config import CORE_SECTIONS, Config
from ddrl.core.errors import ConfigError, MessageError, RunDirError, shortened
from ddrl.core.files import (
    MAX_DOCUMENT,
    MAX_STATUS,
    decode,
    read_json,
    read_regular,
    refuse_deep,
    write_atomically,
)
from ddrl.core.settings import config_from_toml, describe_settings
from ddrl.telemetry.series import Event
from ddrl.telemetry.store import FILE_NAME

FILMS = {".gif": "image/gif", ".mp4": "video/mp4"}  # what a film may be, by its name's end


_Content = TypeVar("_Content")


def read_config(path: Path) -> Config | str:
    """The config of a config.toml, as far as this version knows its settings, or why they make none."""
    return _read(path, _parse_config)


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """The settings of a config.toml by section; not to be changed."""
    return _read(path, _parse_settings)


def _read(path: Path, parse: Callable[[Path, int, int], _Content]) -> _Content:
    try:
        status = path.stat()
        return parse(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise RunDirError(
            f"cannot read {path} ({error.strerror}): the run directory is half-written or being deleted"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RunDirError(f"{path} is half-written or no file of settings ({shortened(error)})") from None


@lru_cache(maxsize=4096)  # a table of runs reads them all once a second
def _parse_settings(path: Path, changed_ns: int, size: int) -> dict[str, Any]:
    text = read_regular(path, MAX_DOCUMENT).decode()
    try:
        tree = _joined([_parse_block(block) for block in re.split(r"(?m)^(?=\[)", text)])
    except ValueError:  # a string or list with a line that begins as a table does; or no file of settings
        tree = tomllib.loads(text)
    if not all(isinstance(values, dict) for values in tree.values()):
        raise ValueError("settings stand in sections")
    refuse_deep(tree)
    return tree


@lru_cache(maxsize=4096)
def _parse_block(text: str) -> dict[str, Any]:
    """One table. Runs of one folder have most of its lines in common, and parsing them is what takes time."""
    head, *lines = text.splitlines(keepends=True) or [""]
    try:
        lines = [line for line in lines if line.strip()] if head.startswith("[") else []
        return _joined([_parse_lines(head + line) for line in lines] or [tomllib.loads(text)])
    except ValueError:  # a value of several lines, a table in a table, a comment
        return tomllib.loads(text)


@lru_cache(maxsize=1 << 15)
def _parse_lines(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _joined(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Tables as one tree: [learner], then [learner.c51]. ValueError where two hold the same name."""
    tree: dict[str, Any] = {}
    for block in blocks:
        for section, values in block.items():
            known: Any = tree.get(section, {})
            if section in tree and not (isinstance(known, dict) and isinstance(values, dict) and values):
                raise ValueError(section)
            if isinstance(values, dict) and known.keys() & values.keys():
                raise ValueError(section)
            tree[section] = {**known, **values} if known else values
    return tree


@lru_cache(maxsize=64)
def _parse_config(path: Path, changed_ns: int, size: int) -> Config | str:
    settings = _parse_settings(path, changed_ns, size)
    known = {info.name for info in describe_settings()}
    tree: dict[str, dict[str, Any]] = {
        section: {
            name: value
            for name, value in values.items()
            if f"{section}.{name}" in known or isinstance(value, dict) or section not in CORE_SECTIONS
        }
        for section, values in settings.items()
    }
    try:
        return config_from_toml(tomli_w.dumps(tree), str(path), reading=True)
    except ConfigError as error:
        return str(error)


MAX_DEPTH = 4  # folders below the one that is searched for runs


def find_runs(root: str | Path = "runs") -> list[Path]:
    """Run directories under `root` (or `root` itself), in folders of experiments and pools too, up to MAX_DEPTH deep;
    the one begun last first; an absent root is empty, unreadable ones are left out."""
    root = Path(root)
    found: list[tuple[float, Path]] = []
    for file in _run_files(root, MAX_DEPTH):
        with contextlib.suppress(OSError):
            began = file.with_name("config.toml")  # written once, when the run begins
            found.append(((began if began.exists() else file).stat().st_mtime, file.parent))
    return [path for _, path in sorted(found, reverse=True)]


def _run_files(folder: Path, depth: int) -> list[Path]:
    """FILE_NAME of the runs in and below a folder; nothing is a run inside a run."""
    if os.path.exists(folder / FILE_NAME):  # no error where this user may not enter
        return [folder / FILE_NAME]
    inner: list[Path] = []
    with contextlib.suppress(OSError):
        inner = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [file for path in inner if depth for file in _run_files(path, depth - 1)]


def find_film(run_dir: Path) -> Path | None:
    """The newest film of a run's policy at play (`ddrl.evaluate --video`), named agent.gif or agent.mp4."""
    films = [path for path in run_dir.glob("agent.*") if path.suffix in FILMS]
    films = [path for path in films if _is_of_its_own(path)]  # it is shown to others
    return max(films, key=lambda path: path.stat().st_mtime, default=None)


def _is_of_its_own(path: Path) -> bool:
    """Whether a regular file has no other name, which could be a private file's."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return False


# -- status.json and live.json -----------------------------------------------------------------------------------------
# status.json is the one source of a run's state. The recorder writes it whenever an event changes the state; the reader
# checks whether the process is still alive:
#
#     running   it trains                                   paused    by command
#     ending    a limit, a signal or a command was met      ended     finished, with its reason
#     failed    finished with the error that it names       dead      its process is gone without a reason,
#                                                                     and so is the keeper that would start another one


STATUS_FILE = "status.json"
LIVE_FILE = "live.json"
MAX_REASON = 2000  # letters
State = Literal["running", "paused", "ending", "ended", "failed", "dead"]


class Status(msgspec.Struct, frozen=True):
    """The state of a run. `since`: Unix seconds; `reason` in words, "" where there is nothing to say."""

    state: State
    reason: str = ""
    since: float = 0.0
    pid: int = 0
    host: str = ""
    pid_started: float = 0.0
    keeper: int = 0  # process that started it, and every rollout of its host; 0: there is none (--serial)
    keeper_started: float = 0.0
    figures: dict[str, Any] = {}  # of a run that is over: see `ddrl.telemetry.summary`

    @property
    def is_active(self) -> bool:
        """Whether the run's process is at work."""
        return self.state in ("running", "paused", "ending")


_DECODER = msgspec.json.Decoder(Status)


def state_after(state: State, event: Event) -> State | None:
    """The state that an event brings about; None where it says nothing of it."""
    if event.kind == "error":
        return "failed"
    if event.kind in ("stop", "end") and state != "failed":
        return "ending"
    if event.kind == "command" and event.fields.get("ok"):
        states: dict[str, State] = {"pause": "paused", "resume": "running", "stop": "ending"}
        return states.get(str(event.fields.get("command")))
    return None


class StatusFile:
    """The writer: follows a run's events."""

    def __init__(self, run_dir: Path, keeper: int = 0) -> None:
        self._path = run_dir / STATUS_FILE
        self._keeper = keeper, float(start_time(keeper)) if keeper else 0.0
        self._status = Status("running")
        self._write("running", "")

    @property
    def state(self) -> State:
        """The state as it was written last."""
        return self._status.state

    def follow(self, event: Event) -> None:
        """Note what an event says of the run's state."""
        state = state_after(self._status.state, event)
        if state is not None:
            self._write(state, "by command" if event.kind == "command" else event.text)

    def close(self) -> None:
        """The run's last word."""
        if self._status.state != "failed":
            self._write("ended", self._status.reason if self._status.state == "ending" else "")

    def keep(self, figures: dict[str, Any]) -> None:
        """What the run has reached, beside its last word: with it a table of runs opens no database."""
        self._write(self._status.state, self._status.reason, figures)

    def _write(self, state: State, reason: str, figures: Mapping[str, Any] = {}) -> None:
        process = os.getpid()
        place = process, socket.gethostname(), float(start_time(process))
        self._status = Status(state, reason[:MAX_REASON], time.time(), *place, *self._keeper, {**figures})
        _write_small(self._path, self._status)


def _read_small(path: Path, kind: msgspec.json.Decoder[_Content]) -> _Content | None:
    """What a small file of a run directory holds; None where there is none, or it is not ours."""
    try:
        return decode(read_regular(path, MAX_STATUS), kind, MessageError, path.name)
    except (OSError, MessageError):
        return None


def _write_small(path: Path, document: msgspec.Struct | None, remedy: str = ": choose another run.dir") -> None:
    """Write such a file, or with None remove it; RunDirError where that fails."""
    try:
        if document is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, msgspec.json.format(msgspec.json.encode(document)) + b"\n", sync=False)
    except OSError as error:
        raise RunDirError(f"cannot write {path} ({error.strerror}){remedy}") from None


def note_death(run_dir: Path, pid: int, why: str) -> None:
    """Say what ended a run whose process `pid` is gone and did not say it itself; by who has seen how it ended."""
    status = run_status(run_dir)
    if status.state == "dead" and status.pid == pid:
        said = replace(status, state="failed", reason=why[:MAX_REASON], since=time.time())
        _write_small(run_dir / STATUS_FILE, said)


def run_status(run_dir: Path) -> Status:
    """The state of a run directory, without opening its telemetry."""
    status = _read_small(run_dir / STATUS_FILE, _DECODER)
    if status is None:
        return _status_of_older(run_dir)
    has_trainer = status.host != socket.gethostname() or start_time(status.pid) == status.pid_started
    has_keeper = status.keeper > 0 and start_time(status.keeper) == status.keeper_started > 0
    if status.is_active and not has_trainer and not has_keeper:  # a keeper starts another trainer, or ends the run soon
        return replace(status, state="dead", reason=f"its process {status.pid} is gone and never said why")
    return status


def _status_of_older(run_dir: Path) -> Status:
    """The state of a run whose status.json is damaged or was never written."""
    live = read_live_file(run_dir)
    if live is None:
        return Status("ended")
    if is_alive(live):
        return Status("running", pid=live.pid, host=live.host)
    return Status("dead", f"its process {live.pid} is gone and never said why", pid=live.pid, host=live.host)


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """RUN/summary.json; None before the run ended, or where it is damaged."""
    try:
        return read_json(run_dir / "summary.json", dict[str, Any], RunDirError, "summary.json cannot be read")
    except RunDirError:
        return None


class Notes(msgspec.Struct, frozen=True):
    """RUN/notes.json: what somebody has written about a run. Runs with the tag `HIDDEN` are left out of tables."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""


NOTES_FILE = "notes.json"
HIDDEN = "hidden"
_NOTES_DECODER = msgspec.json.Decoder(Notes)


def read_notes(run_dir: Path) -> Notes:
    """What was written about a run; nothing where the file is missing or damaged."""
    return _read_small(run_dir / NOTES_FILE, _NOTES_DECODER) or Notes()


def write_notes(run_dir: Path, notes: Notes) -> None:
    """Keep what is written about a run. RunDirError where that fails, or it is too much."""
    length = len(msgspec.json.format(msgspec.json.encode(notes))) + 1
    if length > MAX_STATUS:
        raise RunDirError(f"name, tags and note of {run_dir.name} take {length} bytes; at most {MAX_STATUS} are kept")
    _write_small(run_dir / NOTES_FILE, notes, "")


class LiveFile(msgspec.Struct, omit_defaults=True):
    """RUN/live.json: who runs, and where to listen. Removed when the run ends; a dead `pid` means that the run died."""

    pid: int
    host: str
    pid_started: float = 0.0
    stream: str = ""
    control: str = ""
    server_key: str = ""  # public CURVE key of the stream, where that is encrypted
    control_key: str = ""  # of the commands

    @property
    def process(self) -> tuple[int, str, float]:
        """The process that wrote the file, also where its pid has been used again."""
        return self.pid, self.host, self.pid_started


_LIVE_FILE_DECODER = msgspec.json.Decoder(LiveFile)


def announce(folder: Path, **addresses: str) -> None:
    """Write addresses of this process to FOLDER/live.json (atomically), keeping the others that it has announced. An
    empty address withdraws; the file is removed with the last one."""
    announced = LiveFile(os.getpid(), socket.gethostname(), start_time(os.getpid()))
    known = read_live_file(folder)
    if known is not None and known.process == announced.process:
        announced = known
    elif not any(addresses.values()):
        return
    for name, address in addresses.items():
        setattr(announced, name, address)
    _write_small(folder / LIVE_FILE, announced if announced.stream or announced.control else None)


def read_live_file(run_dir: Path) -> LiveFile | None:
    """What RUN/live.json says; None where there is none or it is not ours."""
    return _read_small(run_dir / LIVE_FILE, _LIVE_FILE_DECODER)


def is_alive(live: LiveFile) -> bool:
    """Whether the process that wrote `live` still runs; True for one on another machine, whose processes cannot be
    seen."""
    if live.host != socket.gethostname():
        return True
    started = start_time(live.pid)
    return started > 0 and (not live.pid_started or started == live.pid_started)

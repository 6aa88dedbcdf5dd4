"""Every error that ddrl raises on purpose.

    DdrlError
    ├── ConfigError        a setting, a role count or a file of settings
    ├── EnvError           an environment that cannot be made or breaks its contract
    ├── NetworkError       a network that cannot be built, exported or acted with
    ├── CheckpointError    a checkpoint, snapshot or policy file
    ├── RunDirError        a run directory that cannot be written or read
    ├── ChannelError       a shared-memory segment, lane, mailbox or counters table
    ├── PlanError          a distribution plan that cannot be built or executed
    ├── PoolError          a device, a lease or a task of a pool
    ├── MessageError       a message from outside that is not ours or malformed
    ├── JobFailed          another process of the job has failed
    └── MissingExtraError  an optional dependency that is not installed

    ForeignError           an exception of the user's code, in a process that this one has started
    └── ProcessEnded       that process was killed, or ended by itself

A message names what is wrong, where, and what to do, in one line: it is shown to the user as it is, without a
traceback."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path

MAX_WORDS = 90  # letters of an error of the user's code
MIN_WORDS = 30  # letters of it that stay in a line that is full
MIN_STATEMENT = 10  # letters of the user's statement, which is left out where fewer have room
MAX_LINE = 299  # letters of a message
MAX_LETTERS = 400  # of an error that quotes a damaged file


def plain_text(text: str) -> str:
    """The text with each letter that a terminal obeys or that hides others as an escape; lines stay lines. Paths by an
    open folder of this process (`RunDirectory.place`) get the folder's name."""
    text = _OPEN_FOLDER.sub(_name_of_folder, text)
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


_OPEN_FOLDER = re.compile(r"/proc/self/fd/\d+")


def _name_of_folder(found: re.Match[str]) -> str:
    return os.path.realpath(found[0]) if os.path.isdir(found[0]) else found[0]


def plain_line(text: str) -> str:
    """The same in one line."""
    return plain_text(text).replace("\n", "\\n")


def shortened(error: object) -> str:
    """An error's words in one line of bounded length, also where they quote a file that may be damaged."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS // 2]} ... {text[-MAX_LETTERS // 2 :]}"


def first_line(error: BaseException) -> str:
    """First line of the text of another library's error; its type's name where it has no text, or cannot give it."""
    try:
        text = str(error)
    except Exception:  # of a class of the user's own
        text = ""
    return next(iter(text.strip().splitlines()), type(error).__name__)


_LIBRARIES = ("ddrl", "numpy", "torch", "gymnasium", "onnxruntime", "msgspec")  # whose frames are not the user's
_STANDARD = Path(os.__file__).parent
_ROOT = Path(__file__).parents[1]


def user_frame(error: BaseException) -> str:
    """Where an exception left the user's code, as "(my_env.py, line 12, in step: x = 1 / y)"; "" for the library's
    own."""
    if isinstance(error, ForeignError):
        return str(error)
    if isinstance(error, SyntaxError) and error.filename and is_of_user(Path(error.filename)):
        return f"({Path(error.filename).name}, line {error.lineno}: {(error.text or '').strip()[:80]})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if is_of_user(path):
            line = f": {frame.line[:80]}" if frame.line else ""
            return f"({path.name}, line {frame.lineno}, in {frame.name}{line})"
    return ""


_NO_ROOM = ("failed to map segment", "cannot create shared object", "annot allocate memory", "bad_alloc")  # of imports


def shortage(error: BaseException) -> str:
    """Of an error for want of memory that left no code of the user's: what to do about it; "" for another one."""
    unloaded = isinstance(error, ImportError) and any(words in str(error) for words in _NO_ROOM)
    if not unloaded and (not isinstance(error, MemoryError) or user_frame(error)):
        return ""
    return (
        "there is no memory left: give the process more (ulimit -v, the limit of its container), or set "
        "replay.capacity and run.processes lower"
    )


def user_error(error: BaseException, before: str = "", after: str = "") -> str:
    """An exception that left the user's code in one line: type, first words, and where, between other words, as far as
    MAX_LINE letters hold."""
    if isinstance(error, ForeignError):
        return f"{before}{error}{after}"
    name = type(error).__name__
    words = f"{name}: {first_line(error)[:MAX_WORDS]}".removesuffix(f": {name}")
    room = MAX_LINE - len(before) - len(after) - 1
    place, colon, statement = user_frame(error).removesuffix(")").partition(": ")
    kept = room - len(words) - len(place) - len(colon) - 1
    frame = f"{place}{colon}{statement[:kept]})" if kept >= MIN_STATEMENT else f"{place})"
    frame = frame if place else ""
    return f"{before}{words[: max(room - len(frame), MIN_WORDS)]} {frame}".rstrip() + after


def frame_of_stacks(stacks: str) -> str:
    """The user's innermost frame in what faulthandler writes, as " (my_env.py, line 12, in step)"; "" for none."""
    for file, line, name in re.findall(r'File "(.+)", line (\d+) in (\S+)', stacks):
        if is_of_user(Path(file)):
            return f" ({Path(file).name}, line {line}, in {name})"
    return ""


def is_of_user(path: Path) -> bool:
    """Whether a file is the user's code, or a package that it uses: not ddrl, what ddrl is made of, or Python's own."""
    if path.is_relative_to(_ROOT) or path.name.startswith("<"):
        return False
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1] not in _LIBRARIES
    return not path.is_relative_to(_STANDARD)


class DdrlError(Exception):
    """Base of all; `run` turns it into one line on standard error and a nonzero exit. What it quotes is text."""

    def __init__(self, text: str = "") -> None:
        super().__init__(plain_text(text))


class ConfigError(DdrlError):
    """A setting that cannot be used."""


class EnvError(DdrlError):
    """An environment that cannot be made, or that breaks the environment contract."""


class NetworkError(DdrlError):
    """A network that cannot be built, exported, or acted with."""


class CheckpointError(DdrlError):
    """A checkpoint, snapshot or policy file that is missing, corrupt or foreign."""


class RunDirError(DdrlError):
    """A run directory that cannot be written or read."""


class ChannelError(DdrlError):
    """A shared-memory segment that is missing, foreign, or too large for the machine."""


class PlanError(DdrlError):
    """A distribution plan that cannot be built or executed."""


class PoolError(DdrlError):
    """A device, a lease or a task of a pool that cannot be had or used."""


class KeeperError(DdrlError):
    """A process that cannot be started or ended."""


class MessageError(DdrlError):
    """A message from outside that is malformed or not ours."""


class JobFailed(DdrlError):
    """The job ended because one of its processes failed; the message is that process's own, empty where it is shown
    already."""


class MissingExtraError(DdrlError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed: pip install 'ddrl[{extra}]'"
        )


class ForeignError(Exception):
    """An exception of the user's code in a process that this one has started: its text is that of `user_error` there.
    No error of ddrl's: what became of it is decided as if it had been raised here."""


class ProcessEnded(ForeignError):
    """That process has ended, and nobody has asked it to."""


def error_of(kind: str, text: str) -> DdrlError:
    """An error of ddrl's that another process has raised, by the name of its class."""
    found: type[DdrlError] = globals().get(kind, EnvError)
    error = found.__new__(found)
    error.args = (plain_text(text),)
    return error


# -- work beside training and serving, which may not end it ------------------------------------------------------------

FIRST_PAUSE = 0.1  # [s] after a failure; it doubles with each further one
LONGEST_PAUSE = 60.0  # [s]


class Guard:
    """Keeps work going that nobody waits for (the recorder, the look for newer policies, snapshots of counters): an
    exception is reported once, to `report`, and the work is tried again after a pause that grows to a minute."""

    def __init__(self, report: Callable[[str], object]) -> None:
        self.failing: dict[str, str] = {}  # by what is done: why it fails
        self._report = report
        self._reported: set[tuple[str, type[Exception]]] = set()
        self._pauses: dict[str, float] = {}

    def attempt(self, doing: str, action: Callable[[], object]) -> float:
        """Do it; how long to wait before the next time, beyond the usual period [s]."""
        try:
            action()
        except Exception as error:  # whatever it is, what runs beside it continues
            return self.failed(doing, error)
        return self.done(doing)

    def done(self, doing: str) -> float:
        """Note that it worked."""
        if self.failing.pop(doing, None) is not None:
            del self._pauses[doing]
        return 0.0

    def failed(self, doing: str, error: Exception) -> float:
        """Note that it failed; the pause before the next attempt [s]."""
        self.failing[doing] = str(error) or type(error).__name__
        pause = self._pauses[doing] = min(2 * self._pauses.get(doing, FIRST_PAUSE / 2), LONGEST_PAUSE)
        kind = (doing, type(error))
        if kind not in self._reported:
            self._reported.add(kind)
            known = isinstance(error, DdrlError)
            words = str(error) if known else "\n" + "".join(traceback.format_exception(error)).rstrip()
            try:
                self._report(f"{doing} failed, the rest continues: {words}")
            except Exception as trouble:
                self.failing[doing] += f"; it could not be reported: {trouble}"
        return pause

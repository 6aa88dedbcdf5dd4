"""Work beside training and serving, and what processes print: neither may end the other.

`Guard` keeps work going that nobody waits for (the recorder, the look for newer policies, snapshots of counters): an
exception is reported once, and the work is tried again after a pause that grows to a minute. `keep_streams` gives a
process an output that cannot fail it: closed streams, a reader that has left, a pipe that nobody empties, a full disk.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from ddrl.core.errors import DdrlError, shortage

FIRST_PAUSE = 0.1  # [s] after a failure; it doubles with each further one
LONGEST_PAUSE = 60.0  # [s]
PATIENCE = 1.0  # [s] that a full pipe is waited for, once


class Guard:
    """What of some work fails now. `report` takes each kind of failure once."""

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


class Stream(io.TextIOBase):
    """Text to a descriptor, a line in one write where it is short. It never raises: what cannot be written is left out,
    `lost` says why. `patience` [s] that a full pipe is waited for; afterwards it must be emptied first."""

    def __init__(self, descriptor: int, encoding: str, patience: float | None) -> None:
        self.lost: OSError | None = None
        self._descriptor = descriptor
        self._encoding = encoding
        self._patience = patience
        self._full = False
        self._line = ""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """In which letters are written; those that it lacks are escaped."""
        return self._encoding

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Write whole lines, and keep the rest until `flush`."""
        self._line += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write what is kept."""
        data = self._line.encode(self._encoding, "backslashreplace")
        self._line = ""
        try:
            while data:
                self._await_room()
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        except OSError as error:
            self.lost = error

    def _await_room(self) -> None:
        """Wait until so much as PIPE_BUF fits; OSError where nobody empties the pipe."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        patience = 0.0 if self._full else self._patience
        if not poll.poll(None if patience is None else patience * 1000):
            self._full = True
            raise OSError(errno.EAGAIN, "nobody reads what is written")
        self._full = False


def keep_streams(patience: float | None = PATIENCE) -> None:
    """Let nothing that this process prints fail it. `patience`: None for a command whose output is what is asked
    for. Ends of children are heard, though who started this process ignores those of his: else all would be 0. What
    ends it for want of memory is said in a line."""
    sys.excepthook = _say_at_the_end
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file that is opened would be written to as if it were the terminal
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
        if number:
            before: TextIO | None = getattr(sys, name)
            setattr(sys, name, Stream(number, getattr(before, "encoding", None) or "utf-8", patience))


def _say_at_the_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if words := shortage(error):
        print(f"ddrl: {words}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def checked_output(status: int) -> int:
    """The exit status of a command whose output is what was asked for: 1, with the reason, where it was lost other than
    by a reader that had seen enough."""
    lost = getattr(sys.stdout, "lost", None)
    if lost is None or lost.errno == errno.EPIPE:
        return status
    print(f"ddrl: the output cannot be written: {lost.strerror}", file=sys.stderr)
    return status or 1

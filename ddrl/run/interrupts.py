"""Signals: Ctrl-C and SIGTERM ask for a clean stop; a second Ctrl-C ends at once.

mpirun kills its ranks a quarter of a second after SIGTERM, which is too short for a checkpoint. So under mpirun the
trainer forks the moment the signal comes: the child leaves the process group that is about to be killed, goes on to the
next safe point, and saves."""

from __future__ import annotations

import os
import signal
from types import FrameType

ESCAPE_SECONDS = 600  # [s] after which a child that still has not saved is ended by the kernel, whatever it hangs in


class Escaped(BaseException):
    """Raised in the forked child where it was outside of a training step: sockets and threads it may have been using
    are not its own."""


class Interrupts:
    """Notes that a stop was asked for. Use as a context in the main thread of the trainer's process.

    `escape`: fork at SIGTERM (see the module). Then `escaped` is true in the child, and `child_saved` in a parent that
    lived to see it."""

    def __init__(self, *, escape: bool = False) -> None:
        self.requested = False
        self.escaped = False
        self.child_saved = False
        self.in_step = False  # set by the training loop: a step is finished before the child saves
        self._escape = escape
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and self._escape and not self.requested:
            child = os.fork()
            if child == 0:
                os.setsid()
                ignore_interrupts()
                signal.alarm(ESCAPE_SECONDS)
                self.escaped = self.requested = True
                if not self.in_step:
                    raise Escaped
            # whoever sent the signal may kill this process any moment, or (a scheduler's grace period) let it end in
            # order
            else:
                self.child_saved = os.waitpid(child, 0)[1] == 0
        self.requested = True


def ignore_interrupts() -> None:
    """For every process but the trainer: the board tells it when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

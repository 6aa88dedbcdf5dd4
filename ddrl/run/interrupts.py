"""Signals: Ctrl-C and SIGTERM ask for a clean stop; a second Ctrl-C ends at once."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupts:
    """Notes that a stop was asked for. Use as a context in the main thread of the trainer's process."""

    def __init__(self) -> None:
        self.requested = False
        self.terminated = False  # by SIGTERM: whoever sent it may not wait long
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
        self.requested = True
        self.terminated = self.terminated or number == signal.SIGTERM


def ignore_interrupts() -> None:
    """For every process but the trainer: the board tells it when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

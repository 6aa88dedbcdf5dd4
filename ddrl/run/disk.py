"""What is written while training goes on, on a disk that may be full.

What cannot be written now is written later: training goes on in memory, and says so once, on the terminal and as an
event, not at each attempt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ddrl.core.errors import CheckpointError, RunDirError

RETRY = 20.0  # [s] between attempts to write what was refused


def _nobody(kind: str, text: str, **fields: Any) -> None:
    """Until somebody records events."""


class Disk:
    """The attempts of one task to write, by what is written ("checkpoint", "policy", "summary")."""

    def __init__(self) -> None:
        self.record_event: Callable[..., None] = _nobody
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
        try:
            write()
        except (RunDirError, CheckpointError, OSError) as error:
            if what not in self._refused:
                self._say(
                    f"{error}. TRAINING GOES ON IN MEMORY, the {what} is NOT SAVED: free some space; "
                    f"it is tried again every {RETRY:g} s"
                )
            self._refused[what] = (time.monotonic() + RETRY, str(error))
            return False
        if self._refused.pop(what, None) is not None:
            self._say(f"the {what} is saved again")
        return True

    def _say(self, text: str) -> None:
        print(f"ddrl: {text}", file=sys.stderr, flush=True)
        self.record_event("disk", text)

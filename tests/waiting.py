"""How long the tests wait: a limit ends what hangs, and says nothing of speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 600.0  # [s] for anything that must come; far above what the slowest machine needs, below pytest's own limit
ENDLESS = 2 * PATIENCE  # [s] of a run that a test stops: one that is not stopped outlasts the wait for its end


def wait_until(holds: Callable[[], T], trouble: str, seconds: float = PATIENCE, pause: float = 0.05) -> T:
    """What `holds` returns once that is true, looked at every `pause` [s]; AssertionError with `trouble` where it does
    not come to be."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, f"{trouble} within {seconds:g} s"
        time.sleep(pause)
    return value

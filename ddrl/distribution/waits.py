"""Waiting for other relays without taking the processor from them: everything here sleeps between two looks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


def rest(begun: float) -> None:
    """Sleep a little of the time waited since `begun`: what is measured stays true to 2 %, and hundreds that wait leave
    the cores alone."""
    time.sleep(max(2e-5, 0.02 * (time.perf_counter() - begun)))


def wait(request: MPI.Request) -> None:
    """Until it has ended."""
    begun = time.perf_counter()
    while not request.Test():
        rest(begun)

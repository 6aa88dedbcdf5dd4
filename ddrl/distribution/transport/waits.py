"""Waiting for other processes over MPI without taking the processor from them: everything here sleeps between polls.

Blocking MPI calls spin; hundreds of processes that spin on a few cores would starve the one they wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

SHARE, SHORTEST = 0.02, 2e-5  # of the time waited so far; [s]


def nothing() -> None:
    """Does nothing between polls."""


def rest(begun: float, share: float = SHARE, longest: float = math.inf) -> None:
    """Sleep a share of the time waited since `begun` (time.perf_counter), at most `longest` [s]: what is measured stays
    true to that share, and hundreds that wait leave the cores alone."""
    time.sleep(min(longest, max(SHORTEST, share * (time.perf_counter() - begun))))


def wait(
    requests: Sequence[MPI.Request],
    meanwhile: Callable[[], object] = nothing,
    *,
    share: float = SHARE,
    longest: float = math.inf,
) -> None:
    """Until all of them have ended; `meanwhile` is called between polls; an error that it raises ends the wait."""
    from mpi4py import MPI

    begun = time.perf_counter()
    while not MPI.Request.Testall(requests):
        meanwhile()
        rest(begun, share, longest)

"""Waiting for other processes over MPI without taking the processor from them: everything here sleeps between polls.

Blocking MPI calls spin; hundreds of processes that spin on a few cores would starve the one they wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

SHARE = 0.02  # of the time waited so far; [s]
SHORTEST = 2e-5


def nothing() -> None:
    """Does nothing between polls."""


def rest_seconds(
    waited: float, share: float = SHARE, longest: float = math.inf, *, shortest: float = SHORTEST
) -> float:
    """A share of the time `waited`, at least `shortest` and at most `longest` [s]: what comes is late by no more than
    that share, and hundreds that wait leave the cores alone."""
    return min(longest, max(shortest, share * waited))


def rest(begun: float, share: float = SHARE, longest: float = math.inf) -> None:
    """Sleep `rest_seconds` of the time since `begun` (time.perf_counter)."""
    time.sleep(rest_seconds(time.perf_counter() - begun, share, longest))


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

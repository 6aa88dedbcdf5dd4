"""The rules of ad mixing in C++ (ddrl/admix/kernel)."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


class AdQueue:
    """
    The queues of `places` days of the same contracts: what is in them, what is shown, what that changes.
    """

    def __init__(self, tables: dict[str, Any], sizes: dict[str, Any], seed: int) -> None: ...

    def write_into(self, state: dict[str, Any]) -> None:
        """
        Where `observe` writes: by name (bytes uint8 [places, stride], offset).
        """

    def use_requests(self, requests: dict[str, Any], length: int) -> None:
        """Arrays [places, length, ...] of requests that `take` and `play` read."""

    def begin_day(self, place: int) -> None:
        """Counts of a new day: nothing shown, no billing under way."""

    def look(self, time: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Set what is due, delivered and billed by what is known at `time` [places].
        """

    def take(self, at: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], present: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], draws: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)] | None) -> None:
        """
        Take over request `at` of each place, where it is present; draws [2, places, contracts] decide by rate and theta.
        """

    def play(self, scores: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], at: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], count: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], draws: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)] | None) -> None:
        """
        Play `count` requests of each place from `at` on by its scores. ValueError for a score that is not a number.
        """

    def observe(self) -> None:
        """Write the states of the present requests."""

    def read(self, ad: Sequence[int], kind: Sequence[int], ecpm: Sequence[float], ctr: Sequence[float], filters: Sequence[int], cell: int, time: float, slot: int) -> int:
        """
        Take over a request given as lists of checked numbers; the number of bids that found no slot. ValueError for lists of unequal length, and names a contract that is unknown or there twice.
        """

    def take_back(self) -> None:
        """
        The request that was read last is refused: the next one gets the draws that it got.
        """

    def choose(self, scores: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]) -> tuple[int, float, int]:
        """
        Slot (-1: none), score and candidate of the ad to show; ValueError for a score that is not a number.
        """

    def explain(self, scores: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]) -> list[tuple[int, float]]:
        """
        Of each candidate the number of the reason why it may not be shown (0: it may), and its score, NaN outside the queue.
        """

    def show(self, slot: int) -> None:
        """Count the ad in a slot as shown."""

"""From days, given window by window, to one present request for each of n environments.

Each environment has its own place in its own day. Requests are copied piece by piece into buffers [n, PIECE, ...], so
that one indexed read gives the present requests of all environments as arrays [n, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError
from ddrl.envs.admix.contracts import Contracts, Requests
from ddrl.envs.admix.inventory import Inventory
from ddrl.envs.admix.settings import PlayConfig

PIECE = 256  # requests that are copied at once
_FIELDS = tuple(item.name for item in fields(Requests))


class Day(Protocol):
    """One day that can be played: drawn by the market, or read from logs."""

    @property
    def contracts(self) -> Contracts:
        """The contract ads."""
        ...

    @property
    def windows(self) -> int:
        """Windows of the day."""
        ...

    @property
    def billed_rate(self) -> NDArray[np.float64]:
        """Probability that an impression counts, by window and contract [W, C]."""
        ...

    @property
    def inventory(self) -> Inventory:
        """What was forecast of the day before it began."""
        ...

    def __iter__(self) -> Iterator[Requests]:
        """The day's requests, in the order of time, in parts that lie within one window each."""
        ...


Days = Callable[[int, int], Day]  # (seed of the environment, number of the episode) -> the day it plays


def alpha_of(play: PlayConfig, day: Day) -> NDArray[np.float64]:
    """The duals [C] (currency) from which a policy departs on this day; 0 without a prior."""
    if play.prior == "yesterday":
        return cast(Any, day).yesterday_alpha  # a log has none, which is refused before
    return day.inventory.split() * day.contracts.penalty * (play.prior == "demand")


def prior_of(play: PlayConfig, day: Day) -> NDArray[np.float64]:
    """The same as bonuses [C] (eCPM)."""
    return 1000 * alpha_of(play, day) * (day.contracts.billed_rate if play.prior == "yesterday" else 1.0)


class Feed:
    """The present request of each of n environments; `present` holds the arrays of `Requests` with n rows."""

    def __init__(self, count: int) -> None:
        self.present: dict[str, NDArray[Any]] = {}
        self.has_request = np.zeros(count, bool)
        self._buffers: dict[str, NDArray[Any]] = {}
        self._all = np.arange(count)
        self._place = np.zeros(count, np.int64)
        self._end = np.zeros(count, np.int64)  # requests in the buffer
        self._parts: list[Iterator[Requests]] = [iter(()) for _ in range(count)]

    def begin(self, env: int, day: Day, first_window: int = 0) -> None:
        """Environment `env` stands at the first request of `day` from a window on; EnvError where it has none."""
        self._parts[env] = _pieces(day, first_window)
        self._refill(env)
        if not self.has_request[env]:
            raise EnvError("admix: a day without requests cannot be played; raise market.requests, or check the log")

    def block(self, moving: NDArray[np.bool_], most: int) -> dict[str, NDArray[Any]]:
        """The next requests [n, k, ...] of the environments `moving`, which have one: k is at most `most`, and as many
        as all of them have here."""
        count = min(most, int((self._end - self._place)[moving].min()))
        places = np.minimum(self._place[:, None] + np.arange(count), PIECE - 1)
        return {name: buffer[self._all[:, None], places] for name, buffer in self._buffers.items()}

    def advance(self, moving: NDArray[np.bool_], count: int = 1) -> None:
        """The environments `moving` [n] go on by `count` requests; `has_request` is False where the day is over."""
        self._place += count * moving
        for env in np.flatnonzero(self._place >= self._end):
            if moving[env]:
                self._refill(int(env))

    def read(self) -> dict[str, NDArray[Any]]:
        """Copy the present requests into `present`; rows of a day that is over repeat an earlier request."""
        place = np.minimum(self._place, np.maximum(self._end - 1, 0))
        self.present = {name: buffer[self._all, place] for name, buffer in self._buffers.items()}
        return self.present

    def _refill(self, env: int) -> None:
        piece = next(self._parts[env], None)
        self.has_request[env] = piece is not None
        if piece is None:
            return
        for name in _FIELDS:
            values = getattr(piece, name)
            if name not in self._buffers:
                shape = (len(self._all), PIECE, *values.shape[1:])
                self._buffers[name] = np.zeros(shape, values.dtype)
            self._buffers[name][env, : len(piece)] = values
        self._place[env], self._end[env] = 0, len(piece)


def _pieces(day: Day, first_window: int) -> Iterator[Requests]:
    for part in day:
        if len(part) and part.window[0] < first_window:
            continue
        for begin in range(0, len(part), PIECE):
            yield part.part(begin, begin + PIECE)

"""What contracts have got: impressions shown, billed, and what of the billing is known yet, for n environments.

The server knows what it showed. Whether an impression was billed it learns `delay` requests later. Policies and
baselines see `seen_*` and `estimate`; only the reward uses `billed`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PRIOR_IMPRESSIONS = 50.0  # weight of the past billed rate beside what today's impressions say


def estimate_rate(
    billed: NDArray[np.float64], shown: NDArray[np.float64], past_rate: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Billed rate from `billed` of `shown` impressions whose billing is known, and the past rate as a prior."""
    return (billed + PRIOR_IMPRESSIONS * past_rate) / (shown + PRIOR_IMPRESSIONS)


class Delivery:
    """Counts [n, C] of a day."""

    def __init__(self, count: int, past_rate: NDArray[np.float64], delay: int, own_counts: bool) -> None:
        self.shape = (count, len(past_rate))
        self.delay = delay
        self.own_counts = own_counts
        self._past_rate = past_rate
        self.shown = np.zeros(self.shape)
        self.billed = np.zeros(self.shape)
        self.seen_shown = np.zeros(self.shape)  # of impressions whose billing is known
        self.seen_billed = np.zeros(self.shape)
        self._queue = np.full((count, max(delay, 1)), -1, np.int32)  # 2 contract + billed; -1: no contract was shown
        self._at = np.zeros(count, np.int64)
        self._all = np.arange(count)

    def reset(self, env: int) -> None:
        """A new day: nothing shown, no billing under way."""
        for counts in (self.shown, self.billed, self.seen_shown, self.seen_billed):
            counts[env] = 0
        self._queue[env] = -1
        self._at[env] = 0

    def show(self, contract: NDArray[np.int64], billed: NDArray[np.bool_], moving: NDArray[np.bool_]) -> None:
        """Count one request of each environment `moving` [n]: the contract shown, or -1 for a bid or nothing [n]."""
        rows = np.flatnonzero(moving & (contract >= 0))
        self.shown[rows, contract[rows]] += 1
        self.billed[rows, contract[rows]] += billed[rows]
        event = np.where(contract >= 0, 2 * contract + billed, -1)
        if self.delay:
            slot = self._at % self.delay
            matured = np.where(moving, self._queue[self._all, slot], -1)
            self._queue[self._all, slot] = np.where(moving, event, self._queue[self._all, slot])
            self._at += moving
        else:
            matured = np.where(moving, event, -1)
        rows = np.flatnonzero(matured >= 0)
        self.seen_shown[rows, matured[rows] >> 1] += 1
        self.seen_billed[rows, matured[rows] >> 1] += matured[rows] & 1

    def show_block(self, contract: NDArray[np.int64], billed: NDArray[np.bool_], moving: NDArray[np.bool_]) -> None:
        """As `show` for k requests [n, k] of each environment `moving`, with a delay at most `delay` at once."""
        count = contract.shape[1]
        assert not self.delay or count <= self.delay
        contract = np.where(moving[:, None], contract, -1)
        self._add(self.shown, contract, contract >= 0)
        self._add(self.billed, contract, billed & (contract >= 0))
        event = np.where(contract >= 0, 2 * contract + billed, -1)
        if self.delay:
            slots = (self._at[:, None] + np.arange(count)) % self.delay
            matured = np.where(moving[:, None], self._queue[self._all[:, None], slots], -1)
            self._queue[self._all[moving, None], slots[moving]] = event[moving]
            self._at += count * moving
        else:
            matured = event
        self._add(self.seen_shown, matured >> 1, matured >= 0)
        self._add(self.seen_billed, matured >> 1, (matured >= 0) & (matured & 1 == 1))

    def _add(self, counts: NDArray[np.float64], contract: NDArray[Any], counted: NDArray[np.bool_]) -> None:
        rows, columns = np.nonzero(counted)
        places = rows * self.shape[1] + contract[rows, columns]
        counts += np.bincount(places, minlength=counts.size).reshape(self.shape)

    @property
    def rate(self) -> NDArray[np.float64]:
        """Billed rate by what is known now, with the past rate as a prior [n, C]."""
        return estimate_rate(self.seen_billed, self.seen_shown, self._past_rate)

    @property
    def estimate(self) -> NDArray[np.float64]:
        """Billed impressions by what is known now [n, C]; where own counts are known, with those under way at the
        estimated rate."""
        if not self.own_counts:
            return self.seen_billed
        return self.seen_billed + self.rate * (self.shown - self.seen_shown)

"""What n environments have shown so far: sums of a day, which policies may see, and events of all days."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Tally:
    """Counts of `count` environments with contracts in the first `contracts` slots of their queue, bids behind."""

    def __init__(self, count: int, contracts: int) -> None:
        self._contracts = contracts
        self._rows = np.arange(count)[:, None]
        self._sums = np.zeros((count, 5))  # contract ads shown, their ctr, bids shown, their ctr, their eCPM
        self.events = {"requests": 0, "empty_queues": 0, "contract_shown": 0, "bid_shown": 0, "billed": 0}

    def begin_day(self, env: int) -> None:
        """A new day of one environment: its sums are zero."""
        self._sums[env] = 0

    def count(
        self,
        slot: NDArray[np.int64],
        billed: NDArray[np.bool_],
        moving: NDArray[np.bool_],
        request: dict[str, NDArray[Any]],
    ) -> None:
        """Count requests [n, k, ...] of the environments `moving`, and the slot shown at each [n, k] (-1: nothing)."""
        is_contract = (slot >= 0) & (slot < self._contracts)
        is_bid = slot >= self._contracts
        contract = np.where(is_contract, slot, 0)
        bid = np.where(is_bid, slot - self._contracts, 0)
        sums = self._sums
        at = (self._rows, np.arange(slot.shape[1]))
        sums[:, 0] += is_contract.sum(1)
        sums[:, 1] += np.where(is_contract, request["ctr"][(*at, contract)], 0).sum(1)
        if request["ecpm"].shape[2]:
            sums[:, 2] += is_bid.sum(1)
            sums[:, 3] += np.where(is_bid, request["bid_ctr"][(*at, bid)], 0).sum(1)
            sums[:, 4] += np.where(is_bid, request["ecpm"][(*at, bid)], 0).sum(1)
        events = self.events
        events["requests"] += int(moving.sum()) * slot.shape[1]
        events["contract_shown"] += int(is_contract.sum())
        events["bid_shown"] += int(is_bid.sum())
        events["billed"] += int(billed.sum())
        events["empty_queues"] += int((moving[:, None] & (slot < 0)).sum())

    def means(self) -> dict[str, NDArray[np.float64]]:
        """Of each environment's day so far [n]: click rates of contract ads and of bids shown, and the mean payment."""
        sums = self._sums
        return {
            "contract_ctr": sums[:, 1] / np.maximum(sums[:, 0], 1),
            "bidding_ctr": sums[:, 3] / np.maximum(sums[:, 2], 1),
            "payment": sums[:, 4] / np.maximum(sums[:, 2], 1),
        }

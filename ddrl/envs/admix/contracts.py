"""Contract ads, the cells of visitors, and the requests that both meet: the data that every part of ad mixing shares.

A cell is one combination of region, gender and age: cell = (region * 2 + gender) * ages + age. Arrays over contracts
are [C], over cells [cells], over bid slots [B], over windows [W].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError

GENDERS = 2


@dataclass(frozen=True)
class Contracts:
    """The contracts of a day: what each advertiser has booked."""

    ad_id: NDArray[np.int64]  # [C], positive and different
    demand: NDArray[np.float64]  # [C], billed impressions due at the day's end
    penalty: NDArray[np.float64]  # [C], currency for each missing impression
    cap: NDArray[np.float64]  # [C], impressions after which the ad is not shown
    regions: NDArray[np.bool_]  # [C, regions], targeted
    genders: NDArray[np.bool_]  # [C, 2]
    ages: NDArray[np.bool_]  # [C, ages]
    billed_rate: NDArray[np.float64]  # [C], what was billed of what was shown in the past

    def __post_init__(self) -> None:
        for name in ("demand", "penalty", "cap", "billed_rate"):
            values = getattr(self, name)
            if not np.isfinite(values).all() or (values < 0).any():
                row = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
                raise EnvError(f"contract {self.ad_id[row]}: {name} = {values[row]} must be a number of at least 0")
        if len(set(self.ad_id.tolist())) < len(self.ad_id) or (self.ad_id < 1).any():
            raise EnvError("contracts: ad_id must be positive and name each contract once")

    @property
    def count(self) -> int:
        """Number of contracts C."""
        return len(self.ad_id)

    @property
    def eligible(self) -> NDArray[np.bool_]:
        """Which contract targets which cell [cells, C]."""
        by_cell = self.regions[:, :, None, None] & self.genders[:, None, :, None] & self.ages[:, None, None, :]
        return np.ascontiguousarray(by_cell.reshape(self.count, -1).T)


@dataclass(frozen=True)
class Requests:
    """k requests in the order of time, each with its whole queue of candidates. The arrays are read-only by custom."""

    request_id: NDArray[np.int64]  # [k], increasing
    time: NDArray[np.float64]  # [k], days since the day began, in [0, 1)
    window: NDArray[np.int64]  # [k]
    cell: NDArray[np.int64]  # [k]
    slot: NDArray[np.int64]  # [k], where on the page the ad stands
    bid_ad: NDArray[np.int64]  # [k, B], ad id of each bid; 0 where there is none
    ecpm: NDArray[np.float32]  # [k, B], currency per 1000 impressions; 0: no ad in this bid slot
    bid_ctr: NDArray[np.float32]  # [k, B], predicted click rate of the bidding ads
    ctr: NDArray[np.float32]  # [k, C], predicted click rate of the contract ads
    eligible: NDArray[np.bool_]  # [k, C], targeted and not filtered
    billing: NDArray[np.float32]  # [k], uniform in [0, 1): an impression counts where it is below the billed rate
    logged: NDArray[np.int64]  # [k], queue slot that a log shows (contract index, or C + bid slot); -1: unknown
    logged_billed: NDArray[np.int8]  # [k], 1 or 0: whether the logged impression was billed; -1: unknown

    def __len__(self) -> int:
        return len(self.time)

    def part(self, begin: int, end: int) -> Requests:
        """Requests begin .. end - 1, as views."""
        return self._map(lambda values: values[begin:end])

    def take(self, rows: NDArray[Any]) -> Requests:
        """The requests at `rows`, copied."""
        return self._map(lambda values: values[rows])

    def _map(self, change: Any) -> Requests:
        return replace(self, **{item.name: change(getattr(self, item.name)) for item in fields(self)})

    @staticmethod
    def join(parts: Sequence[Requests]) -> Requests:
        """All requests of `parts`, one after the other."""
        return Requests(
            **{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Requests)}
        )

    @property
    def best_bid(self) -> NDArray[np.float64]:
        """e_i [k]: what the highest bid pays for one impression, in currency; 0 without bids."""
        if not self.ecpm.shape[1]:
            return np.zeros(len(self))
        return self.ecpm.max(1).astype(np.float64) / 1000

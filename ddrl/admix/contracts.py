"""What every part of ad mixing shares: contract ads, the cells of visitors, requests, days, the forecast of a day's
supply, and pacing by it.

A cell is one combination of region, gender and age: cell = (region * 2 + gender) * ages + age. Arrays over contracts
are [C], over cells [cells], over bid slots [B], over windows [W].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError
from ddrl.core.specs import Array, Flags, Floats, Floats32, Ints

GENDERS = 2
REQUEST_TYPES: dict[str, Any] = {  # of the arrays of `Requests`, as the kernel takes them
    "request_id": np.int64,
    "time": np.float64,
    "window": np.int64,
    "cell": np.int64,
    "slot": np.int64,
    "bid_ad": np.int64,
    "ecpm": np.float32,
    "bid_ctr": np.float32,
    "ctr": np.float32,
    "eligible": np.bool_,
    "billing": np.float32,
    "logged": np.int64,
    "logged_billed": np.int8,
}


@dataclass(frozen=True)
class Contracts:
    """The contracts of a day: what each advertiser has booked."""

    ad_id: Ints  # [C], positive and different
    demand: Floats  # [C], billed impressions due at the day's end
    penalty: Floats  # [C], currency for each missing impression
    cap: Floats  # [C], impressions after which the ad is not shown
    regions: Flags  # [C, regions], targeted
    genders: Flags  # [C, 2]
    ages: Flags  # [C, ages]
    billed_rate: Floats  # [C], what was billed of what was shown in the past

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
    def visitors(self) -> tuple[int, int, int]:
        """Numbers of regions, genders and ages: the shape of the cells."""
        return self.regions.shape[1], self.genders.shape[1], self.ages.shape[1]

    @property
    def eligible(self) -> Flags:
        """Which contract targets which cell [cells, C]."""
        by_cell = self.regions[:, :, None, None] & self.genders[:, None, :, None] & self.ages[:, None, None, :]
        return np.ascontiguousarray(by_cell.reshape(self.count, -1).T)


@dataclass(frozen=True)
class Requests:
    """k requests in the order of time, each with its whole queue of candidates. The arrays are read-only by custom."""

    request_id: Ints  # [k], increasing
    time: Floats  # [k], days since the day began, in [0, 1)
    window: Ints  # [k]
    cell: Ints  # [k]
    slot: Ints  # [k], place of the ad on the page
    bid_ad: Ints  # [k, B], ad id of each bid; 0 where there is none
    ecpm: Floats32  # [k, B], currency per 1000 impressions; 0: no ad in this bid slot
    bid_ctr: Floats32  # [k, B], predicted click rate of the bidding ads
    ctr: Floats32  # [k, C], predicted click rate of the contract ads
    eligible: Flags  # [k, C], targeted and not filtered
    billing: Floats32  # [k], uniform in [0, 1): an impression counts where it is below the billed rate
    logged: Ints  # [k], queue slot that a log shows (contract index, or C + bid slot); -1: unknown
    logged_billed: NDArray[np.int8]  # [k], 1 or 0: whether the logged impression was billed; -1: unknown

    def __len__(self) -> int:
        return len(self.time)

    def part(self, begin: int, end: int) -> Requests:
        """Requests begin .. end - 1, as views."""
        return self._map(lambda values: values[begin:end])

    def by_window(self) -> Iterator[Requests]:
        """Parts, as views, that lie within one window each."""
        cuts = np.flatnonzero(np.diff(self.window)) + 1
        for begin, end in zip([0, *cuts], [*cuts, len(self)], strict=True):
            yield self.part(int(begin), int(end))

    def take(self, rows: Array) -> Requests:
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
    def best_bid(self) -> Floats:
        """e_i [k]: what the highest bid pays for one impression, in currency; 0 without bids."""
        if not self.ecpm.shape[1]:
            return np.zeros(len(self))
        return self.ecpm.max(1).astype(np.float64) / 1000


def request_arrays(places: int, length: int, contracts: int, bids: int) -> dict[str, Array]:
    """Arrays [places, length, ...] for requests of several days, by the names of `Requests`, for the kernel to read."""
    widths = {"bid_ad": (bids,), "ecpm": (bids,), "bid_ctr": (bids,), "ctr": (contracts,), "eligible": (contracts,)}
    return {name: np.zeros((places, length, *widths.get(name, ())), dtype) for name, dtype in REQUEST_TYPES.items()}


# ---- inventory ------------------------------------------------------------------------------------------------------
# The inventory forecast, and what the bipartite graph of supply and demand yields: theta and the day's play curves.
#
# Supply nodes are cells of visitors, demand nodes are contracts, an edge joins a contract with each cell it targets.


@dataclass(frozen=True)
class Inventory:
    """Forecast supply of a day beside what contracts demand of it."""

    contracts: Contracts
    supply: Floats  # [W, cells], requests expected in each window
    usable: float = 1.0  # share of the targeted requests that no filter keeps from a contract

    @property
    def requests(self) -> float:
        """Requests expected in the whole day."""
        return float(self.supply.sum())

    @cached_property
    def eligible(self) -> Flags:
        """The edges of the graph [cells, C]."""
        return self.contracts.eligible

    @cached_property
    def contract_supply(self) -> Floats:
        """S_j [C]: expected requests whose queue may hold contract j."""
        return self.usable * (self.supply.sum(0) @ self.eligible)

    @cached_property
    def curve(self) -> Floats:
        """Share of a contract's supply that has arrived by the end of each window [W + 1, C]; 0 first, 1 last.

        A contract that no cell supplies follows the curve of the whole day."""
        arrived = np.concatenate([np.zeros((1, self.contracts.count)), np.cumsum(self.supply @ self.eligible, 0)])
        whole = np.concatenate([[0.0], np.cumsum(self.supply.sum(1))])
        share = whole / whole[-1] if whole[-1] > 0 else np.linspace(0, 1, len(whole))
        return np.divide(
            arrived, arrived[-1], out=np.repeat(share[:, None], arrived.shape[1], 1), where=arrived[-1] > 0
        )

    def split(self) -> Floats:
        """theta_j = d_j / S_j, at most 1 [C]: the share of its supply that contract j needs for itself.

        Demand is divided by the past billed rate: what is billed is less than what is shown."""
        supply = self.contract_supply
        share = np.divide(self._impressions(), supply, out=np.ones_like(supply), where=supply > 0)
        return np.minimum(1.0, share)

    def water(self) -> Floats:
        """theta [C] by the order of scarcity (Chen et al. 2012, "Ad serving using a compact allocation plan", HWM).

        Contracts take their share of each cell in the order of S_j; theta_j solves
        sum over cells of min(rest, theta_j * supply) = d_j, with rest what earlier contracts left; 1 where it cannot.
        O(C cells log cells)."""
        supply = self.usable * self.supply.sum(0)
        rest = supply.copy()
        theta = np.ones(self.contracts.count)
        demand = self._impressions()
        for contract in np.argsort(self.contract_supply, kind="stable"):
            cells = np.flatnonzero(self.eligible[:, contract] & (supply > 0))
            ratio = rest[cells] / supply[cells]  # the cell is used up once theta exceeds this
            order = np.argsort(ratio)
            cells = cells[order]
            ratio = ratio[order]
            full = np.cumsum(rest[cells])
            open_supply = supply[cells].sum() - np.cumsum(supply[cells])
            reached = full + ratio * open_supply  # what theta = ratio[k] yields
            if len(cells) and reached[-1] >= demand[contract]:
                first = int(np.searchsorted(reached, demand[contract]))
                used = full[first - 1] if first else 0.0
                theta[contract] = (demand[contract] - used) / supply[cells[first:]].sum()
            rest[cells] -= np.minimum(rest[cells], theta[contract] * supply[cells])
        return theta

    def _impressions(self) -> Floats:
        return self.contracts.demand / np.maximum(self.contracts.billed_rate, 1e-3)


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
    def billed_rate(self) -> Floats:
        """Probability that an impression counts, by window and contract [W, C]."""
        ...

    @property
    def inventory(self) -> Inventory:
        """What was forecast of the day before it began."""
        ...

    def __iter__(self) -> Iterator[Requests]:
        """The day's requests, in the order of time, in parts that lie within one window each."""
        ...


# ---- pacing ---------------------------------------------------------------------------------------------------------
# Adaptive pacing: duals that follow the rate which the remaining demand needs. A baseline, and a prior of policies.


UNKNOWN = -1.0  # what was due at the last decision, where there was none


class Pacing:
    """alpha_j += step p_j (needed - delivered since the last decision) / d_j, in [0, p_j], for n days.

    Needed is what the remaining demand asks of the part of the play curve that has passed:
    (d_j - delivered) (curve step) / (curve left)."""

    def __init__(self, contracts: Contracts, step: float, count: int) -> None:
        self._demand = np.maximum(contracts.demand, 1)
        self._penalty = contracts.penalty
        self._step = step
        # [3, n, C]: alpha [currency]; what was due and delivered at the last decision, as shares of the demand
        self.state = np.zeros((3, count, contracts.count))

    def begin(self, day: int, alpha: Floats, *, midway: bool = False) -> None:
        """A new day in place `day`, from duals [C]; one that begins midway keeps them for its first decision."""
        self.state[:, day] = np.stack([alpha, np.full_like(alpha, UNKNOWN if midway else 0.0), np.zeros_like(alpha)])

    def decide(self, due: Floats, estimate: Floats, rate: Floats) -> Floats:
        """One step. Given [n, C] impressions due, billed as estimated, and the billed rate: the worth [currency] of one
        more impression of each contract [n, C], the rate times alpha."""
        alpha, past_due, past_delivered = self.state
        due = due / self._demand
        delivered = estimate / self._demand
        past_due = np.where(past_due == UNKNOWN, due, past_due)
        needed = (1 - past_delivered) * (due - past_due) / np.maximum(1 - past_due, 1e-3)
        change = self._step * self._penalty * (needed - (delivered - past_delivered))
        self.state = np.stack([np.clip(alpha + change, 0, self._penalty), due, delivered])
        return rate * self.state[0]

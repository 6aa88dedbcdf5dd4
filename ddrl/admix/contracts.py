"""What every part of ad mixing shares: contract ads, the cells of visitors, requests, days, the forecast of a day's
supply, pacing by it, and the tables of days that are played.

A cell is one combination of region, gender and age: cell = (region * 2 + gender) * ages + age. Arrays over contracts
are [C], over cells [cells], over bid slots [B], over windows [W].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.admix.settings import OVERALL_FIELDS, TRAFFIC_FIELDS, PlayConfig
from ddrl.core.errors import EnvError
from ddrl.core.specs import Array, ArraySpec, Bytes, Column, EnvSpec, Flags, Floats, Floats32, Ints

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


# ---- states and tables ----------------------------------------------------------------------------------------------
# The rules of ad mixing from Python: what a state contains, and the tables that the kernel's queue reads and writes.
# The rules themselves are in `kernel/ad_queue.hpp`; the environment, the baselines and the server all play by a
# `Tables`.
#
# A state has the arrays `queue_mask` [Q], `ad_id` [Q], `prior` [Q], `slot_id` [], `ad` [Q, fields], `overall` [fields]
# and `traffic` [one-hot], as far as the settings ask for them. Contract j is in slot j of the queue, bid b in slot
# C + b, unless the queue is shuffled. Entries outside the mask are 0.

ENV_ID = "ddrl/AdMixing-v0"
COLUMNS = (
    Column("chosen", (), "int32"),  # place in the queue of the ad shown; -1: none
    Column("score", (), "float32"),  # the score it was chosen by
    Column("revenue", (), "float32"),  # what showing it is worth: the bid, or the click's value [currency / 1000]
    Column("logged", (), "int32"),  # place in the queue of the ad that the log shows; -1: unknown
)
# Columns of "ad" that the kernel computes, in the order of its AdField; other columns are constant.
AD_COLUMNS = ("ecpm", "ctr", "value", "impressions", "pace", "cap", "late", "need", "rate")
SUPPORT = ("off", "late", "fresh")  # in the order of the kernel's Support
MAX_PACE = 4.0  # largest pace and need that a state shows, as in the kernel
ECPM = 1000.0  # units of bids in one unit of currency


class StateLayout:
    """The arrays of a state by the settings, their constant parts, and the actions that belong to them."""

    def __init__(self, contracts: Contracts, bids: int, play: PlayConfig, click_value: float) -> None:
        """`bids`: slots for bids that a queue has (in mode bonuses a state leaves them out); `click_value` [currency]
        of a click on a contract ad."""
        self.contracts = contracts
        self.bids = bids
        self.play = play
        self.click_value = click_value
        self.queue = contracts.count + (0 if play.mode == "bonuses" else bids)  # places that a policy sees
        self.ad_fields = tuple(name for name in play.ad_fields if name not in ("ad_id", "slot_id"))

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The named arrays of one state."""
        play = self.play
        arrays = {"queue_mask": ArraySpec((self.queue,), "bool")}
        if "ad_id" in play.ad_fields:
            arrays["ad_id"] = ArraySpec((self.queue,), "int32", axes=("queue",))
        if play.prior != "off":
            arrays["prior"] = ArraySpec((self.queue,), "float32", axes=("queue",))
        if "slot_id" in play.ad_fields:
            arrays["slot_id"] = ArraySpec((), "int32")
        if self.ad_fields:
            arrays["ad"] = ArraySpec((self.queue, len(self.ad_fields)), "float32", axes=("queue", ""))
        if play.overall_fields:
            arrays["overall"] = ArraySpec((len(play.overall_fields),), "float32", axes=("",))
        if play.traffic_fields:
            arrays["traffic"] = ArraySpec((self.traffic_rows().shape[1],), "float32", axes=("",))
        return arrays

    @property
    def spec(self) -> EnvSpec:
        """What a policy sees and gives."""
        contracts = self.contracts
        if self.play.mode == "bonuses":
            high = contracts.penalty  # no bonus above the penalty is ever of use
        else:
            places = self.queue if self.play.mode == "all" else contracts.count
            high = np.full(places, contracts.penalty.max() + self.click_value)
        return EnvSpec(
            ENV_ID,
            ArraySpec.record(self.arrays),
            0,
            ArraySpec((len(high),), "float32"),
            columns=COLUMNS,
            reward_shape=(contracts.count,) if self.play.reward_by == "contract" else (),
            action_low=(0.0,) * len(high),
            action_high=tuple((ECPM * high).tolist()),
        )

    def rows(self, required: Floats, theta: Floats) -> Floats32:
        """The constant values of the contracts' rows of "ad" [..., C, fields]; `required` [..., C] is d_j / S_j."""
        rows = np.zeros((*required.shape, len(self.ad_fields)), np.float32)
        constant = {"kind": 1.0, "required": required, "penalty": ECPM * self.contracts.penalty, "theta": theta}
        for index, name in enumerate(self.ad_fields):
            rows[..., index] = constant.get(name, 0.0)
        return rows

    def bid_row(self) -> Floats32:
        """The same of a bid [fields]."""
        return np.array([float(name in ("theta", "cap")) for name in self.ad_fields], np.float32)

    def traffic_rows(self) -> Floats32:
        """The array "traffic" of each cell [cells, size]."""
        visitors = self.contracts.visitors
        cells = np.arange(np.prod(visitors))
        values: dict[str, Array] = dict(zip(TRAFFIC_FIELDS, np.unravel_index(cells, visitors), strict=True))
        sizes: dict[str, int] = dict(zip(TRAFFIC_FIELDS, visitors, strict=True))
        rows = [np.zeros((len(cells), 0), np.float32)]
        rows += [np.eye(sizes[name], dtype=np.float32)[values[name]] for name in self.play.traffic_fields]
        return np.concatenate(rows, 1)


class Tables:
    """The tables of `places` days that are played side by side, and the kernel's queue that reads and writes them.

    Arrays are [places, C] where nothing else is said."""

    def __init__(
        self,
        layout: StateLayout,
        windows: int,
        places: int = 1,
        *,
        per_currency: float = ECPM,
        delay: int = 0,
        seed: int = 0,
    ) -> None:
        """`per_currency`: units of bids and scores in one unit of currency; `delay` [requests] of the news of billing;
        `seed`: of the draws by rate and theta of requests given as lists."""
        from ddrl.admix._kernel import AdQueue  # whoever reads logs alone needs no kernel

        contracts = layout.contracts
        play = layout.play
        shape = (places, contracts.count)
        self.layout = layout
        # Known before a day begins.
        self.cap = np.tile(contracts.cap, (places, 1))
        self.curve = np.zeros((places, windows + 1, contracts.count))  # share of a contract's supply that has arrived
        self.billed_rate = np.zeros((places, windows, contracts.count))  # probability that an impression is billed
        self.prior = np.zeros(shape, np.float32)  # bonus [eCPM] that a policy departs from
        self.rows = np.zeros((*shape, len(layout.ad_fields)), np.float32)  # constant values of "ad"
        # Play control: probabilities.
        self.rate = np.full(shape, play.rate)
        self.theta = np.ones(shape)
        # Counts of impressions; seen: of those whose billing is known.
        self.shown = np.zeros(shape)
        self.billed = np.zeros(shape)
        self.seen_shown = np.zeros(shape)
        self.seen_billed = np.zeros(shape)
        # As of the present request: what is due by now, billed impressions by what is known (with those under way at
        # the estimated rate, where own counts are known), and the billed rate with the past rate as a prior.
        self.due = np.zeros(shape)
        self.estimate = np.zeros(shape)
        self.today_rate = np.zeros(shape)
        # [places, 5]: contract ads shown, sum of their ctr, bids shown, sum of their ctr, sum of their eCPM
        self.sums = np.zeros((places, 5))
        self.events = np.zeros(5, np.int64)  # requests, empty queues, contracts shown, bids shown, billed
        # What requests played since these were set to 0 have earned [currency], weighted; the last one's ad.
        self.value = np.zeros((places, contracts.count + 1))  # by contract, and of bids
        self.gain = np.zeros(shape)
        self.revenue = np.zeros(places)
        self.score = np.zeros(places)
        self.chosen = np.zeros(places, np.int64)  # slot; -1: none
        self.logged = np.zeros(places, np.int64)
        self.pacing = Pacing(contracts, play.pace_step, places) if play.pace_step else None
        arrays = {name: values for name, values in vars(self).items() if isinstance(values, np.ndarray)}
        constants = {
            "ids": contracts.ad_id,
            "demand": contracts.demand,
            "past_rate": contracts.billed_rate,
            "eligible": contracts.eligible,
            "bid_row": layout.bid_row(),
            "traffic_rows": layout.traffic_rows(),
        }
        sizes: dict[str, Any] = {
            "places": places,
            "contracts": contracts.count,
            "bids": layout.bids,
            "windows": windows,
            "cells": len(constants["traffic_rows"]),
            "traffic": constants["traffic_rows"].shape[1],
            "delay": delay,
            "ad_fields": [AD_COLUMNS.index(name) if name in AD_COLUMNS else -1 for name in layout.ad_fields],
            "overall_fields": [OVERALL_FIELDS.index(name) for name in play.overall_fields],
            "click_value": per_currency * layout.click_value,
            "per_currency": per_currency,
            "own_counts": play.own_counts,
            "bonuses": play.mode == "bonuses",
            "support": SUPPORT.index(play.support),
            "support_gap": float(play.support_gap),
            "ctr_weight": float(play.ctr_weight),
            "bid_weight": float(play.bid_weight),
            "relative": play.relative,
        }
        contiguous = {name: np.ascontiguousarray(values) for name, values in constants.items()}
        self.queue = AdQueue(arrays | contiguous, sizes, seed)

    def begin_day(self, place: int, day: Day, *, midway: bool = False) -> None:
        """A new day in `place`: nothing shown, and what is known of it beforehand. `midway`: play begins later."""
        play = self.layout.play
        contracts = self.layout.contracts
        inventory = day.inventory
        required = inventory.split()
        self.curve[place] = inventory.curve
        self.billed_rate[place] = day.billed_rate
        if play.theta != "off":
            self.theta[place] = required if play.theta == "split" else inventory.water()
        self.rows[place] = self.layout.rows(required, self.theta[place])
        alpha = np.zeros(contracts.count)  # the duals [currency] that a policy departs from
        rate = np.ones(contracts.count)
        if play.prior == "demand":
            alpha = required * contracts.penalty
        elif play.prior == "yesterday":
            alpha = cast(Any, day).yesterday_alpha  # a log has none, which is refused before
            rate = contracts.billed_rate
        self.prior[place] = ECPM * alpha * rate
        if self.pacing:
            self.pacing.begin(place, alpha, midway=midway)
        self.queue.begin_day(place)

    def set_theta(self, where: Any, values: Any) -> None:
        """Set theta at the places `where`, also where policies see it."""
        self.theta[where] = values
        if "theta" in self.layout.ad_fields:
            self.rows[..., self.layout.ad_fields.index("theta")] = self.theta

    def pace(self) -> None:
        """The prior of a new decision, by what is due and known as of the present requests, where pacing moves it."""
        if self.pacing:
            self.prior[...] = ECPM * self.pacing.decide(self.due, self.estimate, self.today_rate)


def outputs_of(state: Array) -> dict[str, tuple[Bytes, int]]:
    """Where the kernel writes the fields of a structured array [places]."""
    fields = state.dtype.fields or {}
    own = state.view(np.uint8).reshape(len(state), -1)
    return {name: (own, fields[name][1]) for name in fields}

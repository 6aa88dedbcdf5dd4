"""The rules of ad mixing from Python: what a state contains, and the tables that the kernel's queue reads and writes.

The rules themselves are in `kernel/ad_queue.hpp`; the environment, the baselines and the server all play by a
`Tables`. A state has the arrays `queue_mask` [Q], `ad_id` [Q], `prior` [Q], `slot_id` [], `ad` [Q, fields], `overall`
[fields] and `traffic` [one-hot], as far as the settings ask for them. Contract j is in slot j of the queue, bid b in
slot C + b, unless the queue is shuffled. Entries outside the mask are 0.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ddrl.admix._kernel import AdQueue
from ddrl.admix.contracts import Contracts, Day, Pacing
from ddrl.admix.settings import OVERALL_FIELDS, TRAFFIC_FIELDS, PlayConfig
from ddrl.core.specs import Array, ArraySpec, Bytes, Column, EnvSpec, Floats, Floats32

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

"""The rules of ad mixing from Python: tables for the kernel `ddrl.admix._kernel.AdQueue`, and what a state contains.

The environment, the baselines and the server make their queue here; the rules are in `kernel/ad_queue.hpp`. A state has
the arrays `queue_mask` [Q], `ad_id` [Q], `prior` [Q], `slot_id` [], `ad` [Q, fields], `overall` [fields] and `traffic`
[one-hot], as far as the settings ask for them. Contract j is in slot j of the queue, bid b in slot C + b, unless the
queue is shuffled. Entries outside the mask are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.admix._kernel import AdQueue
from ddrl.admix.contracts import GENDERS, Contracts
from ddrl.admix.settings import OVERALL_FIELDS, PlayConfig
from ddrl.core.specs import ArraySpec

# Columns of "ad" that the kernel computes, in the order of its AdField; other columns are constant.
AD_COLUMNS = ("ecpm", "ctr", "value", "impressions", "pace", "cap", "late", "need", "rate")
SUPPORT = ("off", "late", "fresh")  # in the order of the kernel's Support
MAX_PACE = 4.0  # largest pace and need that a state shows, as in the kernel
ECPM = 1000.0  # units of bids in one unit of currency


class Counts:
    """Counts of `places` days side by side, which the kernel writes: [places, C] where nothing else is said."""

    def __init__(self, places: int, contracts: int) -> None:
        shape = (places, contracts)
        self.shown = np.zeros(shape)  # impressions
        self.billed = np.zeros(shape)
        self.seen_shown = np.zeros(shape)  # of impressions whose billing is known
        self.seen_billed = np.zeros(shape)
        # As of the present request: what is due by now, billed impressions by what is known (with those under way at
        # the estimated rate, where own counts are known), and the billed rate with the past rate as a prior.
        self.due = np.zeros(shape)
        self.estimate = np.zeros(shape)
        self.today_rate = np.zeros(shape)
        # [places, 5]: contract ads shown, sum of their ctr, bids shown, sum of their ctr, sum of their eCPM
        self.sums = np.zeros((places, 5))
        self.events = np.zeros(5, np.int64)  # requests, empty queues, contracts shown, bids shown, billed


class StateLayout:
    """The arrays of a state by the settings, and their constant parts."""

    def __init__(self, contracts: Contracts, bids: int, play: PlayConfig) -> None:
        """`bids`: slots for bids that a queue has; in mode bonuses a state leaves them out."""
        self._contracts = contracts
        self._play = play
        self.queue = contracts.count + (0 if play.mode == "bonuses" else bids)  # places that a policy sees
        self.ad_fields = tuple(name for name in play.ad_fields if name not in ("ad_id", "slot_id"))
        self._sizes = {"region": contracts.regions.shape[1], "gender": GENDERS, "age": contracts.ages.shape[1]}

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The named arrays of one state."""
        play = self._play
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

    def rows(self, required: NDArray[np.float64], theta: NDArray[np.float64]) -> NDArray[np.float32]:
        """The constant values of the contracts' rows of "ad" [n, C, fields]; `required` [n, C] is d_j / S_j, `theta`
        [n, C]."""
        rows = np.zeros((*required.shape, len(self.ad_fields)), np.float32)
        constant = {"kind": 1.0, "required": required, "penalty": 1000 * self._contracts.penalty, "theta": theta}
        for index, name in enumerate(self.ad_fields):
            rows[:, :, index] = constant.get(name, 0.0)
        return rows

    def bid_row(self) -> NDArray[np.float32]:
        """The same of a bid [fields]."""
        return np.array([float(name in ("theta", "cap")) for name in self.ad_fields], np.float32)

    def traffic_rows(self) -> NDArray[np.float32]:
        """The array "traffic" of each cell [cells, size]."""
        ages = self._sizes["age"]
        cells = np.arange(self._sizes["region"] * GENDERS * ages)
        values = {"region": cells // (GENDERS * ages), "gender": cells // ages % GENDERS, "age": cells % ages}
        rows = [np.zeros((len(cells), 0), np.float32)]
        rows += [np.eye(self._sizes[name], dtype=np.float32)[values[name]] for name in self._play.traffic_fields]
        return np.ascontiguousarray(np.concatenate(rows, 1))


def make_queue(
    counts: Counts,
    contracts: Contracts,
    play: PlayConfig,
    tables: dict[str, NDArray[Any]],
    *,
    bids: int,
    click_value: float,
    per_currency: float = ECPM,
    ad_fields: tuple[str, ...] = (),
    delay: int = 0,
    seed: int = 0,
) -> AdQueue:
    """The kernel's queue that writes `counts`. `tables` at least: cap, curve, rate, theta [places, ...].

    `bids`: slots; `click_value` [currency]; `per_currency`: units of bids and scores in one unit of currency; `delay`
    [requests] of billing; `seed`: of the draws by rate and theta of requests given as lists."""
    places, windows, _ = tables["curve"].shape
    sizes: dict[str, Any] = {
        "places": places,
        "contracts": contracts.count,
        "bids": bids,
        "windows": windows - 1,
        "cells": len(tables.get("traffic_rows", ())),
        "traffic": tables["traffic_rows"].shape[1] if "traffic_rows" in tables else 0,
        "delay": delay,
        "ad_fields": [AD_COLUMNS.index(name) if name in AD_COLUMNS else -1 for name in ad_fields],
        "overall_fields": [OVERALL_FIELDS.index(name) for name in play.overall_fields],
        "click_value": per_currency * click_value,
        "per_currency": per_currency,
        "own_counts": play.own_counts,
        "bonuses": play.mode == "bonuses",
        "support": SUPPORT.index(play.support),
        "support_gap": float(play.support_gap),
        "ctr_weight": float(play.ctr_weight),
        "bid_weight": float(play.bid_weight),
        "relative": play.relative,
    }
    known = {"ids": contracts.ad_id, "demand": contracts.demand, "past_rate": contracts.billed_rate}
    known = {name: np.ascontiguousarray(values) for name, values in known.items()}
    return AdQueue(known | tables | vars(counts), sizes, seed)


def outputs_of(state: NDArray[Any]) -> dict[str, tuple[NDArray[np.uint8], int]]:
    """Where the kernel writes the fields of a structured array [places]."""
    fields = state.dtype.fields or {}
    own = state.view(np.uint8).reshape(len(state), -1)
    return {name: (own, fields[name][1]) for name in fields}

"""The state that a policy sees (fields chosen by settings), written into one structured array [n].

`ad` [n, Q, fields], `ad_id` [n, Q], `queue_mask` [n, Q], `slot_id` [n], `overall` [n, fields], `traffic` [n, one-hot].
Contract j stands in queue slot j, bid b in slot C + b, unless the queue is shuffled. What the mask leaves out is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.envs.admix.contracts import GENDERS, Contracts
from ddrl.envs.admix.delivery import Delivery
from ddrl.envs.admix.joint import Field
from ddrl.envs.admix.settings import PlayConfig

MAX_PACE = 4.0


class StateWriter:
    """Writes observations of n environments that play the same contracts."""

    def __init__(self, count: int, contracts: Contracts, bids: int, play: PlayConfig) -> None:
        self.contracts = contracts
        self._bids = bids
        self._count = count
        self._ad_fields = tuple(name for name in play.ad_fields if name not in ("ad_id", "slot_id"))
        self._overall_fields = play.overall_fields
        self._traffic_fields = play.traffic_fields
        self._ids = "ad_id" in play.ad_fields
        self._slots = "slot_id" in play.ad_fields
        self._prior = play.prior != "off"
        self._sizes = {"region": contracts.regions.shape[1], "gender": GENDERS, "age": contracts.ages.shape[1]}
        self._all = np.arange(count)

    @property
    def ad_fields(self) -> tuple[str, ...]:
        """Columns of a row of "ad"."""
        return self._ad_fields

    @property
    def fields(self) -> tuple[Field, ...]:
        """Named arrays of one observation, without the queue's mask."""
        queue = self.contracts.count + self._bids
        named = []
        if self._ids:
            named.append(Field("ad_id", (queue,), "int32", ("queue",)))
        if self._prior:
            named.append(Field("prior", (queue,), "float32", ("queue",)))
        if self._slots:
            named.append(Field("slot_id", (), "int32", ()))
        if self._ad_fields:
            named.append(Field("ad", (queue, len(self._ad_fields)), "float32", ("queue", "")))
        if self._overall_fields:
            named.append(Field("overall", (len(self._overall_fields),), "float32", ("",)))
        if self._traffic_fields:
            named.append(Field("traffic", (sum(self._sizes[name] for name in self._traffic_fields),), "float32", ("",)))
        return tuple(named)

    def prepare(
        self,
        dtype: np.dtype[Any],
        required: NDArray[np.float64],
        theta: NDArray[np.float64],
    ) -> None:
        """Begin with an array that holds what stays: `required` [n, C] is d_j / S_j, `theta` [n, C]."""
        self._state = np.zeros(self._count, dtype)
        count = self.contracts.count
        contracts = self.contracts
        constant = {
            "kind": (1.0, 0.0),
            "required": (required, 0.0),
            "penalty": (1000 * contracts.penalty, 0.0),
            "theta": (theta, 1.0),
            "cap": (1.0, 1.0),
        }
        for index, name in enumerate(self._ad_fields):
            if name in constant:
                self._state["ad"][:, :count, index], self._state["ad"][:, count:, index] = constant[name]
        if self._ids:
            self._state["ad_id"][:, :count] = contracts.ad_id

    def constant_rows(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What stays of a row of "ad" in the first environment after `prepare`: of each contract [C, fields], and of a
        bid [fields]."""
        rows = self._state["ad"][0]
        count = self.contracts.count
        return rows[:count].copy(), rows[count].copy() if len(rows) > count else np.zeros(rows.shape[1], np.float32)

    def write(
        self,
        request: dict[str, NDArray[Any]],
        has_request: NDArray[np.bool_],
        mask: NDArray[np.bool_],
        delivery: Delivery,
        estimate: NDArray[np.float64],
        due: NDArray[np.float64],
        overall: dict[str, NDArray[np.float64]],
        value: NDArray[np.float32],
        prior: NDArray[np.float64],
    ) -> NDArray[Any]:
        """A new array of states [n]; `due` [n, C] impressions, `value` [n, C] of a click on a contract and `prior`
        [n, C], both eCPM."""
        state = self._state
        count = self.contracts.count
        state["queue_mask"] = mask
        bids_shown = mask.shape[1] > count
        if self._ids and bids_shown:
            state["ad_id"][:, count:] = request["bid_ad"]
        if self._slots:
            state["slot_id"] = request["slot"]
        if self._prior:
            state["prior"][:, :count] = prior
        for index, name in enumerate(self._ad_fields):
            ads = state["ad"][:, :count, index]
            bids = state["ad"][:, count:, index]
            if name == "ecpm" and bids_shown:
                bids[...] = request["ecpm"]
            elif name == "ctr":
                ads[...] = request["ctr"]
                if bids_shown:
                    bids[...] = request["bid_ctr"]
            elif name == "value":
                ads[...] = value
                if bids_shown:
                    bids[...] = request["ecpm"]
            elif name == "impressions":
                ads[...] = estimate / np.maximum(self.contracts.demand, 1)
            elif name == "pace":
                ads[...] = np.minimum(estimate / np.maximum(due, 1), MAX_PACE)
            elif name == "cap":
                ads[...] = 1 - delivery.shown / np.maximum(self.contracts.cap, 1)
            elif name == "late":
                ads[...] = 100 * (due - estimate) / np.maximum(self.contracts.demand, 1)
            elif name == "need":
                demand = self.contracts.demand
                ads[...] = np.clip((demand - estimate) / np.maximum(demand - due, 0.02 * demand + 1e-9), 0, MAX_PACE)
            elif name == "rate":
                ads[...] = delivery.rate / np.maximum(self.contracts.billed_rate, 1e-6)
        for index, name in enumerate(self._overall_fields):
            state["overall"][:, index] = overall[name]
        if self._traffic_fields:
            self._write_traffic(request["cell"], has_request)
        written = state.copy()
        if self._ids:
            written["ad_id"] *= mask
        if self._prior:
            written["prior"] *= mask
        if self._ad_fields:
            written["ad"] *= mask[:, :, None]
        return written

    def _write_traffic(self, cell: NDArray[np.int64], has_request: NDArray[np.bool_]) -> None:
        ages = self._sizes["age"]
        values = {"region": cell // (GENDERS * ages), "gender": cell // ages % GENDERS, "age": cell % ages}
        traffic = self._state["traffic"]
        begin = 0
        traffic[...] = 0
        for name in self._traffic_fields:
            traffic[self._all, begin + values[name]] = has_request
            begin += self._sizes[name]

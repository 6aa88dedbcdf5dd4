"""Where ad mixing meets the house's joints: the one file that knows how observations, columns and steps are declared.

An observation batch is one numpy structured array [N] with named fields. The axis "queue" is padded with zeros;
`queue_mask` says which of its places hold an ad. The rest of the package uses the four functions below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.admix.contracts import GENDERS, Contracts, Inventory, Pacing, Requests, estimate_rate
from ddrl.admix.settings import PlayConfig
from ddrl.core.errors import ConfigError, EnvError
from ddrl.core.specs import ArraySpec, Column, EnvSpec, EnvStep

# -- joint -------------------------------------------------------------------------------------------------------------

ENV_ID = "ddrl/AdMixing-v0"
COLUMNS = (
    Column("chosen", (), "int32"),  # place in the queue of the ad shown; -1: none
    Column("score", (), "float32"),  # the score it was chosen by
    Column("revenue", (), "float32"),  # what showing it is worth: the bid, or the click's value [currency / 1000]
    Column("logged", (), "int32"),  # place in the queue of the ad that the log shows; -1: unknown
)


@dataclass(frozen=True)
class Field:
    """One named array of an observation; `axes` names the axes that vary in length, "" for the others."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]


def make_spec(
    fields: tuple[Field, ...], queue: int, highest: Sequence[float], rewards: tuple[int, ...] = ()
) -> EnvSpec:
    """The spec of environments with these named arrays, `queue` places an action between 0 and `highest`, and rewards
    of this shape."""
    arrays = {"queue_mask": ArraySpec((queue,), "bool")}
    arrays |= {each.name: ArraySpec(each.shape, each.dtype, axes=each.axes) for each in fields}
    return EnvSpec(
        ENV_ID, ArraySpec.record(arrays), 0, ArraySpec((len(highest),), "float32"),
        columns=COLUMNS, reward_shape=rewards, action_low=(0.0,) * len(highest), action_high=tuple(highest),
    )  # fmt: skip


def arrays_of(spec: EnvSpec) -> dict[str, ArraySpec]:
    """The named arrays of an observation."""
    return spec.observation.arrays


def dtype_of(spec: EnvSpec) -> np.dtype[Any]:
    """The structured dtype of an observation."""
    return spec.observation.numpy


# -- places ------------------------------------------------------------------------------------------------------------
# The places of a queue: in which order its ads are observed, and whose score is whose.


def draw_order(rng: np.random.Generator, count: int, queue: int, first: int) -> NDArray[np.int64]:
    """Which ad stands in each place of `count` queues [N, Q]; the `first` ones stay before the others (0: none do)."""
    keys = rng.random((count, queue))
    keys[:, first:] += first > 0
    return keys.argsort(1)


def presented(slot: NDArray[np.int64], order: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The place in the queue as observed, in `order` (None: as it is), of an unshuffled slot [N]; -1 stays."""
    if order is None:
        return slot
    return np.where(slot >= 0, (order == slot[:, None]).argmax(1), -1)


def present_columns(state: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Put what a joint state [N] tells of each ad into `order` [N, Q]."""
    for name in ("queue_mask", "ad_id", "prior", "ad"):
        if name in (state.dtype.names or ()):
            values = state[name]
            state[name] = np.take_along_axis(values, order if values.ndim == 2 else order[:, :, None], 1)


def scores_by_slot(
    action: NDArray[Any], ecpm: NDArray[Any], order: NDArray[np.int64] | None, needed: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Scores [N, Q] by unshuffled slot, of an action [N, places] in `order`; what it does not score are bids, which
    stand at their `ecpm` [N, bids]. EnvError where one that is `needed` [N, Q] is no number."""
    scores = np.zeros_like(needed, np.float64)
    count = action.shape[1]
    if count < scores.shape[1]:
        scores[:, count:] = ecpm
    if order is None:
        scores[:, :count] = action
    else:
        np.put_along_axis(scores, order[:, :count], action.astype(np.float64), 1)
    broken = ~np.isfinite(scores) & needed
    if broken.any():
        env, slot = np.argwhere(broken)[0]
        raise EnvError(f"admix: the score of environment {env}, ad slot {slot} is {scores[env, slot]}, not a number")
    return scores


# -- tally -------------------------------------------------------------------------------------------------------------
# What n environments have shown so far: sums of a day, which policies may see, and events of all days.


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


# -- delivery ----------------------------------------------------------------------------------------------------------
# What contracts have got: impressions shown, billed, and what of the billing is known yet, for n environments.
#
# The server knows what it showed. Whether an impression was billed it learns `delay` requests later. Policies and
# baselines see `seen_*` and `estimate`; only the reward uses `billed`.


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


# -- feed --------------------------------------------------------------------------------------------------------------
# From days, given window by window, to one present request for each of n environments.
#
# Each environment has its own place in its own day. Requests are copied piece by piece into buffers [n, PIECE, ...], so
# that one indexed read gives the present requests of all environments as arrays [n, ...].


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


# -- state -------------------------------------------------------------------------------------------------------------
# The state that a policy sees (fields chosen by settings), written into one structured array [n].
#
# `ad` [n, Q, fields], `ad_id` [n, Q], `queue_mask` [n, Q], `slot_id` [n], `overall` [n, fields], `traffic` [n,
# one-hot].
# Contract j stands in queue slot j, bid b in slot C + b, unless the queue is shuffled. What the mask leaves out is 0.


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


# -- block -------------------------------------------------------------------------------------------------------------
# Many requests at once under one action: which ads mode "bonuses" shows, and what that is worth.
#
# The rules are those of `vector`, request by request, where nothing is drawn at random: rate and theta are 1, no
# support
# policy. Contract j stands in slot j, bids behind them.


@dataclass(frozen=True)
class Block:
    """k requests of n environments as they were played; what stands in rows that did not move says nothing."""

    slot: NDArray[np.int64]  # [n, k], shown; -1: nothing
    score: NDArray[np.float64]  # [n, k], of the ad shown
    worth: NDArray[np.float64]  # [n, k], of showing it [currency]
    other: NDArray[np.float64]  # [n, k], the best score of another ad, at least 0
    contracts: int

    @property
    def contract(self) -> NDArray[np.int64]:
        """The contract shown [n, k]; -1: a bid or nothing."""
        return np.where(self.slot < self.contracts, self.slot, -1)

    def by_contract(self, weights: NDArray[Any]) -> NDArray[np.float64]:
        """The sum [n, C] of `weights` [n, k] over the requests that each contract took."""
        rows, columns = np.nonzero(self.contract >= 0)
        count = len(self.slot) * self.contracts
        places = rows * self.contracts + self.slot[rows, columns]
        sums = np.bincount(places, weights[rows, columns], count)
        return sums.astype(np.float64).reshape(-1, self.contracts)

    def first(self, count: int) -> Block:
        """The first `count` requests."""
        slot = self.slot[:, :count]
        score = self.score[:, :count]
        worth = self.worth[:, :count]
        other = self.other[:, :count]
        return Block(slot, score, worth, other, self.contracts)


def play_block(
    request: dict[str, NDArray[Any]],
    bonus: NDArray[np.float32],
    room: NDArray[np.float64],
    moving: NDArray[np.bool_],
    click_value: float,
) -> Block:
    """Show the ad of the highest score at each request [n, k, ...] of the environments `moving` [n], and of
    fewer requests where a contract gets the last of its `room` [n, C] impressions.

    `bonus` [n, C] in eCPM. EnvError for a bonus that is not a number where its contract may be shown."""
    count = bonus.shape[1]
    usable = request["eligible"] & ((room > 0) & moving[:, None])[:, None]
    if not np.isfinite(bonus).all():
        broken = ~np.isfinite(bonus) & usable.any(1)
        if broken.any():
            env, slot = np.argwhere(broken)[0]
            raise EnvError(f"admix: the score of environment {env}, ad slot {slot} is {bonus[env, slot]}, not a number")
    value = np.float32(1000 * click_value) * request["ctr"]
    own = np.where(usable, value + bonus[:, None], -np.inf)
    ecpm = request["ecpm"]
    scores = np.concatenate([own, np.where(ecpm > 0, ecpm, -np.inf)], 2)
    slot = scores.argmax(2)[..., None]
    score = np.take_along_axis(scores, slot, 2)[..., 0].astype(np.float64)
    np.put_along_axis(scores, slot, -np.inf, 2)
    worth = np.take_along_axis(np.concatenate([value, ecpm], 2), slot, 2)[..., 0] / 1000.0
    shows = (score > -np.inf) & moving[:, None]
    block = Block(
        slot=np.where(shows, slot[..., 0], -1),
        score=np.where(shows, score, 0.0),
        worth=np.where(shows, worth, 0.0),
        other=np.maximum(scores.max(2), 0).astype(np.float64),
        contracts=count,
    )
    length = slot.shape[1]
    while length > 1 and (block.by_contract(np.ones(block.slot.shape)) >= np.maximum(room, 1)).any():
        length //= 2  # somebody reaches the cap within the block, and is no candidate from there on
        block = block.first(length)
    return block


# -- vector ------------------------------------------------------------------------------------------------------------
# n ad-mixing environments that step together, in numpy across the environments (`ddrl.core.specs.VectorEnv`).
#
# A step takes the scores of the present queue, shows the ad of the highest score that may play, counts it, and brings
# the
# next request. Rules, in this order:
#
# 1. A contract is in the queue when it is targeted, not filtered, below its cap, and drawn with probability `rate`.
# 2. A contract of the queue may play with probability `theta`; support policies set both aside for some contracts.
# 3. The highest score is shown; of equal scores the lowest slot of the unshuffled queue, so contracts before bids.
# 4. In a queue without a playable ad nothing is shown: revenue 0, counted in `events`.
#
# In mode "bonuses" an action is not a score but what is added to the value of a click, for the next `repeat` requests;
# the state then holds contracts alone, and its mask those below their cap.
#
# The reward is value shown minus the growth of penalties for what is due by now and not billed; with weights of 1 the
# rewards of a day add up to V of `optimum` (billed impressions as drawn).


class AdmixVectorEnv:
    """`count` environments; `days(seed, episode)` gives each its days, all of the same contracts."""

    def __init__(self, days: Days, count: int, play: PlayConfig, click_value: float, bids: int) -> None:
        self.num_envs = count
        self.play = play
        self.click_value = click_value
        self._days = days
        first = days(0, 0)
        if play.prior == "yesterday" and "yesterday_alpha" not in dir(first):  # which computes nothing
            raise ConfigError('play.prior = "yesterday": a log holds one day; set play.prior = "demand" or "off"')
        self.contracts = first.contracts
        self.bids = bids
        self._contracts = self.contracts.count
        self._windows = first.windows
        self.queue = self._contracts + bids
        self._bonuses = play.mode == "bonuses"
        self._writer = StateWriter(count, self.contracts, 0 if self._bonuses else bids, play)
        observed = self._contracts if self._bonuses else self.queue
        high = np.full(observed if play.mode == "all" else self._contracts, self.contracts.penalty.max() + click_value)
        if self._bonuses:
            high = self.contracts.penalty  # no bonus above the penalty is ever of use
        self._by_contract = play.reward_by == "contract"
        rewards = (self._contracts,) if self._by_contract else ()
        self._whole_penalty = np.maximum(self.contracts.penalty * self.contracts.demand, 1e-12)
        self.spec = make_spec(self._writer.fields, observed, (1000 * high).tolist(), rewards)
        self._dtype = dtype_of(self.spec)
        self._delay = round(play.delay * first.inventory.requests)
        self._all = np.arange(count)
        self.rate = np.full((count, self._contracts), play.rate)
        self.theta = np.ones((count, self._contracts))
        self._pacing = Pacing(self.contracts, play.pace_step, count) if play.pace_step else None
        self._tally = Tally(count, self._contracts)
        self._started = False

    @property
    def events(self) -> dict[str, int]:
        """How often things happened since this object was made, in all environments together."""
        return self._tally.events

    def reset(self, seed: int) -> NDArray[Any]:
        """New days everywhere. Returns states [N]; the same seed gives the same run for the same scores."""
        words = np.random.SeedSequence(seed).generate_state(self.num_envs + 1, np.uint32)
        self._seeds = words[:-1].tolist()
        self._rng = np.random.Generator(np.random.SFC64(int(words[-1])))
        self._episode = [0] * self.num_envs
        n = self.num_envs
        contracts = self._contracts
        self._feed = Feed(n)
        self.delivery = Delivery(n, self.contracts.billed_rate, self._delay, self.play.own_counts)
        self._curve = np.zeros((n, self._windows + 1, contracts))
        self._billed_rate = np.zeros((n, self._windows, contracts))
        self._required = np.zeros((n, contracts))
        self._prior = np.zeros((n, contracts))
        self._charged = np.zeros((n, contracts))  # penalties that rewards have counted so far
        self._over = np.zeros(n, bool)
        self._continues = np.zeros(n, bool)
        for env in range(n):
            self._begin_day(env)
        self._writer.prepare(self._dtype, self._required, self.theta)
        self._started = True
        self._read()
        self._first_window = self._window.copy()
        if self.play.first_window:
            self._charged = self._shortfall.copy()
        return self._observe()

    def step(self, action: NDArray[Any]) -> EnvStep:
        """Take `action` [N, Q] or [N, C], the scores of the queue as it was observed; EnvError for NaN in a place of
        the mask."""
        if not self._started:
            raise EnvError("admix: step before reset; call reset(seed) first")
        playing = ~self._over
        order = self._order
        action = self._check(action)
        starting = self._over & ~self._continues
        value = np.zeros((self.num_envs, self._contracts + 1))
        revenue = np.zeros(self.num_envs)
        chosen = np.full(self.num_envs, -1)
        score = np.zeros(self.num_envs)
        logged = self._logged
        moving = playing
        self._gain = np.zeros((self.num_envs, self._contracts))
        whole = (
            self._bonuses and self.play.support == "off" and bool((self.rate >= 1).all() and (self.theta >= 1).all())
        )
        if whole:  # nothing is drawn by chance: many requests at once
            self._start_days(starting)
            logged = self._show_blocks(action, playing, chosen, score, revenue, value)
        for turn in range(0 if whole else self.play.repeat):
            if turn:
                moving = playing & self._feed.has_request
                self._read(with_news=False)
            logged = np.where(moving, self._logged, logged)
            self._show(action, moving, chosen, score, revenue, value)
            if not turn:
                self._start_days(starting)
            self._feed.advance(moving)
        self._read()
        columns = {
            "chosen": presented(chosen, order).astype(np.int32),
            "score": score.astype(np.float32),
            "revenue": (1000 * revenue).astype(np.float32),
            "logged": presented(logged, order).astype(np.int32),
        }
        terminated = playing & ~self._feed.has_request
        self._first_window[self._over] = self._window[self._over]
        past = playing & ~terminated & (self._window >= (self.play.last_window or self._windows))
        truncated = past | (playing & ~terminated & self._limit_reached())
        self._over = terminated | truncated
        self._continues = truncated & ~past
        observation = self._observe()
        if self.play.first_window:  # what was due before an episode began is nobody's doing
            self._charged[starting] = self._shortfall[starting]
        growth = np.where(playing[:, None], self._shortfall - self._charged, 0.0)
        self._charged += growth
        value[:, :-1] -= self.play.shortfall_weight * growth
        raw = value.sum(1)
        own = self._gain - self.play.shortfall_weight * growth
        reward = own / self._whole_penalty if self._by_contract else raw
        reward = (self.play.reward_scale * reward).astype(np.float32)
        return EnvStep(observation, reward, terminated, truncated, raw, columns)

    def control(self, rate: NDArray[np.float64] | None = None, theta: NDArray[np.float64] | None = None) -> None:
        """Set the play-control probabilities of contracts, [C] or [N, C], from the next request on."""
        for name, values in (("rate", rate), ("theta", theta)):
            if values is None:
                continue
            if not (np.isfinite(values).all() and (np.asarray(values) >= 0).all() and (np.asarray(values) <= 1).all()):
                raise EnvError(f"admix: {name} must be probabilities in [0, 1]")
            getattr(self, name)[...] = values
        if theta is not None and self._started:
            self._writer.prepare(self._dtype, self._required, self.theta)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _show(
        self,
        action: NDArray[Any],
        moving: NDArray[np.bool_],
        chosen: NDArray[np.int64],
        score: NDArray[np.float64],
        revenue: NDArray[np.float64],
        value: NDArray[np.float64],
    ) -> None:
        """Play the present request of the environments `moving`. Updates the slot shown last [N] and its score, and
        adds to the revenue [N] and to the weighted value by contract [N, C + 1], the last place for bids."""
        slot, best, worth = self._choose(self._scores(action, moving), moving)
        contract = np.where(slot < self._contracts, slot, -1)
        rate = self._billed_rate[self._all, self._window, contract]
        known = (slot == self._logged) & (self._request["logged_billed"] >= 0)
        billed = np.where(known, self._request["logged_billed"] == 1, self._request["billing"] < rate) & (contract >= 0)
        self.delivery.show(contract, billed, moving)
        now = {name: self._request[name][:, None] for name in ("ctr", "bid_ctr", "ecpm")}
        self._tally.count(slot[:, None], billed[:, None], moving, now)
        chosen[moving] = slot[moving]
        score[moving] = best[moving]
        revenue += worth
        weighted = np.where(contract >= 0, self.play.ctr_weight, self.play.bid_weight) * worth
        if self._by_contract:
            taken = np.flatnonzero(contract >= 0)
            self._gain[taken, contract[taken]] += weighted[taken] - np.maximum(self._second[taken], 0) / 1000
        if self.play.relative and self.bids:
            weighted -= np.where(moving, self.play.bid_weight * self._request["ecpm"].max(1) / 1000.0, 0.0)
        value[self._all, contract] += weighted

    def _show_blocks(
        self,
        action: NDArray[Any],
        playing: NDArray[np.bool_],
        chosen: NDArray[np.int64],
        score: NDArray[np.float64],
        revenue: NDArray[np.float64],
        value: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """As `_show`, the next `repeat` requests of the environments `playing`; the slot logged last [N]."""
        logged = np.full(self.num_envs, -1)
        left = self.play.repeat
        rows = self._all[:, None]
        while left and (moving := playing & self._feed.has_request).any():
            request = self._feed.block(moving, min(left, self._delay or left))
            room = self.contracts.cap - self.delivery.shown
            block = play_block(request, action.astype(np.float32), room, moving, self.click_value)
            count = block.slot.shape[1]
            contract = block.contract
            request = {name: values[:, :count] for name, values in request.items()}
            rate = self._billed_rate[rows, request["window"], contract]
            known = (block.slot == request["logged"]) & (request["logged_billed"] >= 0)
            billed = np.where(known, request["logged_billed"] == 1, request["billing"] < rate) & (contract >= 0)
            self.delivery.show_block(contract, billed, moving)
            self._tally.count(block.slot, billed, moving, request)
            last = block.slot[:, -1]
            chosen[moving] = last[moving]
            score[moving] = block.score[moving, -1]
            logged[moving] = request["logged"][moving, -1]
            revenue += block.worth.sum(1)
            weighted = np.where(contract >= 0, self.play.ctr_weight, self.play.bid_weight) * block.worth
            self._gain += block.by_contract(weighted - block.other / 1000)
            if self.play.relative and self.bids:
                weighted -= self.play.bid_weight * request["ecpm"].max(2) * moving[:, None] / 1000.0
            value[:, :-1] += block.by_contract(weighted)
            value[:, -1] += (weighted * (contract < 0)).sum(1)
            self._feed.advance(moving, count)
            left -= count
        return logged

    def _start_days(self, starting: NDArray[np.bool_]) -> None:
        self._continues[:] = False
        for env in np.flatnonzero(starting):
            self._begin_day(int(env))
        if starting.any():
            self._writer.prepare(self._dtype, self._required, self.theta)

    def _begin_day(self, env: int) -> None:
        day = self._days(self._seeds[env], self._episode[env])
        self._episode[env] += 1
        inventory = day.inventory
        self._curve[env] = inventory.curve
        self._billed_rate[env] = day.billed_rate
        self._required[env] = inventory.split()
        if self.play.theta != "off":
            self.theta[env] = self._required[env] if self.play.theta == "split" else inventory.water()
        self._prior[env] = prior_of(self.play, day)
        if self._pacing:
            self._pacing.begin(env, alpha_of(self.play, day), midway=self.play.first_window > 0)
        self.delivery.reset(env)
        self._tally.begin_day(env)
        self._charged[env] = 0
        self._feed.begin(env, day, self.play.first_window)

    def _read(self, *, with_news: bool = True) -> None:
        """Take over the present request; what is due by now, and which contracts are in the queue and may play.

        Without news, what was due and delivered stands as it was read before, where no support policy asks for it."""
        request = self._request = self._feed.read()
        present = self._feed.has_request
        self._window = request["window"]
        if with_news or self.play.support != "off":
            self._read_news(request, present)
        usable = request["eligible"] & (self.delivery.shown < self.contracts.cap) & present[:, None]
        self._mask = np.empty((self.num_envs, self.queue), bool)
        self._mask[:, self._contracts :] = (request["ecpm"] > 0) & present[:, None]
        plays = usable
        entered = usable
        if (self.rate < 1).any() or (self.theta < 1).any():
            supported = self._supported()
            draws = self._rng.random((2, *usable.shape))
            entered = usable & ((draws[0] < self.rate) | supported)
            plays = entered & ((draws[1] < self.theta) | supported)
        self._mask[:, : self._contracts] = entered
        self._playable = self._mask.copy()
        self._playable[:, : self._contracts] = plays
        self._value = np.float32(1000 * self.click_value) * request["ctr"]
        self._logged = np.where(present, request["logged"], -1)
        self._order = (
            draw_order(self._rng, self.num_envs, self.queue, self._contracts if self.play.mode == "contracts" else 0)
            if self.play.shuffle
            else None
        )

    def _read_news(self, request: dict[str, NDArray[Any]], present: NDArray[np.bool_]) -> None:
        time = np.where(present, request["time"], 1.0)
        place = time * self._windows
        left = np.minimum(place.astype(np.int64), self._windows - 1)
        part = (place - left)[:, None]
        share = self._curve[self._all, left] * (1 - part) + self._curve[self._all, left + 1] * part
        self._due = share * self.contracts.demand
        self._time = time
        missing = np.maximum(self._due - self.delivery.billed, 0)
        self._shortfall = missing * self.contracts.penalty
        self._estimate = self.delivery.estimate

    def _supported(self) -> NDArray[np.bool_]:
        """Contracts [N, C] that a support policy lets in and lets play."""
        gap = self.play.support_gap * self.contracts.demand
        if self.play.support == "late":
            return self._due - self._estimate > gap
        if self.play.support == "fresh":
            return self._estimate < gap
        return np.zeros(self._estimate.shape, bool)

    def _check(self, action: NDArray[Any]) -> NDArray[Any]:
        action = np.asarray(action)
        wanted = (self.num_envs, *self.spec.action.shape)
        if action.shape != wanted:
            raise EnvError(f"admix: scores of shape {action.shape}; mode {self.play.mode} takes {wanted}")
        return action

    def _scores(self, action: NDArray[Any], moving: NDArray[np.bool_]) -> NDArray[np.float64]:
        needed = self._mask & moving[:, None]
        if self._bonuses:
            return scores_by_slot(action + self._value, self._request["ecpm"], None, needed)
        return scores_by_slot(action, self._request["ecpm"], self._order, needed)

    def _choose(
        self, scores: NDArray[np.float64], playing: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Slot shown [N] (-1: none), its score, and what showing it is worth [currency]."""
        scores = np.where(self._playable, scores, -np.inf)
        best = scores.argmax(1)
        score = scores[self._all, best]
        if self._by_contract:
            scores[self._all, best] = -np.inf
            self._second = scores.max(1)  # what the ad shown keeps from being shown, by its own score
        shows = (score > -np.inf) & playing
        worth = np.concatenate([self._value, self._request["ecpm"]], 1)[self._all, best] / 1000.0
        return np.where(shows, best, -1), np.where(shows, score, 0.0), np.where(shows, worth, 0.0)

    def _limit_reached(self) -> NDArray[np.bool_]:
        length = self.play.episode_windows
        return (self._window - self._first_window >= length) & (length > 0)

    def _observe(self) -> NDArray[Any]:
        due = self._due.sum(1)
        late = np.maximum(self._due - self._estimate, 0).sum(1)
        overall = {
            "shortfall": np.divide(late, due, out=np.zeros_like(due), where=due > 0),
            "time": self._time,
            **self._tally.means(),
        }
        if self._pacing:
            news = self.delivery.seen_billed, self.delivery.seen_shown
            self._prior = 1000 * self._pacing.decide(self._due, self._estimate, *news)
        mask = self._mask
        if self._bonuses:
            mask = (self.delivery.shown < self.contracts.cap) & self._feed.has_request[:, None]
        state = self._writer.write(
            self._request, self._feed.has_request, mask, self.delivery, self._estimate, self._due, overall,
            self._value, self._prior,
        )  # fmt: skip
        if self._order is not None:
            present_columns(state, self._order)
        return state

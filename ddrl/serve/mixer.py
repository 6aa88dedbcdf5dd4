"""The mixer: a display request in, the ad to show out, counted as shown.

One mixer holds the counters of one market; one thread. `decide` takes and gives JSON, `choose` structs. Rules of the
queue, of ties and of play control stand in `ddrl/kernel/ad_queue.hpp` and docs/admix.md. A request that is refused
changes nothing; one that is answered was counted once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl._kernel import AdQueue
from ddrl.core.decoding import decode
from ddrl.core.errors import MessageError, NetworkError
from ddrl.serve.book import SUPPORT, Book, Pacer
from ddrl.serve.messages import (
    UNREADABLE,
    Billing,
    Candidate,
    ContractState,
    Control,
    Decision,
    DisplayRequest,
    Explanation,
    PolicyInfo,
)
from ddrl.serve.served_policy import ServedPolicy

REASONS = (
    "",
    "a filter excludes it",
    "does not target this visitor",
    "at its cap",
    "left out by rate",
    "may not play by theta",
    "bids nothing",
    "more bids than slots",
)
BID = 1


class Mixer:
    """Chooses among contract ads and bids by a policy that can be changed between two requests."""

    def __init__(
        self,
        book: Book,
        policy: ServedPolicy,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
        day_seconds: float = 86400.0,
    ) -> None:
        """`seed`: of the draws by rate and theta. `clock` gives seconds; requests without a time are at (clock() - day
        begin) / day_seconds. CheckpointError for a policy of other features."""
        self.book = book
        self._clock = clock
        self.day_seconds = day_seconds
        self.began = clock()
        count = len(book.ids)
        self.rate = np.full(count, book.play.rate)
        self.theta = book.theta.copy()
        self.shown = np.zeros(count)
        self.seen_shown = np.zeros(count)
        self.seen_billed = np.zeros(count)
        self.sums = np.zeros(5)
        self.requests = self.empty_queues = self.cut_bids = self.changes = 0
        self._rows = book.rows.copy()
        self._prior = book.prior.copy()
        self.pacing = copy.deepcopy(book.pacing)
        self._overall = np.zeros(len(book.overall), np.float32)
        self._place = {int(ad): place for place, ad in enumerate(book.ids)}
        self._queue = self._make_queue(seed)
        self._decoder = msgspec.json.Decoder(DisplayRequest)
        self._encoder = msgspec.json.Encoder()
        self.use(policy)
        self.changes = 0

    # ---- decisions ------------------------------------------------------------------------------------------------

    def decide(self, body: bytes) -> bytes:
        """A `DisplayRequest` in JSON in, a `Decision` in JSON out; MessageError names what is wrong with it."""
        return self._encoder.encode(self.choose(decode(body, self._decoder, MessageError, UNREADABLE)))

    def choose(self, request: DisplayRequest) -> Decision:
        """The ad to show, which counts as shown. MessageError for a request that cannot be answered, NetworkError for a
        policy that gives no numbers; nothing is counted then."""
        moment = request.time
        if moment is None:
            moment = min((self._clock() - self.began) / self.day_seconds, 1.0)
        creative = request.creative
        if creative and len(creative) != len(request.ad):
            raise MessageError(f"creative has {len(creative)} entries, ad has {len(request.ad)}")
        queue = self._queue
        try:
            cut = queue.read(
                request.ad,
                request.kind,
                request.ecpm,
                request.ctr,
                request.filters,
                self.book.cell(request.region, request.gender, request.age),
                moment,
            )
        except ValueError as error:
            raise MessageError(str(error)) from None
        if self._slot is not None:
            self._slot[0] = request.slot
        if self._further is not None:
            self._further[...] = self._overall[self._further_places]
        if self.pacing and self._held is None:
            self._pace(self.pacing)
        policy = self._policy
        scores = policy.scores() if self._held is None else self._held
        try:
            slot, score = queue.choose(scores)
        except ValueError as error:
            raise NetworkError(f"policy {policy.version}: {error}") from None
        self._held_for += 1
        self._held = scores if self._held_for % self.book.play.repeat else None
        self.requests += 1
        self.cut_bids += cut
        decision = Decision(request.request_id, policy.version)
        if slot >= 0:
            place: int = queue.origin_of(slot)
            decision.place = place
            decision.score = score
            decision.ad = request.ad[place]
            decision.kind = request.kind[place]
            decision.worth = self._worth(request, place)
            if creative:
                decision.creative = creative[place]
        else:
            self.empty_queues += 1
        if request.explain:
            decision.explanation = self._explain(request, moment, scores, slot)
        if slot >= 0:
            queue.show(slot)
        return decision

    def _pace(self, pacing: Pacer) -> None:
        """The prior of a new decision, by what is due and known as of the present request."""
        due = np.array([self._queue.due])
        estimate = np.array([self._queue.estimate])
        self._prior[:] = 1000 * pacing.decide(due, estimate, self.seen_billed, self.seen_shown)[0]
        count = len(self._prior)
        self._prior_seen[:count] = self._prior * self._mask_seen[:count]

    def _worth(self, request: DisplayRequest, place: int) -> float:
        return request.ecpm[place] if request.kind[place] == BID else self._value * request.ctr[place]

    def _explain(self, request: DisplayRequest, moment: float, scores: NDArray[Any], chosen: int) -> Explanation:
        book = self.book
        queue = self._queue
        scores = scores.reshape(-1)
        origin: list[int] = queue.origin
        reasons: list[int] = queue.reasons
        estimate: list[float] = queue.estimate
        due: list[float] = queue.due
        slot_of = {place: slot for slot, place in enumerate(origin) if place >= 0}
        listed: list[Candidate] = []
        others: list[float] = []
        for place, (ad, kind) in enumerate(zip(request.ad, request.kind, strict=True)):
            slot = slot_of.get(place, -1)
            reason = REASONS[reasons[place]]
            seen = slot >= 0 and (not reason or reason == REASONS[5])
            score = None if not seen else queue.score_of(scores, slot)
            worth = self._worth(request, place)
            candidate = Candidate(ad, kind, score, reason, worth)
            if kind != BID:
                j = self._place[ad]
                rate = max(float(estimate[j] / self.shown[j] if self.shown[j] else book.billed_rate[j]), 1e-6)
                candidate.alpha = None if score is None else (score - worth) / 1000 / rate
                candidate.penalty = float(book.penalty[j])
                candidate.due = due[j]
                candidate.billed = estimate[j]
                candidate.rate = float(self.rate[j])
                candidate.theta = float(self.theta[j])
            listed.append(candidate)
            if score is not None and not reason and slot != chosen:
                others.append(score)
        best = listed[origin[chosen]].score if chosen >= 0 else None
        return Explanation(moment, None if best is None or not others else best - max(others), listed)

    # ---- what changes between requests ----------------------------------------------------------------------------

    def use(self, policy: ServedPolicy) -> None:
        """Choose by `policy` from the next request on. CheckpointError where it was trained for other features."""
        self.book.require(policy.spec)
        state = self._state_arrays(policy.inputs)
        self._queue.write_into(state)
        self._slot = policy.inputs.get("slot_id")
        self._policy = policy
        self.changes = self.changes + 1
        self._held: NDArray[np.float32] | None = None  # the action that stands for further requests
        self._held_for = 0

    @property
    def policy(self) -> ServedPolicy:
        """The policy that chooses now."""
        return self._policy

    def policy_info(self) -> PolicyInfo:
        """Its name and history."""
        return PolicyInfo(self._policy.version, self._policy.loaded, self.changes, self._policy.evaluation)

    def bill(self, news: Billing) -> None:
        """Take over news of billing; MessageError for unknown ads or more impressions than were shown."""
        if not len(news.ad) == len(news.shown) == len(news.billed):
            raise MessageError("ad, shown and billed must be of one length")
        places = self._places(news.ad)
        for at, place in enumerate(places):
            under_way = self.shown[place] - self.seen_shown[place]
            if news.billed[at] > news.shown[at] or news.shown[at] > under_way:
                raise MessageError(
                    f"ad[{at}] = {news.ad[at]}: {news.billed[at]} billed of {news.shown[at]}, but {under_way:g} "
                    "impressions await their billing"
                )
        self.seen_shown[places] += news.shown
        self.seen_billed[places] += news.billed

    def control(self, control: Control) -> None:
        """Set probabilities of contracts; MessageError for unknown ads."""
        places = self._places(control.ad)
        for name, values in (("rate", control.rate), ("theta", control.theta)):
            if values and len(values) != len(places):
                raise MessageError(f"{name} has {len(values)} entries, ad has {len(places)}")
            if not all(0 <= value <= 1 for value in values):
                raise MessageError(f"{name} must be probabilities in [0, 1]")
        if control.rate:
            self.rate[places] = control.rate
        if control.theta:
            self.set_theta(places, control.theta)

    def set_theta(self, places: Any, values: Any) -> None:
        """Set theta of contracts by index, where policies see it too."""
        self.theta[places] = values
        if "theta" in self.book.fields:
            self._rows[places, self.book.fields.index("theta")] = values

    def contracts(self) -> list[ContractState]:
        """What is held of each contract, as of the last request."""
        columns = (
            self.book.ids.tolist(),
            self.book.demand,
            self.book.limit,
            self.book.penalty,
            self.shown,
            self.seen_billed,
            self._queue.estimate,
            self._queue.due,
            self.rate,
            self.theta,
        )
        return [ContractState(ad, *map(float, values)) for ad, *values in zip(*columns, strict=True)]

    # ---- tables ---------------------------------------------------------------------------------------------------

    def _places(self, ads: list[int]) -> list[int]:
        unknown = [ad for ad in ads if ad not in self._place]
        if unknown or len(set(ads)) < len(ads):
            raise MessageError(f"ad {unknown[0]} is no contract of this server" if unknown else "an ad is there twice")
        return [self._place[ad] for ad in ads]

    def _make_queue(self, seed: int) -> AdQueue:
        book = self.book
        tables: dict[str, Any] = {name: getattr(self, name) for name in ("shown", "seen_shown", "seen_billed", "sums")}
        tables |= {
            name: np.ascontiguousarray(getattr(book, name))
            for name in (
                "ids",
                "demand",
                "limit",
                "billed_rate",
                "eligible",
                "curve",
                "bid_row",
            )
        }
        traffic = book.traffic_rows()
        tables |= {"rate": self.rate, "theta": self.theta, "rows": self._rows, "traffic_rows": traffic}
        tables["prior"] = self._prior
        self._value = 1000 * book.click_value
        sizes: dict[str, Any] = {
            "contracts": len(book.ids),
            "bids": book.bids,
            "cells": len(book.eligible),
            "windows": len(book.curve) - 1,
            "fields": len(book.fields),
            "traffic": traffic.shape[1],
            "click_value": float(book.click_value),
            "own_counts": book.play.own_counts,
            "bonuses": book.bonuses,
            "support": SUPPORT.index(book.play.support),
            "support_gap": float(book.play.support_gap),
        }
        return AdQueue(tables, sizes | {name: place for place, name in enumerate(book.fields)}, seed)

    def _state_arrays(self, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The arrays that the kernel writes: the policy's own, and spare ones for what the policy does not read."""
        book = self.book
        slots = len(book.ids) + (0 if book.bonuses else book.bids)
        spare = {
            "queue_mask": np.zeros(slots, bool),
            "ad": np.zeros((slots, len(book.fields)), np.float32),
            "ad_id": np.zeros(slots, np.int32),
            "prior": np.zeros(slots, np.float32),
            "traffic": np.zeros(book.traffic_rows().shape[1], np.float32),
        }
        state = {name: inputs[name][0] if name in inputs else array for name, array in spare.items()}
        self._mask_seen = state["queue_mask"]
        self._prior_seen = state["prior"]
        self._further = None
        self._further_places = [book.overall.index(name) for name in book.play.overall_fields]
        whole = self._further_places == list(range(len(book.overall)))
        if "overall" in inputs and not whole:
            self._further = inputs["overall"][0]
        return state | {"overall": inputs["overall"][0] if "overall" in inputs and whole else self._overall}

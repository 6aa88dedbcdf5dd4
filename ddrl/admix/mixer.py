"""What a mixer knows of its contracts before the day begins, and the names that a state's arrays have.

`ddrl.admix.serving` makes a book from a day of `ddrl.admix` and hands it in: stages do not import each other.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from ddrl._kernel import AdQueue
from ddrl.acting.model import ActingModel
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.admix.messages import (
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
from ddrl.core.decoding import decode, read_json
from ddrl.core.errors import CheckpointError, MessageError, NetworkError, RunDirError, shortened
from ddrl.core.files import write_atomically
from ddrl.core.specs import EnvSpec

# -- book --------------------------------------------------------------------------------------------------------------

SUPPORT = ("off", "late", "fresh")  # the kernel's numbers


@dataclass(frozen=True)
class Play:
    """How requests are played, as in the environment's settings of the same names."""

    mode: str
    repeat: int  # requests that one action decides
    own_counts: bool
    rate: float
    support: str
    support_gap: float
    overall_fields: tuple[str, ...]
    traffic_fields: tuple[str, ...]


class Pacer(Protocol):
    """A prior that follows delivery, for one day; `state` is all that it keeps from one decision to the next."""

    state: NDArray[np.float64]  # [3, 1, C]

    def decide(
        self,
        due: NDArray[np.float64],
        estimate: NDArray[np.float64],
        seen_billed: NDArray[np.float64],
        seen_shown: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """The next prior [1, C] [currency], from what is due by now and billed as estimated [1, C], and known [C]."""
        ...


@dataclass(frozen=True)
class Book:
    """Contracts [C] of a day in W windows, for visitors of `regions` x `genders` x `ages` cells."""

    spec: EnvSpec  # what a policy must see and give to be served
    play: Play
    ids: NDArray[np.int64]  # [C], ad ids
    demand: NDArray[np.float64]  # [C], billed impressions due by the day's end
    limit: NDArray[np.float64]  # [C], impressions after which the ad is not shown
    penalty: NDArray[np.float64]  # [C], currency for each missing impression
    billed_rate: NDArray[np.float64]  # [C], of the past
    eligible: NDArray[np.bool_]  # [cells, C], targeting
    curve: NDArray[np.float64]  # [W + 1, C], share of a contract's supply that has come by a window's begin
    theta: NDArray[np.float64]  # [C], the first probabilities
    prior: NDArray[np.float32]  # [C], actions that a policy departs from
    rows: NDArray[np.float32]  # [C, fields], what stays of a contract's row of "ad"
    bid_row: NDArray[np.float32]  # [fields], what stays of a bid's row
    fields: tuple[str, ...]  # of a row of "ad"
    overall: tuple[str, ...]  # all that is known of the whole play, in the kernel's order
    bids: int  # slots for bids
    regions: int
    genders: int
    ages: int
    click_value: float  # of a click on a contract ad [currency]
    pacing: Pacer | None = None  # moves the prior at each decision; None: it stays

    @property
    def bonuses(self) -> bool:
        """Whether an action is added to the value of a click, and a policy sees contracts alone."""
        return self.play.mode == "bonuses"

    def cell(self, region: int, gender: int, age: int) -> int:
        """The visitor's cell; ValueError for an attribute value that does not exist."""
        for name, value, count in (("region", region, self.regions), ("gender", gender, self.genders)):
            if not 0 <= value < count:
                raise ValueError(f"{name} = {value} is outside 0 .. {count - 1}")
        if not 0 <= age < self.ages:
            raise ValueError(f"age = {age} is outside 0 .. {self.ages - 1}")
        return (region * self.genders + gender) * self.ages + age

    def traffic_rows(self) -> NDArray[np.float32]:
        """The one-hot array "traffic" of each cell [cells, size]."""
        cells = np.arange(len(self.eligible))
        values = {
            "region": (cells // (self.genders * self.ages), self.regions),
            "gender": (cells // self.ages % self.genders, self.genders),
            "age": (cells % self.ages, self.ages),
        }
        hot = [np.eye(count, dtype=np.float32)[place] for place, count in map(values.get, self.play.traffic_fields)]  # type: ignore[misc]
        return np.ascontiguousarray(np.concatenate([np.zeros((len(cells), 0), np.float32), *hot], 1))

    def require(self, spec: EnvSpec) -> None:
        """CheckpointError unless a policy trained in `spec` can be served: the same arrays in, the same scores out."""
        wanted = self.spec.observation.arrays
        given = spec.observation.arrays
        if wanted == given and spec.action == self.spec.action:
            return
        wrong = [f"{name}: {_words(given.get(name))}, here {_words(wanted.get(name))}" for name in sorted(
            {*wanted, *given}) if wanted.get(name) != given.get(name)]  # fmt: skip
        if spec.action != self.spec.action:
            wrong.append(f"scores: {_words(spec.action)}, here {_words(self.spec.action)}")
        raise CheckpointError(
            f"the policy was trained for other features than this server has ({'; '.join(wrong)}): serve it with the "
            "contracts, bid slots and fields of its training (env.kwargs), with env.observation = named"
        )


def _words(array: Any) -> str:
    return "none" if array is None else f"{array.dtype} {list(array.shape)}"


# -- served_policy -----------------------------------------------------------------------------------------------------
# A policy as a mixer uses it: an acting model with one vector, named by what it is, ready to score.


class ServedPolicy:
    """`version` is a hash of graph and parameters: the same policy has the same name on every server."""

    def __init__(
        self,
        model: ActingModel,
        vector: NDArray[np.uint8],
        evaluation: dict[str, Any] | None = None,
        shared: ServedPolicy | None = None,
    ) -> None:
        """`shared`: a policy whose loaded graph is used again where it is the same. NetworkError for a graph that
        cannot act, or that keeps a state from one request to the next."""
        if any(declared.kind == "state" for declared in model.inputs):
            raise NetworkError("the policy is recurrent: display requests of different visitors share no state")
        for name, view in model.layout.views(vector).items():
            if view.dtype.kind == "f" and not np.isfinite(view).all():
                raise NetworkError(f"the policy's parameter {name} holds a value that is not a number: train it again")
        again = shared is not None and shared.model == model
        self.model = model
        self.vector = vector
        self.evaluation = evaluation or {}
        self.loaded = time.time()
        self._acting = shared._acting if again and shared is not None else ActingPolicy(model, outputs=())
        self.inputs = self._acting.inputs(1)
        digest = hashlib.blake2b(model.onnx, digest_size=6)
        digest.update(vector.tobytes())
        self.version = digest.hexdigest()
        if not again:
            self._acting.greedy(None, vector)  # the first run reserves memory

    @property
    def spec(self) -> EnvSpec:
        """What it sees and gives."""
        return self.model.spec

    def scores(self) -> NDArray[np.float32]:
        """Scores [1, C] or [1, slots] of what stands in `inputs`; to be read before the next call."""
        return self._acting.greedy(None, self.vector)


def load_served(run: Path, shared: ServedPolicy | None = None) -> ServedPolicy:
    """The policy saved in a run directory; RunDirError, CheckpointError, NetworkError."""
    saved = load_policy(run)
    return ServedPolicy(saved.model, saved.vector, saved.evaluation, shared)


def policy_of(data: bytes, shared: ServedPolicy) -> ServedPolicy:
    """The network of `shared` with parameters from a safetensors file; CheckpointError where they do not fit."""
    try:
        tensors = safetensors.numpy.load(data)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"the body is not a safetensors file: {shortened(error)}") from None
    layout = shared.model.layout
    vector = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(vector)
    wrong = sorted(views.keys() ^ tensors.keys()) or [
        name for name, view in views.items() if (view.shape, view.dtype) != (tensors[name].shape, tensors[name].dtype)
    ]
    if wrong:
        raise CheckpointError(f"the tensors are of another network than the one served: {', '.join(wrong[:3])}")
    for name, view in views.items():
        view[...] = tensors[name]
    return ServedPolicy(shared.model, vector, shared=shared)


# -- mixer -------------------------------------------------------------------------------------------------------------
# The mixer: a display request in, the ad to show out, counted as shown.
#
# One mixer holds the counters of one market; one thread. `decide` takes and gives JSON, `choose` structs. Rules of the
# queue, of ties and of play control stand in `ddrl/kernel/ad_queue.hpp` and docs/admix.md. A request that is refused
# changes nothing; one that is answered was counted once.


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
            self.book.ids.tolist(), self.book.demand, self.book.limit, self.book.penalty, self.shown, self.seen_billed,
            self._queue.estimate, self._queue.due, self.rate, self.theta,
        )  # fmt: skip
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
        tables |= {name: np.ascontiguousarray(getattr(book, name)) for name in (
            "ids", "demand", "limit", "billed_rate", "eligible", "curve", "bid_row",
        )}  # fmt: skip
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


# -- snapshot ----------------------------------------------------------------------------------------------------------
# The mixer's counters on disk: what must survive a restart, as one JSON file.
#
#     format    "ddrl mixer 1"
#     began     Unix time of the day's begin [s]
#     requests  display requests answered
#     sums      contract ads shown, sum of their ctr, bids shown, sum of their ctr, sum of their eCPM
#     contracts for each: ad, shown, seen_shown and seen_billed (impressions whose billing is known, and those of them
#               that count), rate, theta, and what pacing keeps of it (`Pacing.state`), where the prior follows delivery
#
# Written whole, every state_period seconds and at the end; what was shown between the last one and a kill
# is lost. Taken back by ad id.


FORMAT = "ddrl mixer 1"


class _Contract(msgspec.Struct):
    ad: int
    shown: float
    seen_shown: float
    seen_billed: float
    rate: float
    theta: float
    pacing: list[float] = []


class _Snapshot(msgspec.Struct):
    format: str
    began: float
    requests: int
    empty_queues: int
    sums: list[float]
    contracts: list[_Contract]


def encode(mixer: Mixer) -> bytes:
    """The counters as they are now."""
    columns = (mixer.shown, mixer.seen_shown, mixer.seen_billed, mixer.rate, mixer.theta)
    none: list[list[float]] = [[]] * len(mixer.book.ids)
    paced = mixer.pacing.state[:, 0].T.tolist() if mixer.pacing else none
    contracts = [
        _Contract(ad, *values)
        for ad, *values in zip(mixer.book.ids.tolist(), *(column.tolist() for column in columns), paced, strict=True)
    ]
    whole = _Snapshot(FORMAT, mixer.began, mixer.requests, mixer.empty_queues, mixer.sums.tolist(), contracts)
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def save(path: Path, data: bytes) -> None:
    """Replace the snapshot; RunDirError where it cannot be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise RunDirError(f"cannot write the counters to {path}: {error.strerror or error}") from None


def restore(path: Path, mixer: Mixer) -> None:
    """Set the mixer's counters to those of `path`; CheckpointError for a file that is damaged or of other contracts."""
    whole = read_json(path, _Snapshot, CheckpointError, f"{path} cannot be read: --new-day begins without it")
    known = {contract.ad: contract for contract in whole.contracts}
    if whole.format != FORMAT or len(whole.sums) != 5 or known.keys() != set(mixer.book.ids.tolist()):
        raise CheckpointError(
            f"{path} holds the counters of other contracts, or of another version ({shortened(whole.format)}): "
            "--new-day begins without it, --state names another file"
        )
    held = [known[ad] for ad in mixer.book.ids.tolist()]
    if mixer.pacing and any(len(contract.pacing) != len(mixer.pacing.state) for contract in held):
        raise CheckpointError(f"{path} lacks what the prior of this policy keeps: --new-day begins without it")
    for name in ("shown", "seen_shown", "seen_billed", "rate"):
        getattr(mixer, name)[:] = [getattr(contract, name) for contract in held]
    mixer.set_theta(slice(None), [contract.theta for contract in held])
    if mixer.pacing:
        mixer.pacing.state[:, 0] = np.transpose([contract.pacing for contract in held])
    mixer.sums[:] = whole.sums
    mixer.began = whole.began
    mixer.requests = whole.requests
    mixer.empty_queues = whole.empty_queues

"""The mixer: a display request in, the ad to show out, counted as shown.

One mixer holds the counters of one market; one thread. `decide` takes and gives JSON, `choose` structs. The rules of
the queue, of ties and of play control are those of `kernel/ad_queue.hpp`. A request that is refused changes nothing;
one that is answered was counted once. A `Book` is what a mixer knows of a day before it begins, a `ServedPolicy`
chooses, `encode` and `restore` keep the counters on disk.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from ddrl.acting.model import ActingModel
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.admix._kernel import AdQueue
from ddrl.admix.contracts import Contracts, Pacing
from ddrl.admix.environment import AdmixVectorEnv, alpha_of, prior_of
from ddrl.admix.making import Morning
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
from ddrl.admix.rules import Counts, StateLayout, make_queue
from ddrl.admix.settings import PlayConfig
from ddrl.core.errors import CheckpointError, MessageError, NetworkError, RunDirError, shortened
from ddrl.core.files import decode, read_json, write_atomically
from ddrl.core.specs import EnvSpec


@dataclass(frozen=True)
class Book:
    """A day before it begins: what a mixer knows of its contracts, and what a policy must see and give to be served."""

    spec: EnvSpec
    play: PlayConfig
    contracts: Contracts
    curve: NDArray[np.float64]  # [W + 1, C], share of a contract's supply that has come by a window's begin
    theta: NDArray[np.float64]  # [C], the first probabilities
    prior: NDArray[np.float32]  # [C], actions that a policy departs from
    layout: StateLayout
    rows: NDArray[np.float32]  # [C, fields], the constant values of a contract's row of "ad"
    bids: int  # slots for bids
    click_value: float  # of a click on a contract ad [currency]
    pacing: Pacing | None = None  # moves the prior at each decision; None: it stays

    @staticmethod
    def of(day: Morning) -> Book:
        """The book of a day."""
        contracts = day.contracts
        play = day.play
        required = day.inventory.split()
        theta = np.ones(contracts.count)
        if play.theta != "off":
            theta = required if play.theta == "split" else day.inventory.water()
        layout = StateLayout(contracts, day.bids, play)
        pacing = None
        if play.pace_step:
            pacing = Pacing(contracts, play.pace_step, 1)
            pacing.begin(0, alpha_of(play, day))
        return Book(
            spec=AdmixVectorEnv(lambda seed, episode: day, 1, play, day.click_value, day.bids).spec,
            play=play,
            contracts=contracts,
            curve=day.inventory.curve,
            theta=theta,
            prior=prior_of(play, day).astype(np.float32),
            layout=layout,
            rows=layout.rows(required[None], theta[None])[0],
            bids=day.bids,
            click_value=day.click_value,
            pacing=pacing,
        )

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ad ids [C]."""
        return self.contracts.ad_id

    @property
    def fields(self) -> tuple[str, ...]:
        """Of a row of "ad"."""
        return self.layout.ad_fields

    @property
    def visitors(self) -> tuple[int, int, int]:
        """Numbers of regions, genders and ages."""
        contracts = self.contracts
        return contracts.regions.shape[1], contracts.genders.shape[1], contracts.ages.shape[1]

    def require(self, spec: EnvSpec) -> None:
        """CheckpointError unless a policy trained in `spec` can be served: the same arrays in, the same scores out."""
        wanted = self.spec.observation.arrays
        given = spec.observation.arrays
        if wanted == given and spec.action == self.spec.action:
            return
        names = [name for name in sorted({*wanted, *given}) if wanted.get(name) != given.get(name)]
        wrong = [f"{name}: {_words(given.get(name))}, here {_words(wanted.get(name))}" for name in names]
        if spec.action != self.spec.action:
            wrong.append(f"scores: {_words(spec.action)}, here {_words(self.spec.action)}")
        raise CheckpointError(
            f"the policy was trained for other features than this server has ({'; '.join(wrong)}): serve it with the "
            "contracts, bid slots and fields of its training (env.kwargs), with env.observation = named"
        )


def _words(array: Any) -> str:
    return "none" if array is None else f"{array.dtype} {list(array.shape)}"


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
        """Scores [1, C] or [1, slots] of what is in `inputs`; to be read before the next call."""
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


# ---- mixer ----------------------------------------------------------------------------------------------------------

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
        count = book.contracts.count
        self.rate = np.full(count, book.play.rate)
        self.theta = book.theta.copy()
        self.counts = Counts(1, count)
        self.shown = self.counts.shown[0]
        self.seen_shown = self.counts.seen_shown[0]
        self.seen_billed = self.counts.seen_billed[0]
        self.sums = self.counts.sums[0]
        self.requests = self.empty_queues = self.cut_bids = self.changes = 0
        self._rows = book.rows.copy()
        self._prior = book.prior.copy()
        self.pacing = copy.deepcopy(book.pacing)
        self._place = {int(ad): place for place, ad in enumerate(book.ids)}
        self._visitors = book.visitors
        self._value = 1000 * book.click_value
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
                self._cell(request),
                moment,
                request.slot,
            )
        except ValueError as error:
            raise MessageError(str(error)) from None
        policy = self._policy
        scores = self._held
        if scores is None:
            if self.pacing:
                self._pace(self.pacing)
            queue.observe()
            scores = policy.scores()
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

    def _cell(self, request: DisplayRequest) -> int:
        """The visitor's cell; ValueError for an attribute value that does not exist."""
        regions, genders, ages = self._visitors
        region = request.region
        gender = request.gender
        age = request.age
        if 0 <= region < regions and 0 <= gender < genders and 0 <= age < ages:
            return (region * genders + gender) * ages + age
        for name, count in zip(("region", "gender", "age"), self._visitors, strict=True):
            value = getattr(request, name)
            if not 0 <= value < count:
                raise ValueError(f"{name} = {value} is outside 0 .. {count - 1}")
        raise AssertionError

    def _pace(self, pacing: Pacing) -> None:
        """The prior of a new decision, by what is due and known as of the present request."""
        counts = self.counts
        self._prior[:] = 1000 * pacing.decide(counts.due, counts.estimate, counts.seen_billed, counts.seen_shown)[0]

    def _worth(self, request: DisplayRequest, place: int) -> float:
        return request.ecpm[place] if request.kind[place] == BID else self._value * request.ctr[place]

    def _explain(self, request: DisplayRequest, moment: float, scores: NDArray[Any], chosen: int) -> Explanation:
        contracts = self.book.contracts
        queue = self._queue
        scores = scores.reshape(-1)
        origin: list[int] = queue.origin
        reasons: list[int] = queue.reasons
        estimate: list[float] = self.counts.estimate[0].tolist()
        due: list[float] = self.counts.due[0].tolist()
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
                rate = max(float(estimate[j] / self.shown[j] if self.shown[j] else contracts.billed_rate[j]), 1e-6)
                candidate.alpha = None if score is None else (score - worth) / 1000 / rate
                candidate.penalty = float(contracts.penalty[j])
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
        inputs = {name: array.view(np.uint8).reshape(1, -1) for name, array in policy.inputs.items()}
        self._queue.write_into({name: (array, 0) for name, array in inputs.items()})
        self._policy = policy
        self.changes = self.changes + 1
        self._held: NDArray[np.float32] | None = None  # the action that decides further requests
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
        own = self.book.contracts
        columns = (
            own.ad_id.tolist(), own.demand, own.cap, own.penalty, self.shown, self.seen_billed,
            self.counts.estimate[0], self.counts.due[0], self.rate, self.theta,
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
        tables = {
            "cap": book.contracts.cap[None],
            "curve": np.ascontiguousarray(book.curve)[None],
            "rate": self.rate[None],
            "theta": self.theta[None],
            "rows": self._rows[None],
            "bid_row": book.layout.bid_row(),
            "prior": self._prior[None],
            "traffic_rows": book.layout.traffic_rows(),
            "eligible": book.contracts.eligible,
        }
        return make_queue(
            self.counts,
            book.contracts,
            book.play,
            tables,
            bids=book.bids,
            click_value=book.click_value,
            ad_fields=book.fields,
            seed=seed,
        )


# ---- snapshot -------------------------------------------------------------------------------------------------------
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

"""The mixer: a display request in, the ad to show out, counted as shown.

One mixer holds the counters of one market; one thread. `decide` takes and gives JSON, `choose` structs. The rules of
the queue, of ties and of play control are those of `kernel/ad_queue.hpp`. A request that is refused changes nothing;
one that is answered was counted once. A `ServedPolicy` chooses, `encode` and `restore` keep the counters on disk.

What goes over the wire is JSON objects, msgspec structs here; the OpenAPI schema is made from them. A display request
is a row of track_log (docs/admix.md) in JSON, with the same names and units. Ranges that are written here are checked
while a body is decoded.
"""

from __future__ import annotations

import hashlib
import math
import resource
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import ActingModel, SavedPolicy, vector_of
from ddrl.admix.contracts import ECPM, Tables
from ddrl.admix.environment import Book
from ddrl.admix.settings import TRAFFIC_FIELDS
from ddrl.core.errors import CheckpointError, ConfigError, DdrlError, MessageError, NetworkError, shortened
from ddrl.core.files import decode
from ddrl.core.specs import Array, Bytes, EnvSpec, Floats32

# ---- messages --------------------------------------------------------------------------------------------------------

MAX_CANDIDATES = 1000  # of one request
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
MAX_DECISION_SECONDS = 1.0  # of the graph
MAX_TRIAL_SECONDS = 10  # of a new graph, from the start of its process to its first scores
MAX_TRIAL_BYTES = 8 << 30  # of that process, address space
MAX_KEPT_STATES = 16  # by which a new policy is tried
KEEP_PERIOD = 4096  # [requests]
MAX_REMEMBERED = 1 << 16  # decisions by which a request that is sent again is known
_Money = Annotated[float, Meta(ge=0, le=1e30)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Bits = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # as many as a log holds
_Listed = Meta(max_length=MAX_CANDIDATES)


UNREADABLE = "the body cannot be read"  # what the answer to one that is no such message begins with


class DisplayRequest(Struct, forbid_unknown_fields=True, gc=False):
    """One display request: the visitor, the slot, and a list of candidates by column."""

    request_id: Annotated[int, Meta(ge=0, le=2**63 - 1, description="Comes back with the decision.")]
    region: Annotated[int, Meta(ge=0, description="Index of the visitor's attribute value.")]
    gender: Annotated[int, Meta(ge=0)]
    age: Annotated[int, Meta(ge=0)]
    ad: Annotated[list[Id], _Listed]
    kind: Annotated[list[Annotated[int, Meta(ge=0, le=1, description="0 contract, 1 bidding")]], _Listed]
    ecpm: Annotated[list[_Money], Meta(max_length=MAX_CANDIDATES, description="Currency per 1000; 0 for contracts.")]
    ctr: Annotated[list[Probability], Meta(max_length=MAX_CANDIDATES, description="Predicted click rate.")]
    slot: Annotated[int, Meta(ge=0, le=2**31 - 1, description="Place on the page.")] = 0
    filters: Annotated[list[_Bits], Meta(max_length=MAX_CANDIDATES, description="Bits; 1: the ad is excluded.")] = []
    creative: Annotated[
        list[str], Meta(max_length=MAX_CANDIDATES, description="That of the chosen ad comes back.")
    ] = []
    time: (
        Annotated[float, Meta(ge=0, lt=1, description="Days since the day began; null: by the server's clock.")] | None
    ) = None
    explain: Annotated[bool, Meta(description="Say why: the score of each candidate.")] = False


class Candidate(Struct, gc=False):
    """One candidate of a decision. Values of a contract are as they were before the decision."""

    ad: int
    kind: int
    score: float | None  # eCPM units; null: not in the queue
    reason: str  # "" where it could be shown; else why not
    worth: float  # of showing it: the bid, or the click value times the click rate [eCPM]
    alpha: float | None = None  # contracts: what the score says one billed impression is worth beyond clicks [currency]
    penalty: float | None = None  # of a missing impression [currency]; the optimum's alpha lies in [0, penalty]
    due: float | None = None  # billed impressions due by now
    billed: float | None = None  # billed impressions by what is known
    rate: float | None = None
    theta: float | None = None


class Explanation(Struct, gc=False):
    """Why an ad was chosen: the highest score of all that could be shown. A contract's score is a bid equivalent: a bid
    of more eCPM would have been shown instead."""

    time: float
    margin: float | None  # score of the chosen ad above the next one [eCPM]; null: there was no other
    candidates: list[Candidate]


class Decision(Struct, omit_defaults=False, gc=False):
    """The answer to a display request; ad, kind and place are null where nothing could be shown."""

    request_id: int
    version: str  # of the policy that chose
    ad: int | None = None
    kind: int | None = None
    place: int | None = None  # of the ad in the request's lists
    score: float = 0.0  # eCPM units
    worth: float = 0.0  # of showing it [eCPM]
    creative: str | UnsetType = UNSET
    explanation: Explanation | UnsetType = UNSET


class Billing(Struct, forbid_unknown_fields=True):
    """News of billing: of `shown` further impressions of each ad, `billed` count."""

    ad: list[Id]
    shown: list[Count]
    billed: list[Count]


class Control(Struct, forbid_unknown_fields=True):
    """Play-control probabilities by contract; a list that is left out stays as it is."""

    ad: list[Id]
    rate: list[Probability] = []
    theta: list[Probability] = []


class ContractState(Struct):
    """What the feature server holds of one contract."""

    ad: int
    demand: float
    cap: float
    penalty: float
    shown: float
    billed_known: float  # billed impressions reported so far
    billed_estimate: float  # with those under way
    due: float
    rate: float
    theta: float


class PolicyInfo(Struct):
    """The policy that chooses now."""

    version: str
    loaded: float  # [s] Unix time
    changes: int  # since the server began
    evaluation: dict[str, Any] = {}


class Error(Struct):
    """What every answer of 400 or more holds."""

    error: str


# ---- routes of the server --------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """One path and method: what it takes (None: nothing; bytes: the body as it is), gives, and does."""

    path: str
    method: str
    words: str
    taken: Any
    given: Any
    action: Callable[..., Any]  # of bytes: a coroutine
    guarded: bool = False  # asked with the token alone


_ERRORS = {
    "400": "It is no request, or names two hosts.",
    "401": "The token is missing or another one.",
    "403": "A page of another site asks, or it is asked by a name that is not its own.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "422": "The body is malformed, or names what does not exist.",
    "429": "Too many bodies are under way.",
    "500": "The policy gives no numbers.",
    "503": "Too many requests wait, or the server ends.",
}


def openapi_document(routes: Sequence[Route], **limits: int) -> dict[str, Any]:
    """OpenAPI 3.1, from the structs of this module; its description names the `limits`."""
    kinds = [kind for route in routes for kind in (route.taken, route.given) if kind not in (None, bytes, str)]
    schemas, components = msgspec.json.schema_components([*kinds, Error], ref_template="#/components/schemas/{name}")
    schema = iter(schemas)
    paths: dict[str, Any] = {}
    for path, method, words, taken, given, _, guarded in routes:
        operation: dict[str, Any] = {"summary": words, "responses": {}}
        if taken is bytes:
            body: dict[str, Any] = {
                "schema": {"type": "string", "format": "binary", "description": "A safetensors file, or nothing."}
            }
            operation["requestBody"] = {"required": False, "content": {"application/octet-stream": body}}
        elif taken is not None:
            operation["requestBody"] = {"required": True, "content": _json(next(schema))}
        answer = {"text/plain": {"schema": {"type": "string"}}} if given is str else _json(next(schema))
        operation["responses"]["200"] = {"description": words, "content": answer}
        if method == "POST":
            if guarded:
                operation["security"] = [{"token": []}]
            for status, meaning in _ERRORS.items():
                error: dict[str, Any] = {
                    "description": meaning,
                    "content": _json({"$ref": "#/components/schemas/Error"}),
                }
                operation["responses"][status] = error
        paths.setdefault(path, {})[method.lower()] = operation
    named = ", ".join(f"{name} = {value}" for name, value in limits.items())
    return {
        "openapi": "3.1.0",
        "info": {"title": "ddrl.serve", "version": "1", "description": f"Ad mixing by a trained policy. {named}"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


# ---- policies --------------------------------------------------------------------------------------------------------


def require(book: Book, spec: EnvSpec) -> None:
    """CheckpointError unless a policy trained in `spec` can be served: the same arrays in, the same scores out."""
    own = {**book.spec.observation.arrays, "scores": book.spec.action}
    given = {**spec.observation.arrays, "scores": spec.action}
    wrong = [
        f"{name}: {_array_words(given.get(name))}, here {_array_words(own.get(name))}"
        for name in sorted({*own, *given})
        if own.get(name) != given.get(name)
    ]
    if wrong:
        raise CheckpointError(
            f"the policy was trained for other features than this server has ({'; '.join(wrong)}): serve it with the "
            "contracts, bid slots and fields of its training (env.kwargs), with env.observation = named"
        )


def _array_words(array: Any) -> str:
    return "none" if array is None else f"{array.dtype} {list(array.shape)}"


def version_of(model: ActingModel, vector: Bytes) -> str:
    """A hash of graph and parameters: the same policy has the same name on every server."""
    digest = hashlib.blake2b(model.onnx, digest_size=6)
    digest.update(vector.tobytes())
    return digest.hexdigest()


class ServedPolicy:
    """A policy as a mixer uses it: an acting model with one vector, ready to score; `version` as `version_of`."""

    def __init__(
        self,
        model: ActingModel,
        vector: Bytes,
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
        if again and shared is not None:
            self._acting = shared._acting
        else:
            self._acting = ActingPolicy(model, outputs=(), max_seconds=MAX_DECISION_SECONDS)
        self.inputs = self._acting.inputs(1)
        self.version = version_of(model, vector)
        if not again:
            self._acting.greedy(None, vector)  # the first run reserves memory

    def scores(self) -> Floats32:
        """Scores [1, C] or [1, slots] of what is in `inputs`; to be read before the next call."""
        return self._acting.greedy(None, self.vector)


class RulePolicy(ServedPolicy):
    """A rule in the place of the policy that departs from it: its scores are the prior itself."""

    def __init__(self, rule: str, learned: ServedPolicy, prior: Array) -> None:
        """`prior` [1, C]: bonuses [eCPM], updated in place as the day proceeds."""
        super().__init__(learned.model, learned.vector, shared=learned)
        self.version = rule
        self._prior = prior

    def scores(self) -> Floats32:
        return self._prior.astype(np.float32)


def try_in_child(saved: SavedPolicy) -> None:
    """Load a graph and score with it in a process of its own, with limits of time and memory; NetworkError where that
    fails. A server that did it itself would answer nobody meanwhile, or end."""
    model = saved.model.to_bytes()
    command = [sys.executable, "-c", "from ddrl.admix import mixer; mixer.score_once()"]
    try:
        done = subprocess.run(
            command,
            input=len(model).to_bytes(8) + model + saved.vector.tobytes(),
            capture_output=True,
            timeout=MAX_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NetworkError(f"the policy did not score within {MAX_TRIAL_SECONDS:g} s of its load") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise NetworkError(f"the policy cannot score: {shortened(lines[-1] if lines else f'status {done.returncode}')}")


def score_once() -> None:
    """The child's part of `try_in_child`."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_TRIAL_BYTES, MAX_TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_TRIAL_SECONDS, MAX_TRIAL_SECONDS))
    length = int.from_bytes(sys.stdin.buffer.read(8))
    model = ActingModel.from_bytes(sys.stdin.buffer.read(length))
    try:
        ServedPolicy(model, np.frombuffer(sys.stdin.buffer.read(), np.uint8).copy())
    except DdrlError as error:
        sys.exit(str(error))


def policy_of(data: bytes, shared: ServedPolicy) -> ServedPolicy:
    """The network of `shared` with parameters from a safetensors file; CheckpointError where they do not fit."""
    vector = vector_of(data, shared.model.layout, "the body", "the policy served")
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
Known = dict[int, tuple[float, float]]  # of contracts: impressions whose billing is known, and how many of them count


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
        self.tables = Tables(book.layout, book.windows, seed=seed)
        self.tables.begin_day(0, book)
        self.shown = self.tables.shown[0]
        self.seen_shown = self.tables.seen_shown[0]
        self.seen_billed = self.tables.seen_billed[0]
        self.rate = self.tables.rate[0]
        self.theta = self.tables.theta[0]
        self.sums = self.tables.sums[0]
        self.requests = 0
        self.empty_queues = 0
        self.cut_bids = 0
        self.journal: Callable[[DisplayRequest, float, Decision], None] | None = None  # takes each decision
        self._latest = 0.0  # [days], time of the newest request without one of its own
        self._decided = OrderedDict[int, Decision]()  # the newest decisions, by request_id
        self._ids = book.contracts.ad_id.tolist()
        self._place = {ad: place for place, ad in enumerate(self._ids)}
        self._visitors = book.contracts.visitors
        self._value = ECPM * book.click_value
        self._queue = self.tables.queue
        self._decoder = msgspec.json.Decoder(DisplayRequest)
        self._encoder = msgspec.json.Encoder()
        self._held: Floats32 | None = None  # the action that decides further requests
        self._held_for = 0
        self._keep_at = 0  # requests, at which the next state is kept
        first = {
            name: np.full((1, *array.shape), 2, array.dtype) for name, array in book.spec.observation.arrays.items()
        }
        self._states = deque([first], MAX_KEPT_STATES)
        self.changes = -1  # policies taken into service after the first
        self.use(policy)

    # ---- decisions ------------------------------------------------------------------------------------------------

    def decide(self, body: bytes) -> bytes:
        """A `DisplayRequest` in JSON in, a `Decision` in JSON out; MessageError names what is wrong with it."""
        return self._encoder.encode(self.answer(decode(body, self._decoder, MessageError, UNREADABLE)))

    def choose(self, request: DisplayRequest) -> Decision:
        """`answer` for a request made in Python: its types and ranges are checked first."""
        try:
            checked = msgspec.convert(msgspec.structs.asdict(request), DisplayRequest)
        except msgspec.ValidationError as error:
            raise MessageError(f"the request cannot be answered ({error})") from None
        return self.answer(checked)

    def answer(self, request: DisplayRequest) -> Decision:
        """The ad to show, which counts as shown; for a request_id that was answered lately, the same decision, which
        counts no more. MessageError for a request that cannot be answered, NetworkError for a
        policy that gives no numbers; nothing is counted then."""
        decided = self._decided.get(request.request_id)
        if decided is not None:
            return decided
        moment = request.time
        if moment is None:
            moment = self._latest = min(max(self.time, self._latest), 1.0)
        creative = request.creative
        if creative and len(creative) != len(request.ad):
            raise MessageError(f"creative has {len(creative)} entries, ad has {len(request.ad)}")
        queue = self._queue
        cell = self._cell(request)
        try:
            cut = queue.read(
                request.ad,
                request.kind,
                request.ecpm,
                request.ctr,
                request.filters,
                cell,
                moment,
                request.slot,
            )
        except ValueError as error:
            queue.take_back()
            raise MessageError(str(error)) from None
        policy = self.policy
        scores = self._held
        pacing = self.tables.pacing
        paced = pacing.state if pacing else None
        try:
            if scores is None:
                self.tables.pace()
                queue.observe()
                if self.requests >= self._keep_at:
                    self._keep_state()
                scores = policy.scores()
            slot, score, place = queue.choose(scores)
        except (ValueError, NetworkError) as error:
            queue.take_back()
            if pacing and paced is not None:
                pacing.state = paced  # each decision makes a new array
            raise NetworkError(f"policy {policy.version}: {error}") from None
        self._held_for += 1
        self._held = scores if self._held_for % self.book.play.repeat else None
        self.requests += 1
        self.cut_bids += cut
        decision = Decision(request.request_id, policy.version)
        if slot >= 0:
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
            decision.explanation = self._explain(request, moment, queue.explain(scores), place)
        if slot >= 0:
            queue.show(slot)
        if len(self._decided) >= MAX_REMEMBERED:
            self._decided.popitem(last=False)
        self._decided[request.request_id] = decision
        if self.journal is not None:
            self.journal(request, moment, decision)
        return decision

    @property
    def time(self) -> float:
        """Days since this one began, by the clock; 1 and more: it is over."""
        return (self._clock() - self.began) / self.day_seconds

    def begin_day(self, began: float | None = None) -> None:
        """A new day, from Unix time `began` on (None: now): nothing is shown yet. Play control by rate stays."""
        self.began = self._clock() if began is None else began
        self._latest = 0.0
        self._held = None
        self._held_for = 0
        self.tables.begin_day(0, self.book)

    def billing(self) -> Known:
        """Of each contract the impressions of this day whose billing is known, and how many of them count."""
        return dict(zip(self._ids, zip(self.seen_shown.tolist(), self.seen_billed.tolist(), strict=True), strict=True))

    def _cell(self, request: DisplayRequest) -> int:
        """The visitor's cell; MessageError for an attribute value that does not exist."""
        regions, genders, ages = self._visitors
        if request.region < regions and request.gender < genders and request.age < ages:
            return (request.region * genders + request.gender) * ages + request.age
        values = (request.region, request.gender, request.age)
        name, value, count = next(
            found for found in zip(TRAFFIC_FIELDS, values, self._visitors, strict=True) if found[1] >= found[2]
        )
        raise MessageError(f"{name} = {value} is outside 0 .. {count - 1}")

    def _worth(self, request: DisplayRequest, place: int) -> float:
        return request.ecpm[place] if request.kind[place] == BID else self._value * request.ctr[place]

    def _explain(
        self, request: DisplayRequest, moment: float, explained: list[tuple[int, float]], chosen: int
    ) -> Explanation:
        """`explained`: reason and score of each candidate; `chosen`: the place of the one shown, -1: none."""
        contracts = self.book.contracts
        estimate = self.tables.estimate[0]
        due = self.tables.due[0]
        listed: list[Candidate] = []
        others: list[float] = []
        for place, (reason, given) in enumerate(explained):
            ad = request.ad[place]
            kind = request.kind[place]
            score = None if math.isnan(given) else given
            worth = self._worth(request, place)
            candidate = Candidate(ad, kind, score, REASONS[reason], worth)
            if kind != BID:
                j = self._place[ad]
                rate = max(float(estimate[j] / self.shown[j] if self.shown[j] else contracts.billed_rate[j]), 1e-6)
                candidate.alpha = None if score is None else (score - worth) / 1000 / rate
                candidate.penalty = float(contracts.penalty[j])
                candidate.due = float(due[j])
                candidate.billed = float(estimate[j])
                candidate.rate = float(self.rate[j])
                candidate.theta = float(self.theta[j])
            listed.append(candidate)
            if score is not None and not reason and place != chosen:
                others.append(score)
        best = listed[chosen].score if chosen >= 0 else None
        return Explanation(moment, None if best is None or not others else best - max(others), listed)

    # ---- what changes between requests ----------------------------------------------------------------------------

    def use(self, policy: ServedPolicy) -> None:
        """Choose by `policy` from the next request on. CheckpointError where it was trained for other features, or
        where it scores no numbers in states that were met; the one before it stays then."""
        require(self.book, policy.model.spec)
        if self._held is not None:
            self._held = self._held.copy()  # what policies of one graph score lies in one place
        for state in self._states:
            for name, array in policy.inputs.items():
                if name in state:
                    array[...] = state[name]
            try:
                whole = bool(np.isfinite(policy.scores()).all())
            except NetworkError as error:
                raise CheckpointError(f"the policy {policy.version} cannot be served: {error}") from None
            if not whole:
                raise CheckpointError(f"the policy {policy.version} scores no finite numbers: train it again")
        inputs = {name: array.view(np.uint8).reshape(1, -1) for name, array in policy.inputs.items()}
        self._queue.write_into({name: (array, 0) for name, array in inputs.items()})
        self.policy = policy
        self.changes += 1
        self._held = None
        self._held_for = 0

    def _keep_state(self) -> None:
        """Keep what the policy is about to score; few at first, then each KEEP_PERIOD requests."""
        self._states.append({name: array.copy() for name, array in self.policy.inputs.items()})
        self._keep_at = self.requests + min(self.requests + 1, KEEP_PERIOD)

    def follow(self, rule: str) -> None:
        """Choose by the rule that the policy departs from, in place of the policy; ConfigError for another rule."""
        play = self.book.play
        own = "adaptive_pacing" if play.pace_step > 0 else "yesterday_duals" if play.prior == "yesterday" else "none"
        if play.mode != "bonuses" or play.prior == "off" or own != rule:
            raise ConfigError(
                f"serve.policy = {rule}: the run's policy departs from another rule (env.kwargs: mode = {play.mode}, "
                f"prior = {play.prior}, pace_step = {play.pace_step:g}): serve the learned one, or a run of the task "
                "admix"
            )
        self.use(RulePolicy(rule, self.policy, self.tables.prior))
        self.changes -= 1

    def policy_info(self) -> PolicyInfo:
        """Its name and history."""
        return PolicyInfo(self.policy.version, self.policy.loaded, self.changes, self.policy.evaluation)

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
            self.tables.set_theta((0, places), control.theta)

    def contracts(self) -> list[ContractState]:
        """What is held of each contract, as of the last request."""
        own = self.book.contracts
        columns = (
            self._ids, own.demand, own.cap, own.penalty, self.shown, self.seen_billed,
            self.tables.estimate[0], self.tables.due[0], self.rate, self.theta,
        )  # fmt: skip
        return [ContractState(ad, *map(float, values)) for ad, *values in zip(*columns, strict=True)]

    def _places(self, ads: list[int]) -> list[int]:
        unknown = [ad for ad in ads if ad not in self._place]
        if unknown or len(set(ads)) < len(ads):
            raise MessageError(f"ad {unknown[0]} is no contract of this server" if unknown else "an ad is there twice")
        return [self._place[ad] for ad in ads]

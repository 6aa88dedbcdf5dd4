"""What goes over the wire: JSON objects as msgspec structs; the OpenAPI schema is made from them.

A display request is a row of track_log (docs/admix.md) in JSON, with the same names and units. Ranges that are written
here are checked while a body is decoded.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

MAX_CANDIDATES = 1000  # of one request
_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Money = Annotated[float, Meta(ge=0, le=1e30)]
_Probability = Annotated[float, Meta(ge=0, le=1)]
_Count = Annotated[int, Meta(ge=0)]
_Listed = Meta(max_length=MAX_CANDIDATES)


UNREADABLE = "the body cannot be read"  # what the answer to one that is no such message begins with


class DisplayRequest(Struct, forbid_unknown_fields=True, gc=False):
    """One display request: the visitor, the slot, and a list of candidates by column."""

    request_id: Annotated[int, Meta(ge=0, le=2**63 - 1, description="Comes back with the decision.")]
    region: Annotated[int, Meta(ge=0, description="Index of the visitor's attribute value.")]
    gender: Annotated[int, Meta(ge=0)]
    age: Annotated[int, Meta(ge=0)]
    ad: Annotated[list[_Id], _Listed]
    kind: Annotated[list[Annotated[int, Meta(ge=0, le=1, description="0 contract, 1 bidding")]], _Listed]
    ecpm: Annotated[list[_Money], Meta(max_length=MAX_CANDIDATES, description="Currency per 1000; 0 for contracts.")]
    ctr: Annotated[list[_Probability], Meta(max_length=MAX_CANDIDATES, description="Predicted click rate.")]
    slot: Annotated[int, Meta(ge=0, le=2**31 - 1, description="Place on the page.")] = 0
    filters: Annotated[list[_Count], Meta(max_length=MAX_CANDIDATES, description="Bits; 1: the ad is excluded.")] = []
    creative: Annotated[
        list[str], Meta(max_length=MAX_CANDIDATES, description="That of the chosen ad comes back.")
    ] = []
    time: (
        Annotated[float, Meta(ge=0, lt=1, description="Days since the day began; null: by the server's clock.")] | None
    ) = None
    explain: Annotated[bool, Meta(description="Say why: the score of each candidate.")] = False


class Candidate(Struct):
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


class Explanation(Struct):
    """Why an ad was chosen: the highest score of all that could be shown. A contract's score is a bid equivalent: a bid
    of more eCPM would have been shown instead."""

    time: float
    margin: float | None  # score of the chosen ad above the next one [eCPM]; null: there was no other
    candidates: list[Candidate]


class Decision(Struct, omit_defaults=False):
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

    ad: list[_Id]
    shown: list[_Count]
    billed: list[_Count]


class Control(Struct, forbid_unknown_fields=True):
    """Play-control probabilities by contract; a list that is left out stays as it is."""

    ad: list[_Id]
    rate: list[_Probability] = []
    theta: list[_Probability] = []


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


# ---- openapi --------------------------------------------------------------------------------------------------------
# The OpenAPI document of the server, made from the structs of `messages`; served at /openapi.json.


_PATHS: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("/v1/decide", "post", "Choose the ad to show, and count it as shown.", DisplayRequest, Decision),
    ("/v1/billing", "post", "News of billing.", Billing, dict[str, Any]),
    ("/v1/control", "post", "Set rate and theta of contracts.", Control, dict[str, Any]),
    ("/v1/contracts", "get", "What is held of each contract.", None, list[ContractState]),
    ("/v1/policy", "get", "The policy that chooses now.", None, PolicyInfo),
    ("/v1/policy", "post", "Take the newest policy of RUN, or the parameters in the body.", bytes, PolicyInfo),
    ("/health", "get", "200 while it serves, 503 when it ends.", None, dict[str, str]),
    ("/metrics", "get", "Prometheus text.", None, str),
)
_ERRORS = {
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "422": "The body is malformed, or names what does not exist.",
    "429": "Too many bodies are under way.",
    "500": "The policy gives no numbers.",
    "503": "Too many requests wait, or the server ends.",
}


def document(**limits: int) -> dict[str, Any]:
    """OpenAPI 3.1; its description names the `limits`."""
    kinds = [kind for *_, taken, given in _PATHS for kind in (taken, given) if kind not in (None, bytes, str)]
    schemas, components = msgspec.json.schema_components([*kinds, Error], ref_template="#/components/schemas/{name}")
    schema = iter(schemas)
    paths: dict[str, Any] = {}
    for path, method, words, taken, given in _PATHS:
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
        if method == "post":
            for status, meaning in _ERRORS.items():
                error: dict[str, Any] = {
                    "description": meaning,
                    "content": _json({"$ref": "#/components/schemas/Error"}),
                }
                operation["responses"][status] = error
        paths.setdefault(path, {})[method] = operation
    named = ", ".join(f"{name} = {value}" for name, value in limits.items())
    return {
        "openapi": "3.1.0",
        "info": {"title": "ddrl.serve", "version": "1", "description": f"Ad mixing by a trained policy. {named}"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}

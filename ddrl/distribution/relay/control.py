"""Small messages between the root and the other relays, and between the root relay and its trainer.

Root to relay: `State` (of the board), `NewPlan`, `Measure`, `Orders`, `Goodbye`. Relay to root: `Ready`, `Confirm`,
`Report`, `MemberFailed`, `Finished`. Either way: `Failed`. Between trainer and root relay, in slots of their board:
`SchemeWish`, `PlanInForce`; by message lanes: `Orders`, `Report`. Packed by msgspec, so a message that is not ours is
refused; nothing is unpickled."""

from __future__ import annotations

from typing import Any

import msgspec

from ddrl.core.errors import MessageError


class State(msgspec.Struct, tag="state"):
    """The root's board: the command and its values. `models`: how many the root has sent by the plan in force, once the
    command is STOP or FAIL, after which it sends no more."""

    command: int
    values: list[float]
    models: int


class NewPlan(msgspec.Struct, tag="plan"):
    """From model 0 of this epoch on, this plan: a scheme by its reference, with its parameters."""

    epoch: int
    scheme: str
    nbytes: int
    versions_in_flight: int
    parameters: dict[str, Any]


class Measure(msgspec.Struct, tag="measure"):
    """No model is under way: measure the links together, then await a plan."""


class Orders(msgspec.Struct, tag="orders"):
    """From the trainer to the starter of a host's collectors: a line."""

    host: int
    line: bytes


class Report(msgspec.Struct, tag="report"):
    """From the starter of a host's collectors to the trainer: a line. sent: by `clock`, that of the host; received: by
    the root's [s, CLOCK_MONOTONIC]."""

    host: int
    line: bytes
    clock: str
    sent: float
    received: float = 0.0


class Goodbye(msgspec.Struct, tag="goodbye"):
    """Nothing more is sent: end."""


class Ready(msgspec.Struct, tag="ready"):
    """The plan of this epoch stands here, its first receives are posted."""

    epoch: int


class Confirm(msgspec.Struct, tag="confirm"):
    """A model has ended on this host: sealed (and taken by its rollouts, where that is asked), or refused with
    `problem`."""

    epoch: int
    sequence: int
    version: int
    problem: str
    seconds: float


class MemberFailed(msgspec.Struct, tag="member_failed"):
    """A process of this host has failed; the job must end, and its relays end it in order."""

    text: str


class Finished(msgspec.Struct, tag="finished"):
    """This host has sent its last row and its last table."""

    rows: int
    tables: int


class Failed(msgspec.Struct, tag="failed"):
    """This relay, or one that sent it this message, cannot go on: withdraw everything at once."""

    text: str


class SchemeWish(msgspec.Struct, tag="scheme_wish"):
    """The scheme to use from the next version on."""

    scheme: str


class PlanInForce(msgspec.Struct, tag="plan_in_force"):
    """By which plan the root relay sends models: `shards` hosts that the root itself sends to, `chunk_bytes` of the
    largest piece, `bound_seconds` by the links measured (None: not measured)."""

    epoch: int
    scheme: str
    shards: int
    chunk_bytes: int
    bound_seconds: float | None


Message = State | NewPlan | Measure | Orders | Goodbye | Ready | Confirm | Report | MemberFailed | Finished | Failed
Note = SchemeWish | PlanInForce
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
MAX_BYTES = 1 << 16  # of a message
MAX_TEXT = MAX_BYTES // 4 - 64  # letters of a failure's text: at most 4 bytes each


def encode(message: Message | Note) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """A relay's message; MessageError for anything else."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MessageError(
            f"a message of {len(data)} bytes between relays is not known ({error}): all must run the same ddrl"
        ) from None


def decode_wish(data: bytes) -> SchemeWish:
    """What `encode` made of it."""
    return msgspec.msgpack.decode(data, type=SchemeWish)


def decode_plan(data: bytes) -> PlanInForce:
    """What `encode` made of it."""
    return msgspec.msgpack.decode(data, type=PlanInForce)

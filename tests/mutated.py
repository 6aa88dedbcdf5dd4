"""Messages with bytes changed, cut off, doubled or made up, for the tests of everything that reads."""

from __future__ import annotations

import random

import msgspec

from ddrl.telemetry.control import TOPIC, Request

BAD = (
    b"\xff",
    b"\x00",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b'"',
    b"{",
    b"[" * 2000,
    b"9" * 400,
    b"1e999",
    b"null",
    b"\\ud800",
)
SOUND = [
    msgspec.json.encode(Request(3, "set", {"name": "learner.lr", "value": value}))
    for value in (0.1, "fast \u00e9", None)
]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """A few changes at random places."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0 if changed:
                changed[place % len(changed)] = draw.randrange(256)
            case 1:
                changed[place:place] = draw.choice(BAD)
            case 2:
                del changed[place : place + draw.randint(1, 20)]
            case 3:
                changed[place:place] = changed[: draw.randrange(len(changed) + 1)]
            case _:
                changed[place : place + 4] = draw.randbytes(4)
    return bytes(changed)


def mutated_parts(draw: random.Random) -> list[bytes]:
    """A control message as a server receives it, spoiled."""
    parts = [b"me", TOPIC, mutate(draw.choice(SOUND), draw)]
    if draw.random() < 0.1:
        parts = parts[: draw.randint(0, 3)] + [draw.randbytes(5)] * draw.randint(0, 3)
    return parts

"""Messages with bytes changed, cut off, doubled or made up, for every decoder of ddrl."""

from __future__ import annotations

import random
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ddrl.core.errors import MessageError
from ddrl.telemetry import ControlServer, attach
from ddrl.telemetry.control import TOPIC, Request, read_request, secure_client
from ddrl.telemetry.directory import read_live_file

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


def memory_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_process(count: int, seed: int) -> dict[str, Any]:
    """Control messages straight into the decoder: refused or read, and nothing else."""
    draw = random.Random(seed)
    refused = 0
    longest = 0
    before = memory_mib()
    for _ in range(count):
        try:
            read_request(mutated_parts(draw)).command.encode()
        except MessageError as error:
            refused += 1
            longest = max(longest, len(str(error)))
    return {
        "messages": count,
        "refused": refused,
        "read": count - refused,
        "longest_refusal": longest,
        "memory_grown_mib": round(memory_mib() - before, 1),
    }


def from_a_client(count: int, seed: int) -> dict[str, Any]:
    """The same over the wire, from a client that holds the run's key; then the run is asked whether it still
    answers."""
    done: list[object] = []
    alarms: list[str] = []
    ended = threading.Event()
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        handlers: dict[str, Any] = {
            name: lambda **_: done.append(1) for name in ("pause", "resume", "checkpoint", "stop", "set")
        }
        handlers["status"] = lambda: {"env_steps": 7}
        server = ControlServer(run, handlers, lambda kind, text, **_: alarms.append(kind))

        def serve() -> None:
            while not ended.is_set():
                server.wait(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        live = read_live_file(run)
        assert live is not None
        context = zmq.Context()
        client = context.socket(zmq.DEALER)
        client.set_hwm(1000)
        secure_client(client, run, live.control_key)
        client.connect(server.endpoint)
        before = memory_mib()
        begin = time.monotonic()
        for _ in range(count):
            client.send_multipart(mutated_parts(draw)[1:] or [b""])
            while client.poll(0):
                client.recv_multipart()
        with attach(run, timeout=120) as commands:
            answers = commands.status() == {"env_steps": 7}
        seconds = time.monotonic() - begin
        client.close(linger=0)
        context.term()
        ended.set()
        thread.join()
        server.close()
    return {
        "messages": count,
        "still_answers": answers,
        "alarms": alarms.count("alarm"),
        "memory_grown_mib": round(memory_mib() - before, 1),
        "messages_per_s": round(count / seconds),
    }

"""What arrives on a socket: bounded in parts and bytes, and decoded so that any bytes can at most be refused.

Used by both ends of the live stream and of control; nothing here knows what a message means."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import zmq

from ddrl.core.errors import MessageError

T = TypeVar("T")


def limit(sock: zmq.Socket[bytes], nbytes: int) -> None:
    """Have a socket, before it is bound or connected, drop the connection of whoever sends a part of more bytes."""
    sock.set(zmq.MAXMSGSIZE, nbytes)


def receive(sock: zmq.Socket[bytes], parts: int, nbytes: int) -> list[bytes] | None:
    """The parts of the next message that has arrived; an empty list for one of more parts or bytes than allowed, None
    where there is none. Never blocks; a message that is refused is read to its end, a part at a time."""
    kept: list[bytes] = []
    count = size = 0
    try:
        part = sock.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    while True:
        count, size = count + 1, size + len(part)
        if count <= parts and size <= nbytes:
            kept.append(part)
        if not sock.get(zmq.RCVMORE):
            return kept if count <= parts and size <= nbytes else []
        part = sock.recv()  # a message arrives whole: its further parts are there


def decode(data: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], what: str) -> T:
    """`data` decoded; MessageError, which begins with `what`, for whatever is no such message."""
    try:
        return decoder.decode(data)
    # Invalid UTF-8 and numbers out of range are ValueErrors, deep nesting is a RecursionError.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MessageError(f"{what} ({str(error)[:200]})") from None

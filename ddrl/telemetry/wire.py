"""What arrives on a socket, bounded in parts and bytes.

Used by both ends of the live stream and of control; nothing here knows what a message means."""

from __future__ import annotations

import zmq


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
        count = count + 1
        size = size + len(part)
        if count <= parts and size <= nbytes:
            kept.append(part)
        if not sock.get(zmq.RCVMORE):
            return kept if count <= parts and size <= nbytes else []
        part = sock.recv()  # a message arrives whole: its further parts are there

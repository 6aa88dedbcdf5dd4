"""Commands to a living pool: one JSON object over a local socket, one JSON object back.

The address is in the kernel's abstract name space, so it leaves no file behind and ends with its process. Only
processes of the same user (or root) are answered. A thread accepts; the pool's master answers in its own thread,
between two grants: the bell that `ring` rings ends its sleep."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ddrl.core.errors import PoolError
from ddrl.core.files import decode

MAX_BYTES = 1 << 20
TIMEOUT = 10.0  # [s] for a command and its answer
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def address(run_id: str) -> str:
    """Where the pool `run_id` listens."""
    return f"\0ddrl-pool-{run_id}"


class PoolControl:
    """The master's end."""

    def __init__(self, run_id: str, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._waiting: deque[tuple[socket.socket, dict[str, Any]]] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address(run_id))
        self._socket.listen()
        self._thread = threading.Thread(target=self._accept, name="ddrl-pool-control", daemon=True)
        self._thread.start()

    def answer(self, handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Answer what has come; a PoolError of `handle` is answered as {"error": its text}."""
        while self._waiting:
            connection, command = self._waiting.popleft()
            try:
                reply = handle(command)
            except PoolError as error:
                reply = {"error": str(error)}
            with connection:
                _send(connection, reply)

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._thread.join()
        self._socket.close()
        while self._waiting:
            self._waiting.popleft()[0].close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            connection.settimeout(TIMEOUT)
            peer = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            command = _receive(connection) if peer[1] in (0, os.getuid()) else None
            if command is None:
                connection.close()
                continue
            self._waiting.append((connection, command))
            self._ring()


def ask(run_id: str, command: dict[str, Any]) -> dict[str, Any] | None:
    """The pool's answer; None where no such pool lives. PoolError with its text where it refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        try:
            connection.connect(address(run_id))
        except ConnectionRefusedError:
            return None
        _send(connection, command)
        connection.shutdown(socket.SHUT_WR)
        reply = _receive(connection)
    if reply is None:
        raise PoolError("the pool gave no answer: it has just ended, or belongs to another user")
    if "error" in reply:
        raise PoolError(reply["error"])
    return reply


def _send(connection: socket.socket, document: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(document).encode())
    except OSError:  # who asked has ended, which is no matter of the pool's
        return


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """One object, up to the sender's end of writing; None for anything else."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
            if len(data) > MAX_BYTES:
                return None
        return decode(data, dict[str, Any], PoolError, "a command")
    except (OSError, PoolError):
        return None

"""CURVE keys of a run's sockets: none on loopback, one pair for the server and one for its clients elsewhere.

Where `telemetry.bind` is not a loopback address, RUN/keys holds server.secret and client.secret (readable by their
owner alone); only a client that holds a copy of client.secret is let in. Copy RUN/keys/client.secret and the server's
public key (in RUN/live.json) to the machine that watches, or reach the loopback ports through an ssh tunnel and copy
nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import zmq

from ddrl.core.config import TelemetryConfig
from ddrl.core.errors import ConfigError, RunDirError

_FOLDER = "keys"
_DOMAIN = b"ddrl"


class Gate(Protocol):
    """A running authenticator."""

    def stop(self) -> None:
        """End it; before its context ends."""
        ...


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address`."""
    return address == "localhost" or address.startswith("127.") or address in ("::1", "[::1]")


def secure_server(sock: zmq.Socket[bytes], run_dir: Path, config: TelemetryConfig) -> str:
    """Encrypt a socket that is about to be bound beyond loopback; returns the public key that clients need, "" on
    loopback."""
    if is_loopback(config.bind):
        return ""
    if not zmq.has("curve"):
        raise ConfigError(
            f"telemetry.bind = {config.bind}: this build of pyzmq has no CURVE encryption; bind to 127.0.0.1 and use "
            "an ssh tunnel"
        )
    server = _pair(run_dir / _FOLDER / "server.secret")
    _pair(run_dir / _FOLDER / "client.secret")
    sock.curve_server = True
    sock.curve_secretkey = server[1]
    sock.curve_publickey = server[0]
    sock.zap_domain = _DOMAIN
    return server[0].decode()


def start_authenticator(context: zmq.Context[Any], run_dir: Path) -> Gate:
    """Let in only clients that hold RUN/keys/client.secret; returns what must be stopped with the context."""
    from zmq.auth.thread import ThreadAuthenticator  # starts a thread module that loopback runs never need

    public, _ = _pair(run_dir / _FOLDER / "client.secret")
    folder = run_dir / _FOLDER / "clients"
    folder.mkdir(exist_ok=True)
    (folder / "client.key").write_text(f'metadata\ncurve\n    public-key = "{public.decode()}"\n')
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain=_DOMAIN.decode(), location=str(folder))
    return authenticator


def secure_client(sock: zmq.Socket[bytes], run_dir: Path, server_key: str) -> None:
    """Prepare a socket that is about to connect to a run with `server_key`; nothing to do where that is empty."""
    if not server_key:
        return
    path = run_dir / _FOLDER / "client.secret"
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise RunDirError(
            f"cannot read {path} ({error.strerror}): the run's sockets are encrypted; copy that file from the "
            "machine that runs"
        ) from None
    sock.curve_secretkey = secret
    sock.curve_publickey = zmq.curve_public(secret)
    sock.curve_serverkey = server_key.encode()


def _pair(path: Path) -> tuple[bytes, bytes]:
    """The key pair whose secret half is in `path`, made where there is none: (public, secret)."""
    try:
        secret = path.read_bytes().strip()
        return zmq.curve_public(secret), secret
    except FileNotFoundError:
        pass
    public, secret = zmq.curve_keypair()
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
    except OSError as error:
        raise RunDirError(f"cannot write {path} ({error.strerror}): choose another run.dir") from None
    return public, secret

"""CURVE keys of a run's sockets: commands are authenticated always, records where they leave the machine.

RUN/keys holds server.secret and client.secret, readable by their owner alone; only a client that holds client.secret is
let in. So another user of the machine, who may reach the ports of loopback, can neither stop nor change a run. Copy
RUN/keys/client.secret and RUN/live.json, which holds the server's public key, to the machine that steers, or log in to
the one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import zmq

from ddrl.core.errors import ConfigError, RunDirError
from ddrl.core.files import write_atomically

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


def secure_server(sock: zmq.Socket[bytes], run_dir: Path) -> str:
    """Encrypt a socket that is about to be bound; returns the public key that its clients need."""
    if not zmq.has("curve"):
        raise ConfigError(
            "this build of pyzmq has no CURVE encryption, without which a run takes no commands: install the pyzmq of "
            "PyPI, or set telemetry.live = false"
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
    from zmq.auth.thread import ThreadAuthenticator  # runs that take no commands never need it

    public, _ = _pair(run_dir / _FOLDER / "client.secret")
    folder = run_dir / _FOLDER / "clients"
    folder.mkdir(exist_ok=True)
    (folder / "client.key").write_text(f'metadata\ncurve\n    public-key = "{public.decode()}"\n')
    authenticator: Any = ThreadAuthenticator(context)  # some of its methods have no types
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
            f"cannot read {path} ({error.strerror}): only who holds this key may steer the run; "
            "on another machine, copy the file there"
        ) from None
    try:
        public = zmq.curve_public(secret)
        sock.curve_secretkey = secret
        sock.curve_publickey = public
        sock.curve_serverkey = server_key.encode()
    except (ValueError, UnicodeError, zmq.ZMQError) as error:
        raise RunDirError(
            f"the keys of {run_dir} are damaged ({error}): copy keys/client.secret and live.json from the machine that "
            "runs once more"
        ) from None


def _pair(path: Path) -> tuple[bytes, bytes]:
    """The key pair whose secret half is in `path`, made where there is none or it is damaged: (public, secret)."""
    try:
        secret = path.read_bytes().strip()
        path.chmod(0o600)
        return zmq.curve_public(secret), secret
    except (FileNotFoundError, ValueError, zmq.ZMQError):
        pass
    except OSError as error:
        raise RunDirError(f"cannot read {path} ({error.strerror}): choose another run.dir") from None
    public, secret = zmq.curve_keypair()
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, secret, mode=0o600)
    except OSError as error:
        raise RunDirError(f"cannot write {path} ({error.strerror}): choose another run.dir") from None
    return public, secret

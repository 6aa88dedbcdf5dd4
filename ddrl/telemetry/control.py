"""A run's sockets: the live stream of records, and control from outside (pause, resume, checkpoint, set, stop).

The recorder publishes (`LiveStream`), the trainer's loop polls for commands (`ControlServer`, about a microsecond when
there is none). `LiveReader` and `attach` are the other ends, for notebooks and other programs. RUN/live.json names the
addresses. Control always uses CURVE keys, the stream where it leaves the machine. A client without the run's key is
not heard; a message that is not ddrl's is dropped and noted, and never reaches a handler."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import zmq

from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.errors import ConfigError, DdrlError, MessageError, RunDirError
from ddrl.core.files import decode, write_atomically
from ddrl.telemetry.directory import LIVE_FILE, announce, find_runs, is_alive, read_live_file, run_status
from ddrl.telemetry.reading import Run
from ddrl.telemetry.series import Evaluation, Event, Record, plain

# -- keys --------------------------------------------------------------------------------------------------------------
# RUN/keys holds server.secret and client.secret, readable by their owner alone. Only a client that holds client.secret
# is accepted, so another user of the machine, who can reach the ports of loopback, can neither stop nor change a run.
# To control a run from another machine, copy RUN/keys/client.secret and RUN/live.json (which has the server's public
# key) there.

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


# -- messages of bounded size ------------------------------------------------------------------------------------------


def limit_messages(sock: zmq.Socket[bytes], nbytes: int) -> None:
    """Have a socket, before it is bound or connected, drop the connection of whoever sends a part of more bytes."""
    sock.set(zmq.MAXMSGSIZE, nbytes)


def receive_parts(sock: zmq.Socket[bytes], parts: int, nbytes: int) -> list[bytes] | None:
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


# -- the live stream ---------------------------------------------------------------------------------------------------
# A message has two parts: a topic that names the protocol and its version, and MessagePack. A slow reader loses
# messages and never delays the run; everything is in the run directory. The socket is bound to loopback unless
# `telemetry.bind` says otherwise; then every connection is encrypted and authenticated.


STREAM_TOPIC = b"ddrl.telemetry.2 "
MAX_STREAM_MESSAGE = 64 << 20  # bytes; a record of ten thousand processes has 8 MB


class _RecordMessage(msgspec.Struct, tag="record"):
    tick: int
    time: float
    wall_seconds: float
    series: dict[str, float | None]
    processes: int
    columns: tuple[str, ...]
    table: bytes


class _EventMessage(msgspec.Struct, tag="event"):
    time: float
    wall_seconds: float
    kind: str
    text: str
    fields: dict[str, Any]


class _EvaluationMessage(msgspec.Struct, tag="evaluation"):
    time: float
    wall_seconds: float
    env_steps: float
    updates: float
    mean: float
    std: float
    episodes: int
    policy_version: float


_STREAM_DECODER = msgspec.msgpack.Decoder(_RecordMessage | _EventMessage | _EvaluationMessage)


def encode_item(item: Record | Event | Evaluation) -> bytes:
    """One message of the stream."""
    match item:
        case Record():
            message: Any = _RecordMessage(
                item.tick,
                item.time,
                item.wall_seconds,
                dict(item.series),
                len(item.table),
                item.columns,
                item.table.astype("<f8").tobytes(),
            )
        case Event():
            message = _EventMessage(item.time, item.wall_seconds, item.kind, item.text, item.fields)
        case Evaluation():
            message = _EvaluationMessage(
                item.time,
                item.wall_seconds,
                item.env_steps,
                item.updates,
                item.mean,
                item.std,
                item.episodes,
                item.policy_version,
            )
    return msgspec.msgpack.encode(message, enc_hook=plain)


def decode_item(data: bytes) -> Record | Event | Evaluation:
    """Read what `encode_item` made; MessageError for anything else."""
    what = "a message on the telemetry socket is not one of ddrl's: does another program use it?"
    message = decode(data, _STREAM_DECODER, MessageError, what)
    if isinstance(message, _RecordMessage):
        if message.processes < 0 or len(message.table) != message.processes * len(message.columns) * 8:
            raise MessageError(
                f"a record on the telemetry socket is not one of ddrl's: {len(message.table)} bytes are no table of "
                f"{message.processes} processes and {len(message.columns)} counters"
            )
        table = np.frombuffer(message.table, "<f8").reshape(message.processes, len(message.columns)).copy()
        series = {name: float("nan") if value is None else value for name, value in message.series.items()}
        return Record(message.tick, message.time, message.wall_seconds, series, table, message.columns)
    if isinstance(message, _EventMessage):
        return Event(message.time, message.wall_seconds, message.kind, message.text, message.fields)
    return Evaluation(
        message.time,
        message.wall_seconds,
        message.env_steps,
        message.updates,
        message.mean,
        message.std,
        message.episodes,
        message.policy_version,
    )


def bind(sock: zmq.Socket[bytes], address: str, port: int, setting: str) -> str:
    """Bind to `address`; port 0 takes a free one. Returns the endpoint; RunDirError where the port is in use."""
    try:
        sock.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        raise RunDirError(
            f"cannot listen on {address}:{port} ({error}): set {setting} = 0 to take a free port, or name another"
        ) from None
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


class LiveStream:
    """The publishing end; a sink of the recorder. Port and key are announced in RUN/live.json."""

    def __init__(self, run_dir: Path, config: TelemetryConfig) -> None:
        self._run_dir = run_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._gate: Gate | None = None
        try:
            self._socket.set(zmq.LINGER, 200)
            self._socket.set(zmq.SNDHWM, 64)
            server_key = "" if is_loopback(config.bind) else secure_server(self._socket, run_dir)
            self._gate = start_authenticator(self._context, run_dir) if server_key else None
            self.endpoint = bind(self._socket, config.bind, config.live_port, "telemetry.live_port")
            announce(run_dir, stream=self.endpoint, server_key=server_key)
        except BaseException:
            self._let_go(linger=0)
            raise

    def _send(self, item: Record | Event | Evaluation) -> None:
        self._socket.send_multipart([STREAM_TOPIC, encode_item(item)], flags=zmq.NOBLOCK)

    def record(self, record: Record) -> None:
        """Publish one record."""
        self._send(record)

    def event(self, event: Event) -> None:
        """Publish one event."""
        self._send(event)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Publish one evaluation."""
        self._send(evaluation)

    def close(self) -> None:
        """Stop publishing and take the announcement back."""
        self._let_go()
        live = read_live_file(self._run_dir)
        if live is not None and live.pid == os.getpid():
            (self._run_dir / LIVE_FILE).unlink(missing_ok=True)

    def _let_go(self, linger: int | None = None) -> None:
        self._socket.close(linger=linger)
        if self._gate is not None:
            self._gate.stop()
        self._context.term()


class LiveReader:
    """The listening end: `receive()` gives what arrived, in order. Raises RunDirError where the run is not live."""

    def __init__(self, run_dir: Path) -> None:
        live = read_live_file(run_dir)
        if live is None or not live.stream or not is_alive(live):
            raise RunDirError(f"{run_dir} is not running (no live stream): read it with ddrl.telemetry.Run instead")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        try:
            self._socket.set(zmq.LINGER, 0)
            self._socket.set(zmq.RCVHWM, 256)
            limit_messages(self._socket, MAX_STREAM_MESSAGE)
            secure_client(self._socket, run_dir, live.server_key)
            self._socket.subscribe(STREAM_TOPIC)
            self._socket.connect(live.stream)
        except BaseException:
            self.close()
            raise

    def receive(self, timeout: float = 0.0) -> list[Record | Event | Evaluation]:
        """All that has arrived; waits up to `timeout` seconds for the first. MessageError for a message that is not
        ours."""
        if not self._socket.poll(int(timeout * 1000)):
            return []
        items: list[Record | Event | Evaluation] = []
        while True:
            parts = receive_parts(self._socket, 2, MAX_STREAM_MESSAGE)
            if parts is None:
                return items
            if len(parts) != 2:
                raise MessageError(
                    "a message on the telemetry socket is not one of ddrl's: does another program use the port?"
                )
            items.append(decode_item(parts[1]))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> LiveReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# -- control -----------------------------------------------------------------------------------------------------------
# A ZeroMQ ROUTER; messages of two parts, the protocol's name and version, then JSON.


TOPIC = b"ddrl.control.1"
COMMANDS = ("status", "pause", "resume", "checkpoint", "set", "stop")
SETTABLE = ("learner.lr", "rollout.epsilon", "replay.samples_per_insert", "cluster.scheme")
MAX_MESSAGE = 65536  # bytes; longer ones are not ours


Word = Annotated[str, msgspec.Meta(max_length=128)]  # a command, a setting, its value: what ends up in an event


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """One command; `name` and `value` for `set` alone."""

    id: int
    command: Word
    name: Word = ""
    value: float | Word | None = None


class Reply(msgspec.Struct):
    """The answer to the request of the same id; `text` says what was done, or why not."""

    id: int
    ok: bool
    text: str
    fields: dict[str, Any] = {}


_REQUEST_DECODER = msgspec.json.Decoder(Request)
_REPLY_DECODER = msgspec.json.Decoder(Reply)


def read_request(parts: list[bytes]) -> Request:
    """The command in a message's parts (who asks, protocol, JSON); MessageError for anything else."""
    if len(parts) != 3 or parts[1] != TOPIC:
        raise MessageError(
            "a message on the control socket was not one of ddrl's and was dropped: does another program use the port?"
        )
    what = "a command on the control socket could not be read and was dropped"
    return decode(parts[2], _REQUEST_DECODER, MessageError, what)


def check_setting(config: Config, name: str, value: object) -> float | str | None:
    """The value that a live change of `name` sets; ConfigError where it cannot be changed live or the value is
    impossible.

    rollout.epsilon is the share of random actions, in place of its schedule; None gives the schedule back.
    """
    if name not in SETTABLE:
        raise ConfigError(f"'{name}' cannot be changed while a run goes on; these can: {', '.join(SETTABLE)}")
    section, _, key = name.partition(".")
    if name == "rollout.epsilon":
        section = "rollout"
        key = "epsilon_start"
        if value is None:
            return None
    if isinstance(value, bool) or not isinstance(value, str if name == "cluster.scheme" else (int, float)):
        raise ConfigError(f"{name} = {value!r}: wanted {'a name' if name == 'cluster.scheme' else 'a number'}")
    wanted = value if isinstance(value, str) else float(value)
    component = getattr(config, section)
    if name == "rollout.epsilon":
        component = dataclasses.replace(component, epsilon_end=0.0)
    try:
        dataclasses.replace(config, **{section: dataclasses.replace(component, **{key: wanted})})
    except ConfigError as error:
        raise ConfigError(str(error).replace("rollout.epsilon_start", name)) from None
    return wanted


class ControlServer:
    """Takes commands and hands each to its handler, in the thread that polls.

    `handlers`: {"pause": f(), "resume": f(), "checkpoint": f(), "set": f(name, value), "stop": f(), "status": f()};
    what one returns (None or a dict of JSON values) goes back to the asker; a DdrlError's words go back as a refusal,
    and the run goes on. `record_event` is the recorder's. Raises RunDirError where telemetry.control_port is in use.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        handlers: Mapping[str, Callable[..., dict[str, Any] | None]],
        record_event: Callable[..., None],
    ) -> None:
        self._config = config
        self._handlers = dict(handlers)
        self._record_event = record_event
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._gate: Gate | None = None
        try:
            self._socket.set(zmq.LINGER, 500)
            limit_messages(self._socket, MAX_MESSAGE)
            control_key = secure_server(self._socket, run_dir)
            self._gate = start_authenticator(self._context, run_dir)
            self.endpoint = bind(
                self._socket, config.telemetry.bind, config.telemetry.control_port, "telemetry.control_port"
            )
            announce(run_dir, control=self.endpoint, control_key=control_key)
        except BaseException:
            self.close()
            raise
        self._foreign = 0

    def poll(self, most: int = 16) -> int:
        """Answer what has arrived, at most so many; returns how many. Never blocks."""
        done = 0
        while done < most and (parts := receive_parts(self._socket, 3, MAX_MESSAGE)) is not None:
            done += 1
            try:
                request = read_request(parts)
            except MessageError as error:
                self._foreign += 1
                if (
                    self._foreign & (self._foreign - 1) == 0
                ):  # the 1st, 2nd, 4th, 8th, ...: a flood must not fill the run directory
                    self._record_event("alarm", str(error), foreign_messages=self._foreign)
                continue
            reply = self._answer(request)
            self._socket.send_multipart([parts[0], TOPIC, msgspec.json.encode(reply, enc_hook=str)], flags=zmq.NOBLOCK)
        return done

    def wait(self, seconds: float) -> int:
        """For a paused loop: wait up to so long for a command, then `poll`."""
        self._socket.poll(int(seconds * 1000))
        return self.poll()

    def _answer(self, request: Request) -> Reply:
        command = request.command
        words = f"{command} {request.name} = {request.value}" if command == "set" else command
        try:
            if command not in COMMANDS or command not in self._handlers:
                raise MessageError(
                    f"there is no command '{command}' in this run; known: "
                    f"{', '.join(filter(self._handlers.__contains__, COMMANDS))}"
                )
            if command == "set":
                value = check_setting(self._config, request.name, request.value)
                fields = self._handlers["set"](request.name, value) or {}
            else:
                fields = self._handlers[command]() or {}
        except Exception as error:
            text = str(error) if isinstance(error, DdrlError) else f"{type(error).__name__}: {error}"
            self._record_event("command", f"{words}: refused: {text}", command=command, ok=False)
            return Reply(request.id, False, text)
        if command != "status":
            self._record_event(
                "command", f"{words}: done", command=command, name=request.name, value=request.value, ok=True
            )
        return Reply(request.id, True, f"{words}: done", fields)

    def close(self) -> None:
        """Stop listening; a command that waits for an answer gets none. Further calls do nothing."""
        self._socket.close()
        if self._gate is not None:
            self._gate.stop()
            self._gate = None
        self._context.term()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Attached:
    """A running run, from outside: commands, and its telemetry. Made by `attach`."""

    def __init__(self, path: Path, *, timeout: float = 30.0) -> None:
        self.path = path
        self.timeout = timeout
        live = read_live_file(path)
        if live is None or not live.control:
            raise RunDirError(
                f"{path} is not running, or takes no commands (telemetry.live = false): read it with ddrl.telemetry.Run"
            )
        if not is_alive(live):
            raise RunDirError(
                f"{path}: its process {live.pid} is gone without a word; go on with `python -m ddrl.run --resume "
                f"{path}`"
            )
        self._ids = itertools.count(1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            self._socket.set(zmq.LINGER, 0)
            limit_messages(self._socket, 16 * MAX_MESSAGE)
            secure_client(self._socket, path, live.control_key)
            self._socket.connect(live.control)
        except BaseException:
            self.close()
            raise

    def status(self) -> dict[str, Any]:
        """What the run says about itself."""
        return self._ask("status").fields

    def pause(self) -> str:
        """Hold rollouts and learner until `resume`."""
        return self._ask("pause").text

    def resume(self) -> str:
        """Go on."""
        return self._ask("resume").text

    def checkpoint(self) -> dict[str, Any]:
        """Write a checkpoint now."""
        return self._ask("checkpoint").fields

    def set(self, name: str, value: float | str | None) -> str:
        """Change learner.lr, rollout.epsilon (None: back to its schedule), replay.samples_per_insert or
        cluster.scheme."""
        return self._ask("set", name, value).text

    def stop(self) -> str:
        """End the run as its limits would: saved, with a summary."""
        return self._ask("stop").text

    def follow(self) -> LiveReader:
        """The live stream of records, events and evaluations."""
        return LiveReader(self.path)

    def open(self) -> Run:
        """The run's tables so far."""
        return Run(self.path)

    @property
    def state(self) -> str:
        """running, paused, ending, ended, failed or dead."""
        return run_status(self.path).state

    def _ask(self, command: str, name: str = "", value: float | str | None = None) -> Reply:
        request = Request(next(self._ids), command, name, value)
        self._socket.send_multipart([TOPIC, msgspec.json.encode(request)])
        while self._socket.poll(int(self.timeout * 1000)):
            parts = receive_parts(self._socket, 2, 16 * MAX_MESSAGE)
            if parts is None:
                continue
            what = f"{self.path}: the answer on its control port is not a run's: does another program use the port?"
            if len(parts) != 2 or parts[0] != TOPIC:
                raise MessageError(what)
            reply = decode(parts[1], _REPLY_DECODER, MessageError, what)
            if reply.id != request.id:  # the late answer to a command that was given up
                continue
            if not reply.ok:
                raise MessageError(f"{self.path}: {reply.text}")
            return reply
        raise MessageError(
            f"{self.path} did not answer '{command}' within {self.timeout:g} s: it is busy (a checkpoint?), has "
            "died, or has other keys than keys/client.secret here"
        )

    def close(self) -> None:
        """Let go; the run goes on."""
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def attach(run: str | Path | None = None, *, root: str | Path = "runs", timeout: float = 30.0) -> Attached:
    """Take hold of a running run: its directory, or None for the newest running one under `root`. RunDirError where
    there is none."""
    if run is not None:
        if not Path(run).is_dir():
            raise RunDirError(f"there is no run directory {run}: see `ls {root}`")
        return Attached(Path(run), timeout=timeout)
    for path in find_runs(root):
        if run_status(path).goes_on:
            return Attached(path, timeout=timeout)
    raise RunDirError(
        f"no run under {Path(root).resolve()} is running: start one with `python -m ddrl.run`, or name its directory"
    )

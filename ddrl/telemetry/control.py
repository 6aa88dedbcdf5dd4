"""Sockets of a run or a pool: the live stream of records, and commands from outside (pause, checkpoint, stop, ...).

The recorder publishes (`LiveStream`); the loop of a trainer or of a pool's master polls for commands (`ControlServer`,
about a microsecond when there is none). `LiveReader`, `ControlClient` and, for a run, `attach` are the other ends, for
notebooks and other programs. FOLDER/live.json names the addresses. Commands are always encrypted and authenticated, the
stream where it leaves the machine. Whatever is no message of ours is dropped and never reaches a handler."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import msgspec
import numpy as np
import zmq

from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.errors import ConfigError, DdrlError, MessageError, RunDirError, shortened
from ddrl.core.files import MAX_STATUS, decode, read_regular, write_atomically
from ddrl.core.plugins import is_loopback, own_secret
from ddrl.telemetry.directory import announce, find_runs, is_alive, read_live_file, run_status
from ddrl.telemetry.reading import Run
from ddrl.telemetry.series import Evaluation, Event, Record, plain

# -- keys --------------------------------------------------------------------------------------------------------------
# FOLDER/keys holds server.secret and client.secret, readable by their owner alone. Only a client that holds
# client.secret is accepted, so another user of the machine, who can reach the ports of loopback, can neither stop nor
# change a run. To control a run from another machine, copy FOLDER/keys/client.secret and FOLDER/live.json (which has
# the server's public key) there.

_KEYS = "keys"
_DOMAIN = b"ddrl"


class Authenticator(Protocol):
    """A running thread that accepts or refuses clients."""

    def stop(self) -> None:
        """End it; before its context ends."""
        ...


def secure_server(sock: zmq.Socket[bytes], folder: Path) -> str:
    """Encrypt a socket that is about to be bound; returns the public key that its clients need."""
    if not zmq.has("curve"):
        raise ConfigError(
            "this build of pyzmq has no CURVE encryption, without which a run takes no commands: install the pyzmq of "
            "PyPI, or set telemetry.live = false"
        )
    public, secret = _key_pair(folder, "server.secret")
    sock.curve_server = True
    sock.curve_secretkey = secret
    sock.curve_publickey = public
    sock.zap_domain = _DOMAIN
    return public.decode()


def start_authenticator(context: zmq.Context[Any], folder: Path) -> Authenticator:
    """Accept only clients that hold FOLDER/keys/client.secret; returns what must be stopped with the context."""
    from zmq.auth.thread import ThreadAuthenticator  # runs that take no commands never need it

    public, _ = _key_pair(folder, "client.secret")
    clients = folder / _KEYS / "clients"
    clients.mkdir(exist_ok=True)
    for path in clients.iterdir():  # whoever has one of these keys would be obeyed
        try:
            path.unlink()
        except OSError as error:  # a folder
            where = clients.resolve() / path.name
            raise RunDirError(f"{where} cannot be removed ({error.strerror}), and could hold keys: remove it") from None
    write_atomically(clients / "client.key", f'metadata\ncurve\n    public-key = "{public.decode()}"\n'.encode())
    authenticator: Any = ThreadAuthenticator(context)  # some of its methods have no types
    authenticator.start()
    authenticator.configure_curve(domain=_DOMAIN.decode(), location=str(clients))
    return authenticator


def secure_client(sock: zmq.Socket[bytes], folder: Path, server_key: str) -> None:
    """Prepare a socket that is about to connect to a server with `server_key`; an empty key means no encryption."""
    if not server_key:
        return
    path = folder / _KEYS / "client.secret"
    try:
        secret = read_regular(path, MAX_STATUS).strip()
    except OSError as error:
        raise RunDirError(
            f"cannot read {path} ({error.strerror or error}): only who holds this key may steer the run; "
            "on another machine, copy the file there"
        ) from None
    try:
        public = zmq.curve_public(secret)
        sock.curve_secretkey = secret
        sock.curve_publickey = public
        sock.curve_serverkey = server_key.encode()
    except (ValueError, UnicodeError, zmq.ZMQError) as error:
        raise RunDirError(
            f"the keys of {folder} are damaged ({error}): copy keys/client.secret and live.json from the machine that "
            "runs once more"
        ) from None


def _key_pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    """(public, secret) of the key in FOLDER/keys/NAME."""
    secret = own_secret(folder, f"{_KEYS}/{name}", lambda: zmq.curve_keypair()[1])
    return zmq.curve_public(secret), secret


# -- sockets -----------------------------------------------------------------------------------------------------------
# Messages are bounded in parts and in bytes, in both directions.

MIN_DESCRIPTORS = 24  # that a socket with its context and its keys opens, and some clients
_FIELDS = {
    "stream": ("server_key", "live_port"),
    "control": ("control_key", "control_port"),
}  # of LiveFile, settings


def receive_parts(sock: zmq.Socket[bytes], parts: int, nbytes: int) -> list[bytes] | None:
    """The parts of the next message that has arrived; an empty list for one of more parts or bytes than allowed, None
    where there is none. Never blocks; a message that is refused is read to its end, a part at a time."""
    kept: list[bytes] = []
    count = 0
    size = 0
    try:
        part = sock.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    while True:
        count += 1
        size += len(part)
        if count <= parts and size <= nbytes:
            kept.append(part)
        if not sock.get(zmq.RCVMORE):
            return kept if count <= parts and size <= nbytes else []
        part = sock.recv()  # a message arrives whole: its further parts are there


def _need_descriptors() -> None:
    """RunDirError where this process can open few files more: ZeroMQ would end it without a word."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(MIN_DESCRIPTORS):
                opened.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
        except OSError as error:
            raise RunDirError(
                f"the sockets of a run need {MIN_DESCRIPTORS} open files more than this process can have "
                f"({error.strerror}): raise `ulimit -n`, or set telemetry.live = false"
            ) from None


class _Socket:
    """A ZeroMQ socket with a context of its own; a context manager, which closes both. `max_bytes`: the connection of
    a peer that sends a larger part is dropped."""

    def __init__(self, kind: int, *, linger: int, max_bytes: int) -> None:
        _need_descriptors()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.set(zmq.LINGER, linger)
        self._socket.set(zmq.MAXMSGSIZE, max_bytes)

    def connect(self, folder: Path, address: str, server_key: str) -> None:
        """To an address in FOLDER/live.json; "": not encrypted. RunDirError where that cannot be; it is closed then."""
        try:
            secure_client(self._socket, folder, server_key)
            self._socket.connect(address)
        except BaseException as error:
            self.close()
            if not isinstance(error, zmq.ZMQError):
                raise
            raise RunDirError(f"{folder}: live.json names the address {address!r}: {error.strerror}") from None

    def close(self) -> None:
        """Let go of the socket. Further calls do nothing."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Server(_Socket):
    """A socket that is bound, and announced in FOLDER/live.json until it is closed. RunDirError where the port is in
    use."""

    def __init__(
        self,
        folder: Path,
        name: Literal["stream", "control"],
        kind: int,
        telemetry: TelemetryConfig,
        *,
        encrypted: bool,
        linger: int,
        max_bytes: int,
    ) -> None:
        super().__init__(kind, linger=linger, max_bytes=max_bytes)
        self._folder = folder
        self._name = name
        self._authenticator: Authenticator | None = None
        self._key_field, setting = _FIELDS[name]
        port = getattr(telemetry, setting)
        try:
            key = secure_server(self._socket, folder) if encrypted else ""
            if encrypted:
                self._authenticator = start_authenticator(self._context, folder)
            self._socket.bind(f"tcp://{telemetry.bind}:{port or '*'}")
            self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            announce(folder, **{name: self.endpoint, self._key_field: key})
        except zmq.ZMQError as error:
            self.close()
            remedy = (
                f"set telemetry.{setting} = 0 to take a free port, or name another"
                if port
                else ("set telemetry.bind to an address of this machine, or telemetry.live = false")
            )
            raise RunDirError(f"cannot listen on {telemetry.bind}:{port} ({error}): {remedy}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening and withdraw the announcement. Further calls do nothing."""
        if self._socket.closed:
            return
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        announce(self._folder, **{self._name: "", self._key_field: ""})


# -- the live stream ---------------------------------------------------------------------------------------------------
# A message has two parts: a topic that names the protocol and its version, and MessagePack. A slow reader loses
# messages and never delays the run; everything is in the run directory. The socket is bound to loopback unless
# `telemetry.bind` says otherwise; then every connection is encrypted and authenticated.

STREAM_TOPIC = b"ddrl.telemetry.3 "
MAX_STREAM_MESSAGE = 64 << 20  # bytes; a record of ten thousand processes has 8 MB

Item = Record | Event | Evaluation


def _array_bytes(value: Any) -> Any:
    return value.astype("<f8").tobytes() if isinstance(value, np.ndarray) else plain(value)


def _bytes_array(_: type, data: Any) -> Any:
    return np.frombuffer(data, "<f8")


_STREAM_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_bytes)
_STREAM_DECODER = msgspec.msgpack.Decoder(Item, dec_hook=_bytes_array)


def encode_item(item: Item) -> bytes:
    """One message of the stream."""
    if isinstance(item, Event):
        return msgspec.msgpack.encode(item, enc_hook=plain)
    return _STREAM_ENCODER.encode(item)


def decode_item(data: bytes) -> Item:
    """Read what `encode_item` made; MessageError for anything else."""
    what = "a message on the telemetry socket is not one of ddrl's: does another program use it?"
    item = decode(data, _STREAM_DECODER, MessageError, what)
    if not isinstance(item, Record):
        return item
    if not item.columns or len(item.table) % len(item.columns):
        raise MessageError(
            f"a record on the telemetry socket is not one of ddrl's: {len(item.table)} numbers are no table of "
            f"{len(item.columns)} counters"
        )
    return msgspec.structs.replace(item, table=item.table.reshape(-1, len(item.columns)).copy())


class LiveStream(_Server):
    """The publishing end; a sink of the recorder."""

    def __init__(self, run_dir: Path, telemetry: TelemetryConfig) -> None:
        super().__init__(
            run_dir,
            "stream",
            zmq.PUB,
            telemetry,
            encrypted=not is_loopback(telemetry.bind),
            linger=200,
            max_bytes=MAX_STREAM_MESSAGE,
        )

    def record(self, item: Item, /) -> None:
        """Publish one record, event or evaluation."""
        self._socket.send_multipart([STREAM_TOPIC, encode_item(item)], flags=zmq.NOBLOCK)

    event = evaluation = record


class LiveReader(_Socket):
    """The listening end: `receive()` gives what arrived, in order. Raises RunDirError where the run is not live."""

    def __init__(self, run_dir: Path) -> None:
        live = read_live_file(run_dir)
        if live is None or not live.stream or not is_alive(live):
            raise RunDirError(f"{run_dir} is not running (no live stream): read it with ddrl.telemetry.Run instead")
        super().__init__(zmq.SUB, linger=0, max_bytes=MAX_STREAM_MESSAGE)
        self._socket.subscribe(STREAM_TOPIC)
        self.connect(run_dir, live.stream, live.server_key)

    def receive(self, timeout: float = 0.0) -> list[Item]:
        """All that has arrived; waits up to `timeout` [s] for the first. MessageError for a message that is not of
        ddrl's protocol."""
        items: list[Item] = []
        if not self._socket.poll(int(timeout * 1000)):
            return items
        while (parts := receive_parts(self._socket, 2, MAX_STREAM_MESSAGE)) is not None:
            if len(parts) != 2:
                raise MessageError(
                    "a message on the telemetry socket is not one of ddrl's: does another program use the port?"
                )
            items.append(decode_item(parts[1]))
        return items


# -- commands ----------------------------------------------------------------------------------------------------------
# A ZeroMQ ROUTER; messages of two parts, the protocol's name and version, then JSON.

TOPIC = b"ddrl.control.2"
MAX_MESSAGE = 65536  # bytes of a request
MAX_ANSWER = 16 * MAX_MESSAGE
SETTABLE = ("learner.lr", "rollout.epsilon", "replay.samples_per_insert", "cluster.scheme", "run.processes")
MAX_LIVE = {"learner.lr": 1.0, "replay.samples_per_insert": 1e6, "run.processes": 4096, "rollout.epsilon": 1.0}

# Bounded, because commands and their arguments are recorded as events.
Word = Annotated[str, msgspec.Meta(max_length=128)]
Argument = float | Annotated[str, msgspec.Meta(max_length=4096)] | None  # 4096: a path


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """One command and its arguments by name."""

    id: int
    command: Word
    arguments: Annotated[dict[Word, Argument], msgspec.Meta(max_length=8)] = {}


class _Numbered(msgspec.Struct):
    """What may be left of a command that cannot be read: the sender knows it by its id."""

    id: int = 0


class Reply(msgspec.Struct):
    """The answer to the request of the same id; `text` says what was done, or why not."""

    id: int
    ok: bool
    text: str
    fields: dict[str, Any] = {}


_REQUEST_DECODER = msgspec.json.Decoder(Request)
_NUMBERED_DECODER = msgspec.json.Decoder(_Numbered)
_REPLY_DECODER = msgspec.json.Decoder(Reply)


def read_request(parts: list[bytes]) -> Request:
    """The command in a message's parts (sender, protocol, JSON); MessageError for anything else."""
    if len(parts) != 3 or parts[1] != TOPIC:
        raise MessageError(
            "a message on the control socket was not one of ddrl's and was dropped: does another program use the port?"
        )
    what = "a command on the control socket could not be read"
    return decode(parts[2], _REQUEST_DECODER, MessageError, what)


def _id_of(data: bytes) -> int:
    """The id of a command that cannot be read; 0 where that cannot be read either."""
    try:
        return decode(data, _NUMBERED_DECODER, MessageError, "").id
    except MessageError:
        return 0


def check_setting(config: Config, name: str, value: object) -> float | str | None:
    """The value that a live change of `name` sets; ConfigError where it cannot be changed live or the value is
    impossible.

    rollout.epsilon is the share of random actions, in place of its schedule; None restores the schedule.
    """
    if name not in SETTABLE:
        raise ConfigError(f"'{name}' cannot be changed while a run goes on; these can: {', '.join(SETTABLE)}")
    section, _, key = name.partition(".")
    if name == "rollout.epsilon":
        key = "epsilon_start"
        if value is None:
            return None
    if isinstance(value, bool) or not isinstance(value, str if name == "cluster.scheme" else (int, float)):
        raise ConfigError(f"{name} = {value!r}: wanted {'a name' if name == 'cluster.scheme' else 'a number'}")
    if not isinstance(value, str) and not abs(value) <= MAX_LIVE[name]:
        raise ConfigError(
            f"{name} = {value!r}: a live change sets at most {MAX_LIVE[name]:g}; more by --set at a resume"
        )
    wanted = value if isinstance(value, str) else float(value)
    if name == "run.processes":
        if wanted != int(wanted) or int(wanted) < 1:
            raise ConfigError(f"{name} = {value}: wanted a whole number of at least 1")
        return int(wanted)
    component = getattr(config, section)
    if name == "rollout.epsilon":
        component = dataclasses.replace(component, epsilon_end=0.0)
    try:
        dataclasses.replace(config, **{section: dataclasses.replace(component, **{key: wanted})})
    except ConfigError as error:
        raise ConfigError(str(error).replace("rollout.epsilon_start", name)) from None
    return wanted


class ControlServer(_Server):
    """Takes commands and passes each to its handler, in the thread that polls.

    `handlers`: by command, e.g. {"pause": f(), "set": f(name, value)}; each is called with the request's arguments as
    keywords. What it returns (None or a dict of JSON values) is sent back; the text of an exception is sent back as a
    refusal, and the run continues. Every command but "status" is recorded as an event by `record_event` (see
    `Recorder.record_event`). Raises RunDirError where telemetry.control_port is in use."""

    def __init__(
        self,
        folder: Path,
        handlers: Mapping[str, Callable[..., dict[str, Any] | None]],
        record_event: Callable[..., None],
        telemetry: TelemetryConfig | None = None,
    ) -> None:
        super().__init__(
            folder,
            "control",
            zmq.ROUTER,
            telemetry or TelemetryConfig(),
            encrypted=True,
            linger=500,
            max_bytes=MAX_MESSAGE,
        )
        self._handlers = dict(handlers)
        self._record_event = record_event
        self._dropped = 0

    def fileno(self) -> int:
        """For selectors: can be read when `poll` may have something to answer; ask again after each `poll`."""
        return int(self._socket.getsockopt(zmq.FD))

    def poll(self, limit: int = 16) -> int:
        """Answer what has arrived, at most `limit` messages; returns their number. Never blocks."""
        answered = 0
        while answered < limit and (parts := receive_parts(self._socket, 3, MAX_MESSAGE)) is not None:
            answered += 1
            try:
                request = read_request(parts)
            except MessageError as error:
                self._dropped += 1
                if self._dropped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...: a flood must not fill the disk
                    self._record_event("alarm", str(error), foreign_messages=self._dropped)
                if parts[1:2] != [TOPIC]:
                    continue
                reply = Reply(_id_of(parts[-1]), False, str(error))
            else:
                reply = self._answer(request)
            self._socket.send_multipart([parts[0], TOPIC, msgspec.json.encode(reply, enc_hook=str)], flags=zmq.NOBLOCK)
        return answered

    def wait(self, seconds: float) -> int:
        """For a paused loop: wait up to `seconds` for a command, then `poll`."""
        self._socket.poll(int(seconds * 1000))
        return self.poll()

    def _answer(self, request: Request) -> Reply:
        command = request.command
        words = shortened(f"{command} {' = '.join(map(str, request.arguments.values()))}")
        try:
            if command not in self._handlers:
                raise MessageError(f"there is no command '{command}' here; known: {', '.join(self._handlers)}")
            handler = self._handlers[command]
            try:
                call = inspect.signature(handler).bind(**request.arguments)
            except TypeError as error:
                raise MessageError(str(error)) from None
            fields = handler(*call.args, **call.kwargs) or {}
        except Exception as error:
            text = str(error) if isinstance(error, DdrlError) else f"{type(error).__name__}: {error}"
            self._record_event("command", f"{words}: refused: {text}", command=command, ok=False)
            return Reply(request.id, False, text)
        if command != "status":
            self._record_event("command", f"{words}: done", command=command, arguments=request.arguments, ok=True)
        return Reply(request.id, True, f"{words}: done", fields)


def is_listening(folder: Path) -> bool:
    """Whether a process that takes commands is alive there; True for one on another machine, which cannot be seen."""
    live = read_live_file(folder)
    return live is not None and bool(live.control) and is_alive(live)


RESTART_POLL = 0.1  # [s] between two looks for the next trainer


class ControlClient(_Socket):
    """Sends commands to the `ControlServer` of a folder. RunDirError where none is announced, or its process is gone.
    `timeout`: seconds that an answer may take, and the start of another trainer where one has died."""

    def __init__(self, folder: Path, *, timeout: float = 30.0) -> None:
        self.path = folder
        self.timeout = timeout
        deadline = time.monotonic() + timeout
        live = read_live_file(folder)
        # Its trainer starts, in place of one that has died too: it announces the stream first and the commands after.
        while live is not None and not (live.control and is_alive(live)):
            if not run_status(folder).is_active or time.monotonic() >= deadline:
                break
            time.sleep(RESTART_POLL)
            live = read_live_file(folder)
        if live is None or not live.control:
            raise RunDirError(
                f"{folder} is not running, or takes no commands (telemetry.live = false): read it with "
                "ddrl.telemetry.Run"
            )
        if not is_alive(live):
            raise RunDirError(
                f"{folder}: its process {live.pid} is gone without a word; go on with `python -m ddrl.run --resume "
                f"{folder}`"
            )
        super().__init__(zmq.DEALER, linger=0, max_bytes=MAX_ANSWER)
        self._ids = itertools.count(1)
        self.connect(folder, live.control, live.control_key)

    def ask(self, command: str, **arguments: float | str | None) -> Reply:
        """Send a command and wait for its answer. MessageError with the server's text where it refuses, or where there
        is no answer in time."""
        request = Request(next(self._ids), command, arguments)
        self._socket.send_multipart([TOPIC, msgspec.json.encode(request)])
        while self._socket.poll(int(self.timeout * 1000)):
            parts = receive_parts(self._socket, 2, MAX_ANSWER)
            if parts is None:
                continue
            what = f"{self.path}: the answer on its control port is not a run's: does another program use the port?"
            if len(parts) != 2 or parts[0] != TOPIC:
                raise MessageError(what)
            reply = decode(parts[1], _REPLY_DECODER, MessageError, what)
            if reply.id != request.id:  # the late answer to an earlier command that timed out
                continue
            if not reply.ok:
                raise MessageError(f"{self.path}: {reply.text}")
            return reply
        raise MessageError(
            f"{self.path} did not answer '{command}' within {self.timeout:g} s: it is busy (a checkpoint?), has "
            "died, or has other keys than keys/client.secret here"
        )


class Attached(ControlClient):
    """A running run, from outside: commands, and its telemetry. Made by `attach`."""

    def status(self) -> dict[str, Any]:
        """What the run says about itself."""
        return self.ask("status").fields

    def pause(self) -> str:
        """Hold rollouts and learner until `resume`."""
        return self.ask("pause").text

    def resume(self) -> str:
        """End the pause."""
        return self.ask("resume").text

    def checkpoint(self) -> dict[str, Any]:
        """Write a checkpoint now."""
        return self.ask("checkpoint").fields

    def set(self, name: str, value: float | str | None) -> str:
        """Change learner.lr, rollout.epsilon (None: back to its schedule), replay.samples_per_insert or
        cluster.scheme."""
        return self.ask("set", name=name, value=value).text

    def stop(self) -> str:
        """End the run as its limits would: saved, with a summary."""
        return self.ask("stop").text

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


def attach(run: str | Path | None = None, *, root: str | Path = "runs", timeout: float = 30.0) -> Attached:
    """Connect to a running run: its directory, or None for the newest running one under `root`. RunDirError where
    there is none."""
    if run is not None:
        if not Path(run).is_dir():
            raise RunDirError(f"there is no run directory {run}: see `ls {root}`")
        return Attached(Path(run), timeout=timeout)
    for path in find_runs(root):
        if run_status(path).is_active:
            return Attached(path, timeout=timeout)
    raise RunDirError(
        f"no run under {Path(root).resolve()} is running: start one with `python -m ddrl.run`, or name its directory"
    )

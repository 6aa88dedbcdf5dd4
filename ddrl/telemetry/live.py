"""The live stream of a run: what the recorder writes, at the same moment, on a ZeroMQ publish socket; and
RUN/live.json, which says where.

Written by rank 0, read by dashboards and notebooks (`LiveReader`). A message is two parts: a topic that names the
protocol and its version, and MessagePack. A slow reader loses messages, never the run time: the whole is in the run
directory. Bound to loopback unless `telemetry.bind` says otherwise; then every connection is encrypted and
authenticated by CURVE keys in RUN/keys (`ddrl.telemetry.keys`)."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from ddrl.channels.segment import start_time
from ddrl.core.config import TelemetryConfig
from ddrl.core.errors import MessageError, RunDirError
from ddrl.core.files import decode as decode_message
from ddrl.core.files import write_atomically
from ddrl.telemetry import keys, wire
from ddrl.telemetry.record import Evaluation, Event, Record, plain

LIVE_FILE = "live.json"
TOPIC = b"ddrl.telemetry.2 "
MAX_LIVE_FILE = 65536  # bytes
MAX_MESSAGE = 64 << 20  # bytes; a record of ten thousand processes has 8 MB


class LiveFile(msgspec.Struct, omit_defaults=True):
    """RUN/live.json: who runs, and where to listen. Removed when the run ends; a dead `pid` means that the run died."""

    pid: int
    host: str
    pid_started: float = 0.0
    stream: str = ""
    control: str = ""
    server_key: str = ""  # public CURVE key of the stream, where that is encrypted
    control_key: str = ""  # of the commands


_LIVE_FILE_DECODER = msgspec.json.Decoder(LiveFile)


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


_DECODER = msgspec.msgpack.Decoder(_RecordMessage | _EventMessage | _EvaluationMessage)


def encode(item: Record | Event | Evaluation) -> bytes:
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


def decode(data: bytes) -> Record | Event | Evaluation:
    """Read what `encode` made; MessageError for anything else."""
    what = "a message on the telemetry socket is not one of ddrl's: does another program use it?"
    message = decode_message(data, _DECODER, MessageError, what)
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


def announce(run_dir: Path, **where: str) -> None:
    """Write addresses of this process to RUN/live.json (atomically), keeping those it announced before."""
    path = run_dir / LIVE_FILE
    known = read_live_file(run_dir)
    mine = LiveFile(os.getpid(), socket.gethostname(), start_time(os.getpid()))
    if known is not None and (known.pid, known.host, known.pid_started) == (mine.pid, mine.host, mine.pid_started):
        mine = known
    for name, value in where.items():
        setattr(mine, name, value)
    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(mine)), sync=False)
    except OSError as error:
        raise RunDirError(f"cannot write {path} ({error.strerror}): choose another run.dir") from None


def read_live_file(run_dir: Path) -> LiveFile | None:
    """What RUN/live.json says; None where there is none or it is not ours."""
    try:
        with (run_dir / LIVE_FILE).open("rb") as file:
            return decode_message(file.read(MAX_LIVE_FILE), _LIVE_FILE_DECODER, MessageError, LIVE_FILE)
    except (OSError, MessageError):
        return None


def is_alive(live: LiveFile) -> bool:
    """Whether the process that wrote `live` still runs; True for one on another machine, whose processes cannot be
    seen."""
    if live.host != socket.gethostname():
        return True
    started = start_time(live.pid)
    return started > 0 and (not live.pid_started or started == live.pid_started)


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
        self._gate: keys.Gate | None = None
        try:
            self._socket.set(zmq.LINGER, 200)
            self._socket.set(zmq.SNDHWM, 64)
            server_key = "" if keys.is_loopback(config.bind) else keys.secure_server(self._socket, run_dir)
            self._gate = keys.start_authenticator(self._context, run_dir) if server_key else None
            self.endpoint = bind(self._socket, config.bind, config.live_port, "telemetry.live_port")
            announce(run_dir, stream=self.endpoint, server_key=server_key)
        except BaseException:
            self._let_go(linger=0)
            raise

    def _send(self, item: Record | Event | Evaluation) -> None:
        self._socket.send_multipart([TOPIC, encode(item)], flags=zmq.NOBLOCK)

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
            wire.limit(self._socket, MAX_MESSAGE)
            keys.secure_client(self._socket, run_dir, live.server_key)
            self._socket.subscribe(TOPIC)
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
            parts = wire.receive(self._socket, 2, MAX_MESSAGE)
            if parts is None:
                return items
            if len(parts) != 2:
                raise MessageError(
                    "a message on the telemetry socket is not one of ddrl's: does another program use the port?"
                )
            items.append(decode(parts[1]))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> LiveReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

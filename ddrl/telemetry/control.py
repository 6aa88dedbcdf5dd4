"""Control from outside: pause, resume, checkpoint now, change a setting, stop; each acknowledged and recorded as an
event.

`ControlServer` belongs to the trainer's process, whose loop polls it (about a microsecond when nobody asks); `attach`
gives a notebook or another terminal the other end. Protocol: a ZeroMQ ROUTER with CURVE keys (`ddrl.telemetry.keys`),
always; messages of two parts, the protocol's name and version, then JSON. Whoever does not hold the run's key is not
heard; a message that is not ours is dropped and noted, and never reaches a handler."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, DdrlError, MessageError, RunDirError
from ddrl.core.files import decode
from ddrl.telemetry import keys, wire
from ddrl.telemetry.directory import find_runs
from ddrl.telemetry.live import LiveReader, announce, bind, is_alive, read_live_file
from ddrl.telemetry.reading import Run
from ddrl.telemetry.status import run_status

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
        self._gate: keys.Gate | None = None
        try:
            self._socket.set(zmq.LINGER, 500)
            wire.limit(self._socket, MAX_MESSAGE)
            control_key = keys.secure_server(self._socket, run_dir)
            self._gate = keys.start_authenticator(self._context, run_dir)
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
        while done < most and (parts := wire.receive(self._socket, 3, MAX_MESSAGE)) is not None:
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
            wire.limit(self._socket, 16 * MAX_MESSAGE)
            keys.secure_client(self._socket, path, live.control_key)
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
            parts = wire.receive(self._socket, 2, 16 * MAX_MESSAGE)
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

"""RUN/status.json: what state a run is in, since when, and why. The one source for dashboards, notebooks and `attach`.

Written by the recorder whenever an event changes the state; the reader adds whether the process still lives:

    running   it trains                               paused    by command
    ending    a limit, a signal or a command was met  ended     it said so, with its reason
    failed    it said so, with the error              dead      its process is gone and it never said so
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Literal

import msgspec

from ddrl.channels.segment import start_time
from ddrl.core.errors import MessageError, RunDirError
from ddrl.core.files import decode, write_atomically
from ddrl.telemetry.live import is_alive, read_live_file
from ddrl.telemetry.record import Event

FILE_NAME = "status.json"
State = Literal["running", "paused", "ending", "ended", "failed", "dead"]
GOING_ON = frozenset({"running", "paused", "ending"})


class Status(msgspec.Struct, frozen=True):
    """The state of a run. `since`: Unix seconds; `reason` in words, "" where there is nothing to say."""

    state: State
    reason: str = ""
    since: float = 0.0
    pid: int = 0
    host: str = ""
    pid_started: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the run's process is at work."""
        return self.state in GOING_ON


_DECODER = msgspec.json.Decoder(Status)


class StatusFile:
    """The writer: follows a run's events."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._status = Status("running")
        self._write("running", "")

    @property
    def state(self) -> State:
        """The state as it was written last."""
        return self._status.state

    def follow(self, event: Event) -> None:
        """Note what an event says of the run's state."""
        state = self._status.state
        command = event.fields.get("command")
        if event.kind == "error":
            self._write("failed", event.text)
        elif (event.kind == "stop" and state != "failed") or (event.kind == "end" and state != "failed"):
            self._write("ending", event.text)
        elif event.kind == "command" and event.fields.get("ok") and command in ("pause", "resume", "stop"):
            states: dict[str, State] = {"pause": "paused", "resume": "running", "stop": "ending"}
            self._write(states[command], "by command")

    def close(self) -> None:
        """The run's last word."""
        if self._status.state != "failed":
            self._write("ended", self._status.reason if self._status.state == "ending" else "")

    def _write(self, state: State, reason: str) -> None:
        process = os.getpid()
        self._status = Status(
            state, reason[:2000], time.time(), process, socket.gethostname(), float(start_time(process))
        )
        try:
            write_atomically(self._path, msgspec.json.format(msgspec.json.encode(self._status)) + b"\n", sync=False)
        except OSError as error:
            raise RunDirError(f"cannot write {self._path} ({error.strerror}): choose another run.dir") from None


def run_status(run_dir: Path) -> Status:
    """The state of a run directory, without opening its telemetry."""
    try:
        with (run_dir / FILE_NAME).open("rb") as file:
            status = decode(file.read(65536), _DECODER, MessageError, FILE_NAME)
    except (OSError, MessageError):
        return _status_of_older(run_dir)
    if status.goes_on and status.host == socket.gethostname() and start_time(status.pid) != status.pid_started:
        return Status("dead", f"its process {status.pid} is gone and never said why", status.since, status.pid)
    return status


def _status_of_older(run_dir: Path) -> Status:
    """The state of a run whose status.json is damaged or was never written."""
    live = read_live_file(run_dir)
    if live is None:
        return Status("ended")
    if is_alive(live):
        return Status("running", pid=live.pid, host=live.host)
    return Status("dead", f"its process {live.pid} is gone and never said why", pid=live.pid, host=live.host)

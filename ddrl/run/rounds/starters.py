"""The process that starts a host's collectors, as who started it sees it: a child, and the pipes to and from it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from typing import Protocol

import msgspec

from ddrl.core.errors import JobFailed
from ddrl.run.process import interrupts_held_back
from ddrl.run.rounds.orders import Down, Up, host_clock
from ddrl.run.rounds.starter import STOP_TIMEOUT, Lines


class Starters(Protocol):
    """What starts a task's collectors: a process on this host, or one on each host."""

    def say(self, message: Down) -> None:
        """Send a message; JobFailed where nobody takes it."""
        ...

    def hear(self) -> list[Up]:
        """What has come since the last call; never waits. JobFailed where a starter has ended."""
        ...

    def wait(self, timeout: float) -> object:
        """Sleep until there is something to hear, at most `timeout` [s]."""
        ...

    def stop(self) -> list[Up]:
        """End all collectors; what was not heard yet."""
        ...


class StarterProcess:
    """The process that starts a host's collectors, and the pipes to and from it; a child of the trainer, on other hosts
    of the relay."""

    def __init__(self, run_id: str, host: int) -> None:
        self.clock = host_clock()
        self._told = False  # to end
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
        with interrupts_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ddrl.run.rounds.starter", run_id, str(host), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin.fileno()
        self._reports = self._process.stdout.fileno()
        self._lines = Lines(self._reports)
        self._decoder = msgspec.json.Decoder(Up)

    def say(self, message: Down) -> None:
        """Send a message; JobFailed where the starter has ended."""
        self.write(msgspec.json.encode(message))

    def hear(self) -> list[Up]:
        """What has come since the last call; never waits. JobFailed where the starter has ended."""
        return [self._decoder.decode(line) for line in self.read()]

    def write(self, line: bytes) -> None:
        """As `say`, of a message as bytes; nothing after `end`."""
        if self._told:
            return
        try:
            os.write(self._orders, line + b"\n")
        except BrokenPipeError:
            raise JobFailed(self._last_words()) from None

    def read(self) -> list[bytes]:
        """As `hear`, messages as bytes; no error where it was told to end."""
        lines = self._lines.read()
        if self._lines.ended and not lines and not self._told:
            raise JobFailed(self._last_words())
        return lines

    def wait(self, timeout: float) -> bool:
        """Sleep until there is something to hear, at most `timeout` [s]; whether there is."""
        return bool(select.select([self._reports], [], [], timeout)[0])

    @property
    def ended(self) -> bool:
        """Whether all that it said was read, and no more comes."""
        return self._lines.ended

    def end(self) -> None:
        """Tell it to end all collectors, and itself."""
        assert self._process.stdin is not None
        self._told = True
        self._process.stdin.close()

    def stop(self, timeout: float = 2 * STOP_TIMEOUT) -> list[Up]:
        """End all collectors and wait for them, at most `timeout` [s]; what was not heard yet."""
        assert self._process.stdout is not None
        self.end()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        messages: list[Up] = [self._decoder.decode(line) for line in self._lines.read()]
        self._process.stdout.close()
        self._errors.close()
        return messages

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()
        return f"the starter of the collectors ended with status {status}{f':{chr(10)}{words}' if words else ''}"

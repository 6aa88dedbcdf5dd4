from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddrl.channels import segment_name, unlink_run
from ddrl.pool.leases import LeaseMaster
from tests.waiting import PATIENCE

NURSERY = Path(__file__).with_name("nursery.py")


@pytest.fixture
def name() -> Iterator[str]:
    """Name of a table that leaves nothing behind."""
    run_id = f"test{uuid.uuid4().hex[:12]}"
    yield segment_name(run_id, 0, "leases")
    unlink_run(run_id)


class Nursery:
    """Forks task processes quickly, from one that has imported ddrl; they end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, str(NURSERY), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pids: list[int] = []

    def start(self, table: str, task: str, *moves: str) -> int:
        """Start a process of `task` that does `moves`; returns its pid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(table, task, *moves, file=self._process.stdin, flush=True)
        self.pids.append(int(self._process.stdout.readline()))
        return self.pids[-1]

    def log(self, task: str) -> list[str]:
        """What the processes of a task have written, line by line."""
        path = self.folder / f"{task}.log"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        import os

        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate(timeout=PATIENCE)


@pytest.fixture
def nursery(tmp_path) -> Iterator[Nursery]:
    started = Nursery(tmp_path)
    yield started
    started.close()


@pytest.fixture
def master(name) -> Iterator[Callable[..., LeaseMaster]]:
    """Masters of one table: master(policy, devices)."""
    made: list[LeaseMaster] = []

    def make(policy, devices: int, **more) -> LeaseMaster:
        made.append(LeaseMaster(name, policy, devices, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def serve(master: LeaseMaster, until: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Let the master answer until something holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "the master waited in vain"
        master.turn(0.2)

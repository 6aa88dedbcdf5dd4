from __future__ import annotations

import queue
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddrl.channels import segment_name, unlink_run
from ddrl.core.errors import PoolError
from ddrl.pool.devices import parse_devices
from ddrl.pool.leases import LeaseHolder, LeaseMaster
from ddrl.pool.policies import Policy
from ddrl.pool.records import Lease
from ddrl.pool.task import Lender
from ddrl.run.task import Task
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


def turn(master: LeaseMaster, timeout: float) -> None:
    """Let the master sleep until there is something to answer, at most `timeout` [s], and answer it."""
    select.select([master], [], [], min(timeout, master.timeout()))
    master.answer()


def serve(master: LeaseMaster, until: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Let the master answer until something holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "the master waited in vain"
        turn(master, 0.2)


class MasterThread:
    """A master that answers in a thread of its own, for holders in this process."""

    def __init__(self, master: LeaseMaster) -> None:
        self.master = master
        self._calls = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def call(self, method, *arguments):
        """Call a function in the master's thread; its result, or the error that it raises."""
        answer = queue.SimpleQueue()
        self._calls.put((method, arguments, answer))
        result = answer.get(timeout=PATIENCE)
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            turn(self.master, 0.02)
            while not self._calls.empty():
                method, arguments, answer = self._calls.get()
                try:
                    answer.put(method(*arguments))
                except PoolError as error:
                    answer.put(error)


class Lending:
    """A pool whose master is a thread of this process, with a holder for another task; `lend` is for the task here."""

    def __init__(self, devices: str, policy: Policy) -> None:
        self.pool_id = uuid.uuid4().hex[:8]
        self.leases: list[Lease] = []
        self._table = segment_name(self.pool_id, 0, "leases")
        self._devices = parse_devices(devices)
        self._splits = policy.splits_rounds
        self._master = LeaseMaster(self._table, policy, len(self._devices), slots=2, on_lease=self.leases.append)
        self._master.add("task")
        self._master.add("other")
        self._thread = MasterThread(self._master)
        self.other = LeaseHolder(self._table, "other")
        self.lender: Lender | None = None

    def lend(self, task: Task) -> None:
        """Let the task take leases."""
        holder = LeaseHolder(self._table, "task")
        self.lender = Lender(task.training, holder, self._devices, self.pool_id, splits=self._splits)
        task.training.lender = self.lender

    def close(self) -> None:
        if self.lender is not None:
            self.lender.close()
        self.other.close()
        self._thread.stop()
        self._master.close()
        unlink_run(self.pool_id)

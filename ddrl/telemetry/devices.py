"""Processor, memory and GPU use of one host, written to the counters of its processes.

One process per host (its relay; the trainer in a local run) keeps a `HostSampler`: it asks psutil about every process
that its host's counters name, and NVML where there is one, so that no rollout spends a microsecond on it. Imports no
stage; takes the counters as an argument."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddrl.core.background import Guard
from ddrl.core.metrics import MAX_GPUS
from ddrl.core.roles import Role
from ddrl.core.specs import Floats
from ddrl.telemetry.series import COLUMN, ROLES

if TYPE_CHECKING:
    from ddrl.channels.board import Counters

SAMPLE_PERIOD = 2.0  # [s] between samples of a host's processes


class ProcessUse(NamedTuple):
    """What one process has used."""

    cpu_seconds: float
    memory_bytes: float
    queued_seconds: float = math.nan


def process_use(pid: int) -> ProcessUse | None:
    """Processor time and private resident memory of a process of this machine, nothing for one that may not be asked;
    None where it is gone."""
    import psutil  # needed by the one process of a host that samples

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            memory = process.memory_info()
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return ProcessUse(math.nan, math.nan)
    used = float(memory.rss - getattr(memory, "shared", 0))
    return ProcessUse(times.user + times.system, used, _queued_seconds(pid))


def _queued_seconds(pid: int) -> float:
    """Time that the process's main thread was ready to run and had no core; NaN where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return math.nan


class Gpu(NamedTuple):
    """What one GPU does: shares from 0 to 1, memory in bytes; NaN for what NVML does not say."""

    utilization: float
    memory_bytes: float
    memory_total_bytes: float


class Gpus:
    """NVML, where the package and a driver are there; else `use()` is empty and nothing is said."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            nvml: Any = import_module("pynvml")  # which has no types
            nvml.nvmlInit()
            self._nvml = nvml
            self._devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except (
            Exception
        ):  # no package, no driver, or one that refuses: a host without GPUs as far as telemetry can tell
            self._devices = []

    def use(self) -> list[Gpu]:
        """What each GPU does now."""
        return [
            Gpu(
                self._ask(lambda device=device: self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
                self._ask(lambda device=device: self._nvml.nvmlDeviceGetMemoryInfo(device).used),
                self._ask(lambda device=device: self._nvml.nvmlDeviceGetMemoryInfo(device).total),
            )
            for device in self._devices
        ]

    def _ask(self, question: Callable[[], float]) -> float:
        """The answer; NaN where NVML has none, which under MIG or after a lost device is so for some questions only."""
        try:
            return float(question())
        except Exception as error:
            if not isinstance(error, getattr(self._nvml, "NVMLError", Exception)):
                raise
            return math.nan

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):  # a driver that was lost
                self._nvml.nvmlShutdown()
            self._nvml = None
            self._devices = []


class HostSampler:
    """Samples this host every `period` seconds in its own thread (`start`), or once (`sample`)."""

    def __init__(
        self,
        counters: Counters,
        *,
        period: float = SAMPLE_PERIOD,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._guard = Guard(report or partial(print, file=sys.stderr, flush=True))
        self._used: dict[tuple[int, str], tuple[int, float]] = {}  # by row and counter: pid, its time so far
        self._counters = counters
        self._period = period
        self._gpus = Gpus()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> HostSampler:
        """Sample from now on, until `close`."""
        self._thread = threading.Thread(target=self._work, name="ddrl-host-sampler", daemon=True)
        self._thread.start()
        return self

    def sample(self) -> None:
        """Write what every process of the host has used, and its GPUs' use in its relay's row. What one source cannot
        say never keeps another from being read; it is reported once."""
        table = self._counters.table()
        for source in (self._sample_processes, self._sample_gpus):
            self._guard.attempt(f"telemetry: {source.__name__.strip('_')}", lambda source=source: source(table))

    def _sample_processes(self, table: Floats) -> None:
        for index in np.flatnonzero(~np.isnan(table[:, COLUMN["pid"]])):
            pid = int(table[index, COLUMN["pid"]])
            use = process_use(pid)
            if use is not None:
                row = self._counters.row(int(index))
                for name in ("cpu_seconds", "queued_seconds"):
                    self._add_time(int(index), name, pid, getattr(use, name))
                row["memory_bytes"].set(use.memory_bytes)

    def _add_time(self, index: int, name: str, pid: int, used: float) -> None:
        """Count what a process has used since it was asked last; one that is met as the first of a counter that has
        begun was counted by the sampler before this one."""
        counter = self._counters.row(index)[name]
        known, last = self._used.get((index, name), (pid, 0.0 if math.isnan(counter.value) else used))
        if math.isfinite(used):
            counter.add(used - last if pid == known else used)
            self._used[index, name] = pid, used

    def _sample_gpus(self, table: Floats) -> None:
        gpus = self._gpus.use()
        if not gpus or not len(table):
            return
        relays = np.flatnonzero(table[:, COLUMN["role"]] == ROLES.index(Role.RELAY))
        row = self._counters.row(int(relays[0]) if relays.size else 0)
        use = np.array(gpus)
        reported = ~np.isnan(use)
        if reported[:, 0].any():
            row["gpu_utilization"].set(float(use[reported[:, 0], 0].mean()))
        for name, column in (("gpu_memory_bytes", 1), ("gpu_memory_total_bytes", 2)):
            if reported[:, column].any():
                row[name].set(float(use[reported[:, column], column].sum()))
        for index, gpu in enumerate(gpus[:MAX_GPUS]):
            row[f"gpu{index}_utilization"].set(gpu.utilization)
            row[f"gpu{index}_memory"].set(gpu.memory_bytes / gpu.memory_total_bytes)

    def _work(self) -> None:
        while True:
            self.sample()
            if self._ended.wait(self._period):
                return

    def close(self) -> None:
        """End the thread; before the counters are let go."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._gpus.close()

    def __enter__(self) -> HostSampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

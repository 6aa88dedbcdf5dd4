"""Processor, memory and GPU use of one host, written to the counters of its processes.

One process per host (its relay; the trainer in a local run) keeps a `HostSampler`: it reads /proc for every process
that its host's counters name, and NVML where there is one, so that no rollout spends a microsecond on it. Imports no
stage; takes the counters as an argument."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.core.roles import Role
from ddrl.telemetry.series import COLUMN, ROLES

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
SAMPLE_PERIOD = 2.0  # [s] between looks at a host's processes


class Counters(Protocol):
    """What is needed of ddrl.channels.Counters."""

    def table(self) -> NDArray[np.float64]:
        """All rows, copied."""
        ...

    def row(self, index: int) -> Any:
        """row[name].set(value)."""
        ...


class ProcessUse(NamedTuple):
    """What one process has used."""

    cpu_seconds: float
    memory_bytes: float


class GpuUse(NamedTuple):
    """What a host's GPUs do: mean utilization 0 to 1, memory in use and in all."""

    utilization: float
    memory_bytes: float
    memory_total_bytes: float


def process_use(pid: int) -> ProcessUse | None:
    """Processor time and private resident memory of a process of this machine; None where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return ProcessUse((int(fields[11]) + int(fields[12])) / _TICK, (int(pages[1]) - int(pages[2])) * _PAGE)


class Gpus:
    """NVML, where the package and a driver are there; else `use()` is None and nothing is said."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
        except (
            Exception
        ):  # no package, no driver, or a driver that refuses: a host without GPUs as far as telemetry can tell
            return
        self._nvml = pynvml
        self._devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def use(self) -> GpuUse | None:
        """What the GPUs do now."""
        if not self._devices:
            return None
        busy = [self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100 for device in self._devices]
        memory = [self._nvml.nvmlDeviceGetMemoryInfo(device) for device in self._devices]
        return GpuUse(
            sum(busy) / len(busy), float(sum(info.used for info in memory)), float(sum(info.total for info in memory))
        )

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
            self._devices = []


class HostSampler:
    """Samples this host every `period` seconds in a thread of its own (`start`), or when told (`sample`)."""

    def __init__(self, counters: Counters, *, period: float = SAMPLE_PERIOD) -> None:
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
        """Write cpu_seconds and memory_bytes of every process of the host, and its GPUs' use in its relay's row."""
        table = self._counters.table()
        for index in np.flatnonzero(~np.isnan(table[:, COLUMN["pid"]])):
            use = process_use(int(table[index, COLUMN["pid"]]))
            if use is not None:
                row = self._counters.row(int(index))
                row["cpu_seconds"].set(use.cpu_seconds)
                row["memory_bytes"].set(use.memory_bytes)
        gpus = self._gpus.use()
        if gpus is not None and len(table):
            relays = np.flatnonzero(table[:, COLUMN["role"]] == ROLES.index(Role.RELAY))
            row = self._counters.row(int(relays[0]) if relays.size else 0)
            row["gpu_utilization"].set(gpus.utilization)
            row["gpu_memory_bytes"].set(gpus.memory_bytes)
            row["gpu_memory_total_bytes"].set(gpus.memory_total_bytes)

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

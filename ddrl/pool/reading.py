"""A pool's directory read back: plan, leases and collectors, living or ended. Times in seconds since the pool's start.

POOL/pool/plan.json, leases.jsonl and collectors.jsonl (where collectors run), and POOL/summary.json (docs/pool.md)."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ddrl.core.errors import PoolError
from ddrl.core.files import decode, read_json
from ddrl.pool.offline import lower_bound
from ddrl.pool.traces import Lease, TaskTrace

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Collector:
    """One process that collected one round's data: started, able to act, parameters there, data sent, process gone.

    parameters, end: None where nobody knows, or the process stayed for the next round."""

    task: str
    round: int
    worker: int
    start: float
    ready: float
    parameters: float | None
    sent: float
    end: float | None


@dataclass(frozen=True)
class PoolRecord:
    """What a pool's directory says. summary: empty while the pool runs, or where it was killed."""

    name: str
    tasks: tuple[str, ...]
    devices: tuple[str, ...]
    policy: str
    leases: tuple[Lease, ...]
    collectors: tuple[Collector, ...]
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def seconds(self) -> float:
        """The makespan; of a pool that has not ended, until the last lease."""
        ended = [lease.released for lease in self.leases] + [collector.sent for collector in self.collectors]
        return float(self.summary.get("makespan_seconds") or max(ended, default=0.0))


def find_pools(root: Path) -> list[Path]:
    """Pool directories under `root`, or `root` itself, the newest first."""
    found: list[tuple[float, Path]] = []
    for path in (root, *root.glob("*")):
        with contextlib.suppress(OSError):  # it is no pool, or is being deleted
            found.append(((path / "pool" / "plan.json").stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


class PoolPlanTask(msgspec.Struct, frozen=True):
    """What plan.json says of a task, as far as a reader needs it."""

    name: str
    directory: str


class PoolPlanFile(msgspec.Struct, frozen=True):
    """What plan.json says of a pool, as far as a reader needs it."""

    tasks: tuple[PoolPlanTask, ...]
    devices: str
    policy: str
    run_id: str = ""
    began: float = 0.0  # [s, CLOCK_MONOTONIC]; 0: a pool by an earlier ddrl


def read_plan(path: Path) -> PoolPlanFile:
    """The plan in a pool's directory. PoolError where it is none."""
    what = f"{path} is not the directory of a pool: its pool/plan.json cannot be read"
    return read_json(path / "pool" / "plan.json", PoolPlanFile, PoolError, what)


def read_pool(path: Path) -> PoolRecord:
    """Read a pool's directory. PoolError where it is none."""
    plan = read_plan(path)
    began = plan.began
    leases = [lease for lease in _lines(path / "pool" / "leases.jsonl", Lease) if lease.granted >= began]
    began = began or min((lease.asked for lease in leases), default=0.0)  # of a pool by an earlier ddrl
    summary: dict[str, Any] = {}
    if (path / "summary.json").exists():
        summary = read_json(path / "summary.json", dict[str, Any], PoolError, f"{path / 'summary.json'} cannot be read")
    return PoolRecord(
        name=path.name,
        tasks=tuple(task.name for task in plan.tasks),
        devices=tuple(device.strip() for device in plan.devices.split(",")),
        policy=plan.policy,
        leases=tuple(
            replace(lease, asked=lease.asked - began, granted=lease.granted - began, released=lease.released - began)
            for lease in sorted(leases, key=lambda lease: lease.released)
        ),
        collectors=tuple(_lines(path / "pool" / "collectors.jsonl", Collector)),
        summary=summary,
    )


def waits_for(record: PoolRecord) -> dict[tuple[str, str], float]:
    """Seconds that a task waited while another one held a device: {(who waits, for whom): seconds}.

    A moment at which several devices are held counts for each holder by its share."""
    found: dict[tuple[str, str], float] = {}
    for device in range(len(record.devices)):
        holds = [lease for lease in record.leases if lease.device == device]  # one after another
        granted = [lease.granted for lease in holds]
        released = [lease.released for lease in holds]
        for waiting in record.leases:
            first = bisect_right(released, waiting.asked)
            last = bisect_left(granted, waiting.granted)
            for holder in holds[first:last]:
                seconds = min(waiting.granted, holder.released) - max(waiting.asked, holder.granted)
                if holder.task != waiting.task and seconds > 0:
                    key = (waiting.task, holder.task)
                    found[key] = found.get(key, 0.0) + seconds / len(record.devices)
    return found


@dataclass(frozen=True)
class Bounded:
    """A figure beside what no order of the same rounds can beat. share: figure / bound."""

    name: str
    value: float
    bound: float
    unit: str

    @property
    def share(self) -> float:
        """1: the bound is reached; nan: there is none."""
        return self.value / self.bound if self.bound > 0 else math.nan


def recorded_traces(record: PoolRecord) -> list[TaskTrace]:
    """The rounds that the leases show, as if nobody else had used the devices. A hold counts as the device's work."""
    traces: list[TaskTrace] = []
    for task in record.tasks:
        leases = [lease for lease in record.leases if lease.task == task]
        if not leases:
            continue
        before = [0.0, *(lease.released for lease in leases[:-1])]
        collect = [max(0.0, lease.asked - released) for lease, released in zip(leases, before, strict=True)]
        held = [lease.released - lease.granted for lease in leases]
        nothing = [0.0] * len(leases)
        traces.append(
            TaskTrace(
                task,
                startup=[[0.0]] * len(leases),
                collect=[[seconds] for seconds in collect],
                gradient=[[seconds] for seconds in held],
                update=nothing,
                send=nothing,
            )
        )
    return traces


def figures_beside_bounds(record: PoolRecord) -> list[Bounded]:
    """Figures of a pool with their bounds; empty before the first lease has ended.

    Busy / wall of the devices: the most of the same work without waits, min(1, sum of duty cycles / devices). Busy /
    held: 1. Makespan: the longest task without waits, or all holds on all devices (ddrl.pool.offline)."""
    if not record.leases or not record.seconds:
        return []
    traces = recorded_traces(record)
    devices = len(record.devices)
    busy = {task: sum(lease.busy for lease in record.leases if lease.task == task) for task in record.tasks}
    held = sum(lease.released - lease.granted for lease in record.leases)
    duty = sum(busy[trace.name] / sum(trace.alone(number) for number in range(trace.rounds)) for trace in traces)
    total = sum(busy.values())
    return [
        Bounded("busy / wall", total / (devices * record.seconds), min(1.0, duty / devices), ""),
        Bounded("busy / held", total / held if held else 0.0, 1.0, ""),
        Bounded("makespan", record.seconds, lower_bound(traces, devices), "s"),
    ]


def _lines(path: Path, kind: type[Kind]) -> list[Kind]:
    """The whole lines of a file of JSON lines; the last one may be half-written. Empty where there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    what = f"{path} cannot be read: it is damaged, or of another version of ddrl"
    decoder = msgspec.json.Decoder(kind, strict=False)
    return [decode(line, decoder, PoolError, what) for line in lines[:-1] if line]

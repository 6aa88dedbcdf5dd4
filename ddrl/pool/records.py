"""What a pool did, by lease, and what the simulator runs: the seconds of each task's rounds, recorded or generated.

One file is JSON: {"tasks": [TaskTrace, ...]}, all times in seconds.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import PoolError
from ddrl.core.files import decode, read_json

# -- records -----------------------------------------------------------------------------------------------------------

# -- traces ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lease:
    """One device of one task: times of request, grant and release [s]; busy: seconds of it in which it computed.

    part: of the round, where a task releases between gradients; expired: its process ended while it held the device."""

    task: str
    round: int
    device: int
    asked: float
    granted: float
    released: float
    busy: float
    part: int = 0
    expired: bool = False


@dataclass(frozen=True)
class TaskTrace:
    """One task of R rounds and W workers, as if nobody else used the devices.

    startup [R][W]: a collector's start, until it can act; collect [R][W]: parameters and collector ready to data
    arrived; gradient [R][W]: a worker's gradient on the device; update [R]: combining them; send [R]: device released
    to parameters at the workers; switch: moving the task's state on to a device, and again off it."""

    name: str
    startup: list[list[float]]
    collect: list[list[float]]
    gradient: list[list[float]]
    update: list[float]
    send: list[float]
    switch: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        shape = (self.rounds, self.workers)
        for name in ("startup", "collect", "gradient"):
            values = np.array(getattr(self, name), dtype=np.float64)
            if values.shape != shape or not np.all(values >= 0):
                raise PoolError(f"trace of task '{self.name}': {name} must be {shape} seconds, none of them negative")
        for name in ("update", "send"):
            values = np.array(getattr(self, name), dtype=np.float64)
            if values.shape != shape[:1] or not np.all(values >= 0):
                raise PoolError(f"trace of task '{self.name}': {name} must be {shape[:1]} seconds, none negative")

    @property
    def rounds(self) -> int:
        """R."""
        return len(self.collect)

    @property
    def workers(self) -> int:
        """W."""
        return len(self.collect[0]) if self.collect else 0

    def held(self, round: int, first: float, arrivals: Sequence[float]) -> float:
        """When a device taken at `first` is free again, the round's data arriving at `arrivals` [s, by worker].

        Gradients run one after another, in order of arrival."""
        time = first + self.switch
        for arrival, gradient in sorted(zip(arrivals, self.gradient[round], strict=True)):
            time = max(time, arrival) + gradient
        return time + self.update[round] + self.switch

    def alone(self, round: int) -> float:
        """Seconds of a round, parameters to next parameters, without any wait."""
        return self.held(round, min(self.collect[round]), self.collect[round]) + self.send[round]

    def busy(self, round: int) -> float:
        """Device seconds in which a round computes."""
        return sum(self.gradient[round]) + self.update[round]


def read_traces(path: Path) -> list[TaskTrace]:
    """Traces of a file. PoolError where it is none."""
    return read_json(path, _File, PoolError, f"{path} is no trace of a pool").tasks


def write_traces(path: Path, traces: Sequence[TaskTrace]) -> None:
    """Write traces so that `read_traces` gives equal ones."""
    path.write_bytes(msgspec.json.encode(_File(list(traces))))


class _File(msgspec.Struct):
    tasks: list[TaskTrace]


def generate(
    name: str,
    rounds: int,
    generator: np.random.Generator,
    *,
    round_seconds: float = 5.0,
    duty: float = 0.2,
    variation: float = 0.0,
    exponential: bool = False,
    workers: int = 1,
    startup: float = 0.0,
    startup_variation: float = 0.0,
    send: float = 0.0,
    switch: float = 0.0,
    weight: float = 1.0,
) -> TaskTrace:
    """A task whose device works `duty` of each round of about `round_seconds` [s] when it runs alone.

    variation: std / mean of collecting and of gradients, drawn from a gamma distribution; exponential: both exponential
    instead; startup_variation: that of collectors' starts."""

    def draw(mean: float, spread: float, memoryless: bool, *shape: int) -> NDArray[np.float64]:
        if memoryless:
            return generator.exponential(mean, shape)
        if spread == 0 or mean == 0:
            return np.full(shape, mean)
        return generator.gamma(spread**-2, mean * spread**2, shape)

    work = duty * round_seconds
    collect = round_seconds - work - send - 2 * switch
    if collect < 0:
        raise PoolError(f"trace of task '{name}': duty {duty} and {send} s of sending leave no time to collect")
    return TaskTrace(
        name,
        startup=draw(startup, startup_variation, False, rounds, workers).tolist(),
        collect=draw(collect, variation, exponential, rounds, workers).tolist(),
        gradient=draw(work / workers, variation, exponential, rounds, workers).tolist(),
        update=[0.0] * rounds,
        send=[send] * rounds,
        switch=switch,
        weight=weight,
    )


# -- reading -----------------------------------------------------------------------------------------------------------
# A pool's directory read back: plan, leases and collectors, living or ended. Times in seconds since the pool's start.
#
# POOL/pool/plan.json, leases.jsonl and collectors.jsonl (where collectors run), and POOL/summary.json (docs/pool.md).


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


def _lines(path: Path, kind: type[Kind]) -> list[Kind]:
    """The whole lines of a file of JSON lines; the last one may be half-written. Empty where there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    what = f"{path} cannot be read: it is damaged, or of another version of ddrl"
    decoder = msgspec.json.Decoder(kind, strict=False)
    return [decode(line, decoder, PoolError, what) for line in lines[:-1] if line]

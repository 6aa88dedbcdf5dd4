"""What a pool did, by lease, and what the simulator runs: the seconds of each task's rounds, recorded or generated.

One file is JSON: {"tasks": [TaskTrace, ...]}, all times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import PoolError
from ddrl.core.files import read_json


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

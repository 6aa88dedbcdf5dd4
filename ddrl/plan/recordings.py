"""What recorded runs say of the work of a task: processor seconds by kind, over the part of the run that learns.

A source is a run directory, or a pool directory with its tasks' run directories. Telemetry counts the seconds of each
move; where a process had to wait for a core they are longer than its processor seconds, so they are scaled by the ratio
of the two. Processor seconds are sampled every 2 s: the part that counts begins and ends with a sample. In a shorter
run the seconds count as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config
from ddrl.core.errors import RunDirError
from ddrl.core.roles import Role
from ddrl.pool.devices import Device, parse_devices
from ddrl.pool.records import Lease, read_plan, read_pool
from ddrl.telemetry import Run
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.series import ROLES

MIN_SECONDS = 1.0  # below, a recording says too little
MIN_UPDATES = 20


@dataclass(frozen=True)
class Recording:
    """One task over `seconds`. Seconds of work are processor seconds, but for a torch device: those of the clock."""

    name: str
    config: Config
    rollouts: int  # 0: serial
    seconds: float
    env_steps: float
    vector_steps: float
    updates: float
    publishes: float
    step_work: float  # [s] acting and environments; of rollouts that are processes, all that they do
    learn_work: float  # [s] on the device
    sample_work: float  # [s] drawing batches and writing back priorities
    record_work: float  # [s] moving rows to replay
    loop_work: float  # [s] what no counter names: the loop around moves and steps
    publish_work: float  # [s]
    judge_work: float  # [s] of the evaluator
    wait_share: float  # of the trainer's time, without data
    preempted: float  # seconds without a core of the trainer for each second of the rollouts' work
    start_work: float  # [s] until a process can work; of a pool's only task, until it asks for a device
    end_seconds: float  # of a pool's only task, from its last lease to the pool's end: saving, closing
    slowed: float  # seconds of the clock for each processor second of a process that waits for nothing; nan: not known
    vector_nbytes: int  # parameter vector
    switches: float = 0.0  # leases of a pool
    switch_seconds: float = 0.0  # of all leases, in which the device did not compute
    device: Device | None = None  # of the pool


def read_recordings(path: Path) -> list[Recording]:
    """The recordings of a run, or of a pool's tasks. RunDirError where there are none that say enough."""
    plan = path / "pool" / "plan.json"
    if not plan.exists():
        return [_read_run(path)]
    told = read_plan(path)
    devices = parse_devices(told.devices)
    record = read_pool(path)
    found: list[Recording] = []
    for name, directory in ((task.name, Path(task.directory)) for task in told.tasks):
        home = directory if directory.is_dir() else path / name  # the pool's directory may have been moved
        if (home / "telemetry.sqlite").exists():
            of_task = [lease for lease in record.leases if lease.task == name]
            found.append(_read_run(home, of_task, devices, makespan=record.seconds if len(told.tasks) == 1 else 0.0))
    if not found:
        raise RunDirError(f"no task of the pool {path} has recorded anything")
    return found


def _read_run(
    path: Path, leases: Sequence[Lease] = (), devices: tuple[Device, ...] = (), *, makespan: float = 0.0
) -> Recording:
    with Run(path) as run:
        config = run.config
        processes = run.processes()
    window = _Window(path, processes)
    serial = len(set(window.pids)) == 1
    trainer = window.only(Role.TRAINER)
    rollouts = window.rows(Role.ROLLOUT)
    gained = window.gained
    seconds = window.seconds
    waited = gained("wait_seconds", trainer)
    moves = {
        name: gained(f"{name}_seconds", trainer) for name in ("learn", "sample", "record", "publish", "checkpoint")
    }
    acting = sum(gained("env_seconds", row) + gained("act_seconds", row) for row in rollouts)
    used = gained("cpu_seconds", trainer)
    held = busy = asked = 0.0
    for lease in _within(leases, window):
        held = held + lease.released - lease.granted
        asked = asked + lease.granted - lease.asked
        busy += lease.busy * devices[lease.device].capacity
    on_slot = bool(leases) and devices[0].is_slot
    on_device = moves["learn"] + moves["sample"]
    apart = held if on_slot else moves["learn"] if config.learner.device.startswith("cuda") else 0.0
    ratio = _ratio(used - (busy if on_slot else 0.0), seconds - waited - asked - apart) if window.is_sampled else 1.0
    learn = moves["learn"] * (1.0 if apart else ratio)
    sample = moves["sample"] * ratio
    if on_slot and on_device:  # processor seconds of the leases, counted one by one
        learn = busy * moves["learn"] / on_device
        sample = busy * moves["sample"] / on_device
    rest = max(0.0, seconds - waited - asked - sum(moves.values()) - (acting if serial else 0.0))
    rest = max(0.0, rest - max(0.0, held - on_device)) * ratio
    steps = gained("env_steps", trainer)
    taken = sum(gained("env_steps", row) for row in rollouts)
    vectors = taken / config.env.num_envs
    if not steps or not vectors:
        raise RunDirError(f"{path} is too short to plan from: no environment step was recorded while it learned")
    if serial:
        work = acting * ratio
        preempted = 0.0
    else:
        work = sum(gained("cpu_seconds", row) for row in rollouts)
        lost = max(0.0, seconds - waited - used) if window.is_sampled and not apart else 0.0
        preempted = min(1.0, lost / work) if work > 0 else 0.0
    return Recording(
        name=path.name,
        config=config,
        rollouts=0 if serial else len(rollouts),
        seconds=seconds,
        env_steps=steps,
        vector_steps=vectors,
        updates=gained("updates", trainer),
        publishes=gained("publishes", trainer),
        step_work=work,
        learn_work=learn,
        sample_work=sample,
        record_work=moves["record"] * ratio,
        loop_work=rest,
        publish_work=moves["publish"] * ratio,
        judge_work=0.0 if serial else sum(gained("cpu_seconds", row) for row in window.rows(Role.EVALUATOR)),
        wait_share=waited / seconds,
        preempted=preempted,
        start_work=leases[0].asked if leases and makespan else window.start_work(trainer),
        end_seconds=max(0.0, makespan - leases[-1].released) if leases and makespan else 0.0,
        slowed=max(1.0, seconds / used) if serial and not apart and not leases and window.is_sampled else math.nan,
        vector_nbytes=int(window.last("model_nbytes", trainer)),
        switches=float(len(leases)),
        switch_seconds=sum(max(0.0, one.released - one.granted - one.busy) for one in leases),
        device=devices[0] if devices else None,
    )


def _within(leases: Sequence[Lease], window: _Window) -> list[Lease]:
    """The leases of the part that counts; their clock is another one, and both end together."""
    if not leases:
        return []
    end = leases[-1].released
    begin = end - (window.last_wall - window.begin_wall)
    stop = end - (window.last_wall - window.end_wall)
    return [lease for lease in leases if begin <= lease.granted < stop]


def _ratio(used: float, seconds: float) -> float:
    """Processor seconds over seconds in which the process could have used them."""
    return min(1.0, used / seconds) if seconds > 0 and used > 0 else 1.0


class _Window:
    """The part of a run's telemetry that counts: after the first updates, between two samples of processor time."""

    def __init__(self, path: Path, processes: Processes) -> None:
        self._processes = processes
        if not len(processes):
            raise RunDirError(f"{path} has no records yet")
        roles = processes.column("role")[-1]
        self._roles = [ROLES[int(role)] if not math.isnan(role) else None for role in roles]
        self.pids: list[float] = [pid for pid in processes.column("pid")[-1] if not math.isnan(pid)]
        trainer = self.only(Role.TRAINER)
        updates = np.nan_to_num(processes.column("updates")[:, trainer])
        cpu = processes.column("cpu_seconds")[:, trainer]
        sampled = [index for index in range(1, len(cpu)) if cpu[index] != cpu[index - 1] and cpu[index] == cpu[index]]
        known = [index for index in sampled if updates[index] >= MIN_UPDATES]
        self.is_sampled = len(known) >= 2  # whether processor time is known over the part
        if not self.is_sampled:
            known = [index for index in range(len(cpu)) if updates[index] >= MIN_UPDATES]
        if not sampled or len(known) < 2 or updates[known[-1]] - updates[known[0]] < MIN_UPDATES:
            raise RunDirError(
                f"{path} is too short to plan from: it must learn for a second, {MIN_UPDATES} updates or more, better "
                "for 6 (run.max_seconds, run.max_env_steps)"
            )
        self._begin = known[0]
        self._end = known[-1]
        self._first = sampled[0]
        self.begin_wall, self.end_wall = (float(processes.wall_seconds[i]) for i in (self._begin, self._end))
        self.last_wall = float(processes.wall_seconds[-1])
        self.seconds = self.end_wall - self.begin_wall
        if self.seconds < MIN_SECONDS:
            raise RunDirError(f"{path} is too short to plan from: it learned for {self.seconds:.1f} s")

    def rows(self, role: Role) -> list[int]:
        """Rows of the processes of a role."""
        return [row for row, other in enumerate(self._roles) if other is role]

    def only(self, role: Role) -> int:
        """The row of the one process of a role."""
        return self.rows(role)[0]

    def gained(self, name: str, row: int) -> float:
        """Growth of a counter; 0 where it was not reported."""
        values: NDArray[np.float64] = self._processes.column(name)[:, row]
        begin, end = (float(np.nan_to_num(values[index])) for index in (self._begin, self._end))
        return max(0.0, end - begin)

    def last(self, name: str, row: int) -> float:
        """The newest value."""
        return float(np.nan_to_num(self._processes.column(name)[-1, row]))

    def start_work(self, row: int) -> float:
        """Processor seconds of a process before the run's clock began."""
        used = float(self._processes.column("cpu_seconds")[self._first, row])
        rate = self.gained("cpu_seconds", row) / self.seconds if self.is_sampled else 1.0
        return max(0.0, used - rate * float(self._processes.wall_seconds[self._first]))

"""A pool under mpirun: rank 0 is its master and starts one process a task, as without mpirun; every other rank is a
relay of one task, on one host, and starts and ends that task's collectors there (`modes/pool_relay.py`). Relays of a
free place wait for the task that is added.

Rank 0 speaks MPI at the start and at the end alone. It makes each task's board, which tells the task's relay on this
host that the task stands or has ended."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddrl.channels.board import Board, Command
from ddrl.channels.segment import sweep_dead, unlink_run
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, PoolError
from ddrl.core.settings import apply_overrides, load_config
from ddrl.run import cli
from ddrl.run.members import GOING
from ddrl.run.modes.local import local_ranks
from ddrl.run.modes.mpi import meet
from ddrl.run.modes.pool import plan_of, run_plan
from ddrl.run.pool.plan import PoolPlan
from ddrl.run.pool.ranks import STANDING, PoolRanks, assign_relays
from ddrl.run.process import is_orphan, sweep_open_mpi
from ddrl.run.ranks import abort_on_error, barrier, broadcast, part
from ddrl.run.topology import board_name, report_failure

if TYPE_CHECKING:
    from mpi4py import MPI


def lead_pool(command: cli.Command, launcher: str) -> int:
    """Rank 0: run all tasks to their ends; the exit status, as of a pool without mpirun. What cannot start is refused
    here, and every other rank leaves quietly. `launcher`: command that starts as many ranks."""
    world, machines, parent = meet()
    try:
        sweep_dead()
        sweep_open_mpi()
        if command.serial:
            raise ConfigError("--serial is one process: start it without mpirun")
        plan = plan_of(command)
        relays = TaskRelays(world, plan, machines, launcher, parent)
    except BaseException:
        broadcast(world, b"")
        raise
    with abort_on_error(world):
        broadcast(world, relays.ranks.to_bytes())
        barrier(world, STANDING)
    try:
        return run_plan(plan, relays)
    finally:
        relays.close()


class TaskRelays:
    """`Relays` of a pool, as rank 0 knows them. ConfigError where the ranks or the settings fit no such pool."""

    def __init__(
        self, world: MPI.Intracomm, plan: PoolPlan, machines: Sequence[str], launcher: str, parent: int
    ) -> None:
        configs = _settings_of(plan)
        self._relays = _agreed_relays(configs, plan)
        places = assign_relays(machines, len(plan.tasks), self._relays)
        self.hosts = len(places[0])
        self.launcher = launcher
        for name, config in configs.items():
            self._check(name, config)
        self._world = world
        self._parent = parent
        cores = tuple(core for device in plan.parsed_devices() for core in device.cores)
        names = [task.name for task in plan.tasks]
        names += [f"place {number + 1}/{len(places)}" for number in range(len(names), len(places))]
        self.ranks = PoolRanks({name: uuid.uuid4().hex[:8] for name in names}, places, cores)
        self._place_of = {task.name: task.name for task in plan.tasks}
        self._free = names[len(plan.tasks) :]
        self._boards = {name: Board.create(board_name(run_id, 0)) for name, run_id in self.ranks.run_ids.items()}

    @property
    def free(self) -> int:
        """See `Relays`."""
        return len(self._free)

    def run_id(self, task: str) -> str:
        """See `Relays`."""
        return self.ranks.run_ids[self._place_of[task]]

    def add(self, task: str, config: Config) -> None:
        """See `Relays`."""
        self._check(task, config)
        if config.cluster.relays != self._relays:
            raise ConfigError(f"task '{task}': cluster.relays is {self._relays} in this pool: leave it out")
        if not self._free:
            raise PoolError(
                "no place is free: under mpirun a task has a relay on every host. Start a pool, or go on with this "
                f"one, with more ranks: {self.hosts} for each task to be added"
            )
        self._place_of[task] = self._free.pop(0)

    def _check(self, task: str, config: Config) -> None:
        try:
            local_ranks(config, self.hosts)
        except ConfigError as error:
            raise ConfigError(f"task '{task}': {error}") from None

    def end(self, task: str) -> None:
        """See `Relays`."""
        self._end(self._place_of[task])

    def _end(self, place: str) -> None:
        board = self._boards[place]
        if board.command in GOING:  # killed, or broken before it had channels
            board.command = Command.FAIL
            sweep_dead()

    def look(self) -> None:
        """See `Relays`. Also lets MPI move on what rank 0 has sent."""
        self._world.Iprobe()
        if is_orphan(self._parent):
            for place, board in self._boards.items():
                report_failure(
                    board, self.ranks.run_ids[place], 0, "mpirun has ended, and with it the relays of the task"
                )

    def close(self) -> None:
        """End all relays that are left and wait for them."""
        for place in self._boards:
            self._end(place)
        part(self._world, self._leave_alone)
        self._unlink()

    def _leave_alone(self) -> None:
        """Without its launcher the job has no other rank left: end here."""
        if is_orphan(self._parent):
            self._unlink()
            os._exit(1)

    def _unlink(self) -> None:
        for run_id in self.ranks.run_ids.values():
            unlink_run(run_id)


def _settings_of(plan: PoolPlan) -> dict[str, Config]:
    """Of the tasks whose files can be read; the others end alone, with their reason."""
    configs: dict[str, Config] = {}
    for task in plan.tasks:
        with contextlib.suppress(ConfigError):
            configs[task.name] = load_config(Path(task.file), plan.overrides)
    return configs


def _agreed_relays(configs: dict[str, Config], plan: PoolPlan) -> int:
    """cluster.relays of all tasks."""
    values = {name: config.cluster.relays for name, config in configs.items()}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise ConfigError(
            f"the tasks do not agree on cluster.relays ({listed}): give it once, by --set cluster.relays=..."
        )
    given = [text for text in plan.overrides if text.startswith("cluster.relays")]
    return next(iter(values.values()), apply_overrides(Config(), given).cluster.relays)

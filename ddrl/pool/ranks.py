"""Ranks of a pool under mpirun: rank 0 is the pool's master; each task has a relay on every host, a rank each. Further
ranks, as many on each host, are places for tasks that are added while the pool runs.

A task's process is no rank: rank 0 starts it, and it meets its relay of that host in channels alone.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ddrl.channels.board import Board, Command
from ddrl.channels.segment import sweep_dead, unlink_run
from ddrl.channels.wire import Wire
from ddrl.core.config import Config
from ddrl.core.errors import ChannelError, ConfigError, JobFailed, PoolError
from ddrl.core.forks import is_orphan
from ddrl.core.roles import Role
from ddrl.core.settings import apply_overrides
from ddrl.distribution.relay import Membership
from ddrl.pool.mode import agreed, run_tasks, setup_of, task_configs
from ddrl.pool.records import PoolSetup
from ddrl.run import cli
from ddrl.run.hosts import HostKeeper
from ddrl.run.local import local_ranks
from ddrl.run.members import GOING
from ddrl.run.process import keep_off, sweep_open_mpi
from ddrl.run.ranks import Meeting, SliceOrders, abort_on_error, barrier
from ddrl.run.relay import relay_process
from ddrl.run.topology import (
    CHANNELS,
    LOOK_PERIOD,
    HostChannels,
    KeepHost,
    Made,
    Topology,
    board_name,
    describe,
    report_failure,
)

if TYPE_CHECKING:
    from mpi4py import MPI


# -- ranks -------------------------------------------------------------------------------------------------------------

READY = "the relays of all tasks are ready"  # name of a barrier
ALL_ENDED = "all tasks have ended"


class RelayPlace(msgspec.Struct, frozen=True):
    """A relay's task, and where. members: ranks of all relays of that task, by host."""

    task: str
    run_id: str
    host: int
    members: tuple[int, ...]


class PoolRanks(msgspec.Struct, frozen=True):
    """The work of every rank. run_ids: by task, a free place has a name of its own; relays: by task its relays' ranks,
    by host; cores: those of the slots, which others of the master's machine keep off."""

    run_ids: dict[str, str]
    relays: tuple[tuple[int, ...], ...]
    cores: tuple[int, ...]

    def place(self, rank: int) -> RelayPlace:
        """The relay that a rank is."""
        for (task, run_id), members in zip(self.run_ids.items(), self.relays, strict=True):
            if rank in members:
                return RelayPlace(task, run_id, members.index(rank), members)
        raise ValueError(f"rank {rank} is no relay of the pool")


POOL: Wire[PoolRanks] = Wire("the ranks of a pool", PoolRanks)


def assign_relays(machines: Sequence[str], tasks: int, relays: int) -> tuple[tuple[int, ...], ...]:
    """By task the ranks of its relays, by host, then by free place; `machines`: name of each rank's.

    `relays` as in `group_hosts`: 0, a host for each machine; g > 0, g groups of consecutive ranks are taken for hosts,
    each on one machine. ConfigError unless every host has a rank for each task, rank 0 apart, and all hosts as many."""
    if relays:
        places, rest = divmod(len(machines) - 1, relays)
        hosts = [list(range(1 + group * places, 1 + (group + 1) * places)) for group in range(relays)]
        fits = not rest and places >= tasks and all(len({machines[rank] for rank in ranks}) == 1 for ranks in hosts)
        fits = fits and machines[hosts[0][0]] == machines[0]
        names = [f"group {group}" for group in range(relays)]
    else:
        names = list(dict.fromkeys(machines))
        hosts = [[rank for rank, machine in enumerate(machines) if rank and machine == name] for name in names]
        fits = len(hosts[0]) >= tasks and all(len(ranks) == len(hosts[0]) for ranks in hosts)
    if not fits:
        count = 1 + tasks * len(names)
        where = f" (cluster.relays = {relays}: each {tasks} ranks of one machine)" if relays else ""
        shares = ",".join(f"{name}:{tasks + (place == 0)}" for place, name in enumerate(names))
        raise ConfigError(
            f"{len(machines)} ranks do not fit a pool of {tasks} tasks on {len(names)} host(s){where}: rank 0 is its "
            f"master, and each task has a relay on every host. Start mpirun -n {count}"
            + ("" if relays or len(names) == 1 else f" --host {shares}")
            + ", or as many more on each host for tasks that are to be added"
        )
    return tuple(zip(*hosts, strict=True))


# -- rank 0 ------------------------------------------------------------------------------------------------------------
# A pool under mpirun: rank 0 is its master and starts one process a task, as without mpirun; every other rank is a
# relay of one task, on one host, whose keeper starts and ends that task's collectors there. Relays of a free place wait
# for the task that is added.
#
# Rank 0 speaks MPI at the start and at the end alone. It makes each task's board, on which the task's relay of this
# host reads whether the task has channels or has ended.


def lead_pool(command: cli.Command, launcher: str, meeting: Meeting) -> int:
    """Rank 0: run all tasks to their ends; the exit status, as of a pool without mpirun. What cannot start is refused
    here, and every other rank leaves quietly. `launcher`: command that starts as many ranks."""
    world = meeting.world
    try:
        sweep_dead()
        sweep_open_mpi()
        setup = setup_of(command)
        relays = TaskRelays(world, setup, meeting.machines, launcher, meeting.launcher)
    except BaseException:
        meeting.give_orders(SliceOrders())
        raise
    with abort_on_error(world):
        meeting.give_orders(SliceOrders("pool.ranks", meeting.machines, POOL.encode(relays.ranks).tobytes()))
        barrier(world, READY)
    try:
        return run_tasks(setup, relays)
    finally:
        relays.close()


class TaskRelays:
    """The relays of all tasks on all hosts, as rank 0 knows them. ConfigError where the ranks or the settings fit no
    such pool. launcher: command that starts as many ranks."""

    def __init__(
        self, world: MPI.Intracomm, setup: PoolSetup, machines: Sequence[str], launcher: str, parent: int
    ) -> None:
        configs = task_configs(setup.tasks, setup.overrides)
        self._relays = _agreed_relays(configs, setup)
        places = assign_relays(machines, len(setup.tasks), self._relays)
        self.hosts = len(places[0])
        self.launcher = launcher
        for name, config in configs.items():
            self._check(name, config)
        self._world = world
        self._parent = parent
        cores = tuple(core for device in setup.parsed_devices() for core in device.cores)
        names = [task.name for task in setup.tasks]
        names += [f"place {number + 1}/{len(places)}" for number in range(len(names), len(places))]
        self.ranks = PoolRanks({name: uuid.uuid4().hex[:8] for name in names}, places, cores)
        self._place_of = {task.name: task.name for task in setup.tasks}
        self._free = names[len(setup.tasks) :]
        self._boards = {name: Board.create(board_name(run_id, 0)) for name, run_id in self.ranks.run_ids.items()}

    @property
    def free(self) -> int:
        """Places for tasks that are added."""
        return len(self._free)

    def run_id(self, task: str) -> str:
        """Of the run of which they are the relays."""
        return self.ranks.run_ids[self._place_of[task]]

    def add(self, task: str) -> None:
        """Give a place to one more task, for which there is room."""
        self._place_of[task] = self._free.pop(0)

    def check_room(self, task: str, config: Config) -> None:
        """ConfigError where the task's settings are not for a place, PoolError where none is free."""
        self._check(task, config)
        if config.cluster.relays != self._relays:
            raise ConfigError(f"task '{task}': cluster.relays is {self._relays} in this pool: leave it out")
        if not self._free:
            raise PoolError(
                "no place is free: under mpirun a task has a relay on every host. Start a pool, or go on with this "
                f"one, with more ranks: {self.hosts} for each task to be added"
            )

    def _check(self, task: str, config: Config) -> None:
        try:
            local_ranks(config, self.hosts)
        except ConfigError as error:
            raise ConfigError(f"task '{task}': {error}") from None

    def end(self, task: str) -> None:
        """The task's process has ended: so do its relays."""
        self._end(self._place_of[task])

    def _end(self, place: str) -> None:
        board = self._boards[place]
        if board.command in GOING:  # killed, or broken before it had channels
            board.command = Command.FAIL
            sweep_dead()

    def check_launcher(self) -> None:
        """Called once a turn: end all tasks where mpirun has ended, and let MPI progress what rank 0 has sent."""
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
        barrier(self._world, ALL_ENDED, self._leave_alone)
        self._unlink()

    def _leave_alone(self) -> None:
        """Without its launcher the job has no other rank left: end here."""
        if is_orphan(self._parent):
            self._unlink()
            os._exit(1)

    def _unlink(self) -> None:
        for run_id in self.ranks.run_ids.values():
            unlink_run(run_id)


def _agreed_relays(configs: dict[str, Config], setup: PoolSetup) -> int:
    """cluster.relays of all tasks."""
    given = [text for text in setup.overrides if text.startswith("cluster.relays")]
    default = apply_overrides(Config(), given).cluster.relays
    return agreed("cluster.relays", {name: config.cluster.relays for name, config in configs.items()}, default)


# -- other ranks -------------------------------------------------------------------------------------------------------
# A rank of a pool under mpirun: the relay of one task on one host. It starts and ends the task's collectors there.
#
# The task's process is no rank. Rank 0 has started it and made its board; once the task's channels are made, its relay
# on that host hands the topology to those on others, and they relay as in a job of the task's own. However a task ends,
# its relays end with it, and no others; their ranks wait for the end of the pool.


def serve_rank(meeting: Meeting, message: bytes) -> int:
    """Relay for the task that rank 0's message gives to this rank; the process's exit status."""
    world = meeting.world
    machines = meeting.machines
    rank = world.Get_rank()
    with abort_on_error(world):
        ranks = POOL.decode(message)
        place = ranks.place(rank)
        if machines[rank] == machines[0]:
            keep_off(ranks.cores)
        board = Board.attach(board_name(place.run_id, 0)) if place.host == 0 else None
        comm = world.Create_group(world.Get_group().Incl(place.members))
        membership = Membership(comm, partial(describe, where=_where(place)))
        barrier(world, READY)
    with ExitStack() as stack:
        try:
            with membership:
                _relay(membership, place, board, stack)
        except JobFailed as error:
            _report(place, str(error))
        except BaseException as error:
            _report(place, describe(error, _where(place)))
    barrier(world, ALL_ENDED)
    return 0


def _relay(membership: Membership, place: RelayPlace, board: Board | None, stack: ExitStack) -> None:
    """From the topology to the end of the task; `stack` closes what is made. board: of the task, on its own host."""
    keeper: HostKeeper | None = None
    if board is not None:
        channels = _await_task(membership, place, board)
        membership.exchange.broadcast(b"" if channels is None else channels.topology.to_bytes())
    else:
        channels = None
        if data := membership.exchange.broadcast(None):
            sweep_dead()
            keeper = HostKeeper(place.run_id, place.host, Topology.from_bytes(data).config.run.silence_limit)
            stack.callback(keeper.end)
            keeper.send(KeepHost(data, []))
            keeper.receive(Made)
            channels = HostChannels.attach(place.run_id, place.host, 0.0)
            channels.attach_drained()
            stack.callback(channels.close)
    if channels is None:
        return
    topology = channels.topology
    assignment = next(one for one in topology.on_host(place.host) if one.role is Role.RELAY)
    relay_process(membership, topology, assignment, channels, keeper)


def _await_task(membership: Membership, place: RelayPlace, board: Board) -> HostChannels | None:
    """The task's channels, once they are made; None where the task ends before."""
    while not board.wait_ready(CHANNELS, LOOK_PERIOD):
        membership.poll()
        if board.command not in GOING:
            return None
    try:
        return HostChannels.attach(place.run_id, 0, LOOK_PERIOD)
    except ChannelError:
        if board.command in GOING:
            raise
        return None


def _where(place: RelayPlace) -> str:
    """Names a relay in messages."""
    return f"the relay of task {place.task} on host {place.host}"


def _report(place: RelayPlace, text: str) -> None:
    """Put a failure on the board of this host, where there is one: the task on its own host, collectors elsewhere
    end with it."""
    with suppress(ChannelError):
        report_failure(Board.attach(board_name(place.run_id, place.host)), place.run_id, place.host, text)

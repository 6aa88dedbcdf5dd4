"""A job on one host, without mpirun.

`run_local` is the keeper itself: it starts the trainer as a program and forks the members. `run_here` trains in this
process, as tasks of a pool do, which borrow a device for some moves; the keeper of its members is a program."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddrl.channels.board import Board, Command
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, JobFailed
from ddrl.core.roles import Assignment, Role
from ddrl.run.keeper import import_for_members
from ddrl.run.preparation import Preparation, Probe, probe_in_fork
from ddrl.run.process import Interrupts
from ddrl.run.processes import TRAINER_PROGRAM, HostKeeper, Job
from ddrl.run.topology import HostChannels, board_name, read_failure, rollouts_of_host

if TYPE_CHECKING:
    from ddrl.run.task import Task


def local_ranks(config: Config, hosts: int = 0) -> tuple[Assignment, ...]:
    """Roles of a local run: one host, no relay. hosts > 0: of a pool's task under mpirun, with a relay and collectors
    on each. ConfigError where such a task does not go in rounds."""
    if hosts and not config.uses("pool"):
        raise ConfigError(
            "under mpirun a pool's tasks have collectors on every host: set pool.collectors = prewarm, cold or alive, "
            "or start without mpirun"
        )
    members = [Assignment(0, Role.TRAINER, 0, 0)]
    if config.evaluation.period:
        members.append(Assignment(len(members), Role.EVALUATOR, 0, 0))
    members += [Assignment(len(members) + host, Role.RELAY, host, host) for host in range(hosts)]
    count = rollouts_of_host(config)
    for index in range(count * max(hosts, 1)):
        members.append(Assignment(len(members), Role.ROLLOUT, index // count, index))
    return tuple(members)


def run_local(
    prepare: Callable[[Probe], Preparation], run_id: str, program: Sequence[str] = TRAINER_PROGRAM
) -> tuple[dict[str, Any], Preparation]:
    """Run to the end; the summary, and what `prepare` made, which is called while the trainer imports torch."""
    with Job(run_id, 0) as job, job.interrupts_passed_on():
        job.start_trainer(program)
        import_for_members()
        preparation = prepare(lambda config: probe_in_fork(config, job.check_interrupts))
        topology = preparation.topology(local_ranks(preparation.config))
        records = preparation.open_records()
        job.check_interrupts()
        job.open(topology)
        job.hand_over(records)
        return job.run(), preparation


def run_here(
    preparation: Preparation, equip: Callable[[Task], None] = lambda task: None, hosts: int = 0
) -> dict[str, Any]:
    """Run to the end, training in this process; the summary. The keeper starts while this process loads torch.

    `equip` is called with the task before its first turn. hosts > 0: there are relays on as many, ranks of the job
    whose rank 0 has started this process and made its board."""
    from ddrl.run.task import Task
    from ddrl.run.trainer import drive, start_rounds

    run_id = preparation.run_id
    board = Board.attach(board_name(run_id, 0)) if hosts else Board.create(board_name(run_id, 0))
    keeper = HostKeeper(run_id, 0)
    channels: HostChannels | None = None
    rounds: Any = None
    try:
        topology = preparation.topology(local_ranks(preparation.config, hosts))
        records = preparation.open_records()
        channels = HostChannels.create(topology, 0, board)
        with Interrupts() as interrupts:
            task = Task(topology, channels, records, [keeper.duty()])
            rounds = start_rounds(task, os.getppid() if hosts else None)
            equip(task)
            document = drive(task, interrupts)
        if hosts and board.command == Command.FAIL:  # of a relay, after the task had ended
            raise JobFailed(read_failure(run_id, 0))
        return document
    finally:
        if board.command != Command.FAIL:
            board.command = Command.STOP
        if rounds is not None:
            rounds.close()
        keeper.end(channels is not None)
        if channels is not None:
            channels.close()
        else:
            board.unlink()

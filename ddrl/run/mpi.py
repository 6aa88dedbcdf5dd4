"""The job under mpirun: each rank takes its role; MPI is spoken at the start, at the end, and between relays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Board, Command
from ddrl.channels.lane import LaneSet
from ddrl.channels.segment import sweep_dead
from ddrl.core.layouts import row_dtype
from ddrl.core.roles import Assignment, Role, assign_roles, group_hosts
from ddrl.run.directory import RunDirectory
from ddrl.run.failure import describe, report_failure
from ddrl.run.final_evaluation import FinalEvaluation
from ddrl.run.interrupts import Interrupts, ignore_interrupts
from ddrl.run.last_save import save_in_a_child
from ddrl.run.leftovers import sweep_open_mpi
from ddrl.run.members import member_process
from ddrl.run.messages import broadcast, host_names, wait_for
from ddrl.run.preparation import Preparation
from ddrl.run.session import Session
from ddrl.run.wiring import HostChannels, Topology, board_name

if TYPE_CHECKING:
    from mpi4py import MPI

DISCARDED_ROWS = 64


def run_mpi(prepare: Callable[[], Preparation], run_id: str) -> tuple[int, tuple[dict[str, Any], RunDirectory] | None]:
    """This rank's part of the job: (exit status, and on rank 0 the summary and the run directory).

    `prepare` is called on rank 0 alone; what it raises is raised there, and every other rank leaves quietly with a nonzero status.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    names = host_names(world)
    if rank != 0:
        ignore_interrupts()
        return _follow(world, broadcast(world, None)), None
    try:
        preparation = prepare()
        config = preparation.config
        hosts = group_hosts(world.Get_size(), names, config.cluster.relays)
        ranks = tuple(assign_roles(hosts, evaluator=config.evaluation.period > 0))
        topology = Topology(run_id, config, preparation.spec(), ranks)
        preparation.open_directory()
    except BaseException:
        broadcast(world, b"")
        raise
    sweep_dead()
    sweep_open_mpi()
    broadcast(world, topology.to_bytes())
    return 0, (_lead(world, topology, preparation), preparation.directory)


def _lead(world: MPI.Comm, topology: Topology, preparation: Preparation) -> dict[str, Any]:
    board = Board.create(board_name(topology.run_id, 0))
    channels: HostChannels | None = None
    try:
        channels = HostChannels.create(topology, 0, board)
        wait_for(world.Ibarrier())  # every host's channels stand
        with Interrupts() as interrupts:
            session = Session(topology, preparation.directory, channels, interrupts, resume=preparation.resume)
            try:
                session.start()
                reason = session.run()
                saved = interrupts.terminated and save_in_a_child(session, topology.run_id)
                return session.finish(reason, evaluate=FinalEvaluation(topology, session.model), saved=saved, settle=not saved)
            except BaseException as error:
                session.abandon(error)
                raise
    except BaseException:
        board.command = Command.FAIL
        raise
    finally:
        wait_for(world.Ibarrier(), lambda: _discard(channels))  # nobody needs this host's channels any more
        if channels is not None:
            channels.close()


def _discard(channels: HostChannels | None) -> None:
    """Take rows that came after the end, so that no relay waits for room in a lane."""
    if channels is not None:
        rows = np.zeros(DISCARDED_ROWS, row_dtype(channels.topology.spec))
        LaneSet(channels.drained_lanes()).drain(rows)


def _follow(world: MPI.Comm, message: bytes) -> int:
    if not message:
        return 1  # rank 0 says what is wrong
    topology = Topology.from_bytes(message)
    mine = topology.ranks[world.Get_rank()]
    relays = [member.rank for member in topology.ranks if member.role is Role.RELAY]
    channels: HostChannels | None = None
    try:
        if mine.role is not Role.RELAY:
            wait_for(world.Ibarrier())
            return member_process(topology.run_id, mine.host, mine.rank)
        if mine.host != 0:
            sweep_dead()
            channels = HostChannels.create(topology, mine.host, Board.create(board_name(topology.run_id, mine.host)))
        comm = world.Create_group(world.Get_group().Incl(relays))
        wait_for(world.Ibarrier())
        if channels is None:
            channels = HostChannels.attach(topology.run_id, 0, timeout=60.0)
        return _relay(comm, topology, mine, channels)
    finally:
        wait_for(world.Ibarrier())
        if channels is not None:
            channels.close()


def _relay(comm: MPI.Comm, topology: Topology, mine: Assignment, channels: HostChannels) -> int:
    from ddrl.run.relay import relay_process

    try:
        return relay_process(comm, topology, mine, channels)
    except BaseException as error:
        report_failure(channels.board, topology.run_id, mine.host, describe(error, f"rank {mine.rank} (relay of host {mine.host})"))
        return 1

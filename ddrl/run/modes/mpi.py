"""The job under mpirun: each rank takes its role; MPI is spoken at the start, at the end, and between relays.

Hundreds of ranks load this module, so it imports only what every rank needs; the trainer's and the relays' parts are
modules of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddrl.channels.board import Board
from ddrl.channels.segment import sweep_dead
from ddrl.core.errors import JobFailed
from ddrl.core.plugins import slice_module
from ddrl.core.roles import Assignment, Role, assign_roles, group_hosts
from ddrl.run.keeper import report_stacks
from ddrl.run.process import die_with, ignore_interrupts
from ddrl.run.processes import HostKeeper
from ddrl.run.ranks import SLICE_MARK, Agreement, abort, abort_on_error, broadcast, host_names, part
from ddrl.run.topology import HostChannels, Topology, board_name, describe, report_failure, rollouts_of_host

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.distribution.membership import Membership
    from ddrl.run.directory import RunDirectory
    from ddrl.run.preparation import Preparation


def run_mpi(prepare: Callable[[], Preparation], run_id: str) -> tuple[int, tuple[dict[str, Any], RunDirectory] | None]:
    """This rank's part of the job: (exit status, and on rank 0 the summary and the run directory).

    `prepare` is called on rank 0 alone; what it raises is raised there, and every other rank leaves quietly with a
    nonzero status.
    """
    world, names, launcher = meet()
    if world.Get_rank() != 0:
        ignore_interrupts()
        with abort_on_error(world):
            message = broadcast(world, None)
        if message.startswith(SLICE_MARK):
            name, _, body = message.removeprefix(SLICE_MARK).partition(b"\n")
            return slice_module(name.decode(), "this job").serve_rank(world, body, names), None
        return _follow(world, message), None
    try:
        preparation = prepare()
        config = preparation.config
        collectors = rollouts_of_host(config) if config.uses("pool") else 0
        hosts = group_hosts(world.Get_size(), names, config.cluster.relays, alone=collectors > 0)
        evaluator = config.evaluation.period > 0
        nodes = config.learner.nodes
        ranks = assign_roles(hosts, evaluator=evaluator, nodes=nodes, collectors=collectors)
        topology = preparation.topology(tuple(ranks))
        records = preparation.open_records()
        from ddrl.run.modes.mpi_trainer import lead

        message = topology.to_bytes()
    except BaseException:
        broadcast(world, b"")
        raise
    with abort_on_error(world):
        broadcast(world, message)
    return 0, (lead(world, topology, records, launcher), records.directory)


def meet() -> tuple[MPI.Intracomm, list[str], int]:
    """All ranks, the name of each one's machine, and the process that started this one. Until everyone knows what the
    job is, nobody else can know of a failure: it aborts the job."""
    from mpi4py import MPI

    report_stacks(2)
    world = MPI.COMM_WORLD
    launcher = os.getppid()
    # Rank 0 saves when its launcher is killed; the others, which hold nothing, end at once.
    die_with(launcher, signal.SIGTERM if world.Get_rank() == 0 else signal.SIGKILL)
    with abort_on_error(world):
        return world, host_names(world), launcher


def _follow(world: MPI.Intracomm, message: bytes) -> int:
    """A rank that is not the trainer, from the topology on; its exit status. Whatever fails is said to everybody."""
    if not message:
        return 1  # rank 0 says what is wrong
    topology: Topology | None = None
    board: Board | None = None
    channels: HostChannels | None = None
    keeper: HostKeeper | None = None
    trouble: BaseException | None = None
    status = 1
    meeting = world
    try:
        topology = Topology.from_bytes(message)
        mine = topology.ranks[world.Get_rank()]
        if mine == topology.creator(mine.host):
            sweep_dead()
            board = Board.create(board_name(topology.run_id, mine.host))
            keeper = HostKeeper(topology.run_id, mine.host)
            channels = HostChannels.create(topology, mine.host, board)
    except BaseException as error:
        trouble = error
    try:
        Agreement(world, trouble).wait()
        assert topology is not None
        with abort_on_error(world, topology.run_id):  # other relays are inside collective calls that nothing interrupts
            membership = _join_relays(world, topology)
            nodes = join_nodes(world, topology)
            meeting = join_others(world, topology)
        with membership or contextlib.nullcontext():
            status = _play(topology, topology.ranks[world.Get_rank()], channels, membership, nodes, keeper)
    except JobFailed as error:
        _report(world, topology, str(error))
    except BaseException as error:
        _report(world, topology, describe(error, _where(world.Get_rank(), topology)))
    finally:
        if keeper is not None:
            keeper.end(channels is not None)
        if meeting is not None:
            part(meeting)
        if channels is not None:
            channels.close()
        elif board is not None:
            board.unlink()
    return status


def _where(rank: int, topology: Topology | None) -> str:
    """Names a rank in messages."""
    if topology is None or topology.ranks[rank].role is not Role.RELAY:
        return f"rank {rank}"
    return f"rank {rank} (relay of host {topology.ranks[rank].host})"


def _report(world: MPI.Intracomm, topology: Topology | None, text: str) -> None:
    """Put a failure on this host's board. Where the ranks could not agree, `text` is empty: the lowest rank that failed
    has printed its own."""
    if topology is not None and text:
        host = topology.ranks[world.Get_rank()].host
        report_failure(Board.attach(board_name(topology.run_id, host)), topology.run_id, host, text)


def _join_relays(world: MPI.Intracomm, topology: Topology) -> Membership | None:
    """A relay joins the other ones; None for any other rank."""
    mine = topology.ranks[world.Get_rank()]
    if mine.role is not Role.RELAY:
        return None
    from ddrl.distribution.membership import Membership

    relays = [member.rank for member in topology.ranks if member.role is Role.RELAY]
    comm = world.Create_group(world.Get_group().Incl(relays))
    return Membership(comm, lambda error: describe(error, _where(mine.rank, topology)))


def join_nodes(world: MPI.Intracomm, topology: Topology) -> MPI.Intracomm | None:
    """The communicator of the trainer (its rank 0) and the gradient nodes; None for any other rank, or without
    nodes."""
    group = [member.rank for member in topology.ranks if member.role in (Role.TRAINER, Role.NODE)]
    if len(group) == 1 or world.Get_rank() not in group:
        return None
    return world.Create_group(world.Get_group().Incl(group))


def join_others(world: MPI.Intracomm, topology: Topology) -> MPI.Intracomm | None:
    """Those who meet at the end of the job: all but the gradient nodes, which may have died meanwhile and hold no
    channel that others need; None for a node."""
    nodes = [member.rank for member in topology.ranks if member.role is Role.NODE]
    if not nodes:
        return world
    return None if world.Get_rank() in nodes else world.Create_group(world.Get_group().Excl(nodes))


def _play(
    topology: Topology,
    mine: Assignment,
    channels: HostChannels | None,
    membership: Membership | None,
    nodes: MPI.Intracomm | None,
    keeper: HostKeeper | None,
) -> int:
    """The role of a rank, once every host has its channels; its exit status. A rank that is neither a relay nor a node
    is the place of a rollout or evaluator, which the host's keeper has forked: it only waits for the end."""
    if nodes is not None:
        return slice_module("balance.nodes", "learner.nodes").node_process(nodes, topology, mine)
    if membership is None:
        return 0
    from ddrl.run.relay import relay_process

    channels = channels or HostChannels.attach(topology.run_id, mine.host, timeout=60.0)
    return relay_process(
        membership,
        topology,
        mine,
        channels,
        on_death=lambda row: _note_death(topology, mine, channels, row),
        check=(lambda: None) if keeper is None else keeper.check,
    )


def _note_death(topology: Topology, mine: Assignment, channels: HostChannels, row: int) -> None:
    """A process of this host has died, and mpirun (with --enable-recovery) has not ended the job. A gradient node is
    marked as ended, and the trainer goes on without it; without the trainer the job is ended. The death of any other
    process is seen by its silence."""
    dead = topology.on_host(mine.host)[row]
    if dead.role is Role.NODE:
        channels.counters.row(row)["ended"].set(1.0)
    elif dead.role is Role.TRAINER:
        from mpi4py import MPI

        print(
            "ddrl: the trainer's process has died: the job ends; go on from its last checkpoint with --resume",
            file=sys.stderr,
            flush=True,
        )
        abort(MPI.COMM_WORLD, topology.run_id)

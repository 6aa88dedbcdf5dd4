"""The job under mpirun: each rank takes its role; MPI is spoken at the start, at the end, and between relays.

Hundreds of ranks load this module, so it imports only what every rank needs; the trainer's and the relays' parts are
modules of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddrl.channels.board import Board
from ddrl.channels.segment import sweep_dead
from ddrl.core.errors import DdrlError
from ddrl.core.roles import Assignment, Role, assign_roles, group_hosts
from ddrl.run.interrupts import ignore_interrupts
from ddrl.run.messages import barrier, broadcast, host_names
from ddrl.run.wiring import HostChannels, Topology, board_name

CHANNELS_STAND = "every host's channels stand"
CHANNELS_UNUSED = "nobody needs any host's channels any more"

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.run.directory import RunDirectory
    from ddrl.run.preparation import Preparation


def run_mpi(prepare: Callable[[], Preparation], run_id: str) -> tuple[int, tuple[dict[str, Any], RunDirectory] | None]:
    """This rank's part of the job: (exit status, and on rank 0 the summary and the run directory).

    `prepare` is called on rank 0 alone; what it raises is raised there, and every other rank leaves quietly with a
    nonzero status."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    names = host_names(world)
    if world.Get_rank() != 0:
        ignore_interrupts()
        return _follow(world, broadcast(world, None)), None
    try:
        from ddrl.run.plans import refuse_or_say

        preparation = prepare()
        config = preparation.config
        hosts = group_hosts(world.Get_size(), names, config.cluster.relays)
        refuse_or_say(config, max(hosts))
        ranks = tuple(assign_roles(hosts, evaluator=config.evaluation.period > 0))
        topology = Topology(run_id, config, preparation.spec(), ranks)
        preparation.open_directory()
    except BaseException:
        broadcast(world, b"")
        raise
    from ddrl.run.mpi_trainer import lead

    broadcast(world, topology.to_bytes())
    return 0, (lead(world, topology, preparation), preparation.directory)


def _follow(world: MPI.Comm, message: bytes) -> int:
    if not message:
        return 1  # rank 0 says what is wrong
    topology = Topology.from_bytes(message)
    mine = topology.ranks[world.Get_rank()]
    channels: HostChannels | None = None
    if mine == topology.creator(mine.host):
        try:
            sweep_dead()
            channels = HostChannels.create(topology, mine.host, Board.create(board_name(topology.run_id, mine.host)))
        except DdrlError as error:  # this host has no board yet on which to report it
            print(f"ddrl: host {mine.host}: {error}", file=sys.stderr, flush=True)
            world.Abort(1)
    try:
        if mine.role is Role.RELAY:
            return _relay(world, topology, mine, channels)
        from ddrl.run.members import member_process

        barrier(world, CHANNELS_STAND)
        return member_process(topology.run_id, mine.host, mine.rank)
    finally:
        barrier(world, CHANNELS_UNUSED)
        if channels is not None:
            channels.close()


def _relay(world: MPI.Comm, topology: Topology, mine: Assignment, channels: HostChannels | None) -> int:
    from ddrl.run.relay import relay_process

    relays = [member.rank for member in topology.ranks if member.role is Role.RELAY]
    comm = world.Create_group(world.Get_group().Incl(relays))
    barrier(world, CHANNELS_STAND)

    def join() -> HostChannels:
        return channels or HostChannels.attach(topology.run_id, mine.host, timeout=60.0)

    return relay_process(comm, topology, mine, join, f"rank {mine.rank} (relay of host {mine.host})")

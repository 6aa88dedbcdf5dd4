"""A rank of a pool under mpirun: the relay of one task on one host. It starts and ends the task's collectors there.

The task's process is no rank. Rank 0 has started it and made its board; once the task's channels stand, its relay on
that host hands the topology to those on others, and they relay as in a job of the task's own. However a task ends, its
relays end with it, and with them nobody else's; their ranks wait for the end of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from ddrl.channels.board import Board
from ddrl.channels.segment import sweep_dead
from ddrl.core.errors import ChannelError, JobFailed
from ddrl.core.roles import Role
from ddrl.distribution.membership import Membership
from ddrl.run.members import GOING
from ddrl.run.pool.ranks import STANDING, PoolRanks, RelayPlace
from ddrl.run.process import keep_off
from ddrl.run.ranks import abort_on_error, barrier, part
from ddrl.run.relay import relay_process
from ddrl.run.topology import CHANNELS, LOOK_PERIOD, HostChannels, Topology, board_name, describe, report_failure

if TYPE_CHECKING:
    from mpi4py import MPI


def serve_task(world: MPI.Intracomm, message: bytes, machines: Sequence[str]) -> int:
    """Relay for the task that rank 0's message gives to this rank; the process's exit status."""
    rank = world.Get_rank()
    with abort_on_error(world):
        ranks = PoolRanks.from_bytes(message)
        place = ranks.place(rank)
        if machines[rank] == machines[0]:
            keep_off(ranks.cores)
        board = Board.attach(board_name(place.run_id, 0)) if place.host == 0 else None
        comm = world.Create_group(world.Get_group().Incl(place.members))
        membership = Membership(comm, partial(describe, where=_where(place)))
        barrier(world, STANDING)
    with ExitStack() as stack:
        try:
            with membership:
                _relay(membership, place, board, stack)
        except JobFailed as error:
            _report(place, str(error))
        except BaseException as error:
            _report(place, describe(error, _where(place)))
    part(world)
    return 0


def _relay(membership: Membership, place: RelayPlace, board: Board | None, stack: ExitStack) -> None:
    """From the topology to the end of the task; `stack` closes what is made. board: of the task, on its own host."""
    if board is not None:
        channels = _await_task(membership, place, board)
        membership.exchange.broadcast(b"" if channels is None else channels.topology.to_bytes())
    else:
        channels = None
        if data := membership.exchange.broadcast(None):
            sweep_dead()
            channels = HostChannels.create(
                Topology.from_bytes(data), place.host, Board.create(board_name(place.run_id, place.host))
            )
            stack.callback(channels.close)
    if channels is not None:
        topology = channels.topology
        mine = next(one for one in topology.on_host(place.host) if one.role is Role.RELAY)
        relay_process(membership, topology, mine, channels)


def _await_task(membership: Membership, place: RelayPlace, board: Board) -> HostChannels | None:
    """The task's channels, once they stand; None where the task ends before."""
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
    """Put a failure on the board of this host, where that still stands: the task on its own host, collectors elsewhere
    end with it."""
    with suppress(ChannelError):
        report_failure(Board.attach(board_name(place.run_id, place.host)), place.run_id, place.host, text)

"""Rank 0 under mpirun: the trainer's host, its task, and the end of the job."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Board, Command
from ddrl.channels.lane import LaneSet
from ddrl.channels.segment import sweep_dead, unlink_run
from ddrl.core.errors import JobFailed
from ddrl.core.plugins import slice_module
from ddrl.run.checkpoint import TaskRecords
from ddrl.run.modes.mpi import join_nodes, join_others
from ddrl.run.process import Interrupts, ended_well, is_orphan, leave_process_group, sweep_open_mpi
from ddrl.run.processes import HostKeeper
from ddrl.run.ranks import Agreement, part
from ddrl.run.task import Task
from ddrl.run.topology import HostChannels, Topology, board_name, read_failure
from ddrl.run.trainer import drive

if TYPE_CHECKING:
    from mpi4py import MPI


DISCARDED_ROWS = 64


def lead(world: MPI.Intracomm, topology: Topology, records: TaskRecords, launcher: int) -> dict[str, Any]:
    """Train to the end; the summary. The learner is built while the other ranks still start."""
    board: Board | None = None
    channels: HostChannels | None = None
    standing: Agreement | None = None
    starter: Any = None
    collectors: Any = None
    keeper: HostKeeper | None = None
    leader: Any = None  # of gradient nodes
    trouble: BaseException | None = None
    meeting = world
    try:
        sweep_dead()
        sweep_open_mpi()
        board = Board.create(board_name(topology.run_id, 0))
        rounds = slice_module("pool.rounds", "pool.collectors") if topology.in_rounds else None
        starter = None if rounds is None else rounds.start_host(topology.run_id, 0)
        keeper = HostKeeper(topology.run_id, 0)
        channels = HostChannels.create(topology, 0, board)
        standing = Agreement(world)
        with Interrupts() as interrupts:
            task = Task(topology, channels, records, [keeper.duty()])
            try:
                standing.wait()
                comm = join_nodes(world, topology)
                others = join_others(world, topology)
                assert others is not None
                meeting = others
                if comm is not None:
                    leader = slice_module("balance.nodes", "learner.nodes").lead_nodes(comm, task, channels)
                if rounds is not None:
                    collectors = rounds.go_in_rounds(task, starter, launcher)
            except BaseException as error:
                task.abandon(error)
                raise
            summary = drive(task, interrupts, _save_in_a_copy)
            if leader is not None:
                leader.close()
    except BaseException as error:
        trouble = error
        if board is not None:
            board.command = Command.FAIL
        if standing is None:
            with contextlib.suppress(JobFailed):  # it is this error
                Agreement(world, error).wait()
        raise
    finally:
        if collectors is not None:
            collectors.close()
        elif starter is not None:
            starter.stop(0.0)
        if keeper is not None:
            keeper.end(channels is not None)
        part(meeting, lambda: _discard(channels, launcher), topology.run_id, trouble)
        late = trouble is None and board is not None and board.command == Command.FAIL
        failure = read_failure(topology.run_id, 0) if late else ""  # of a relay, after the task had ended
        if channels is not None:
            channels.close()
        elif board is not None:
            board.unlink()
    if failure:
        raise JobFailed(failure)
    return summary


def _save_in_a_copy(task: Task) -> bool:
    """Save in a copy of this process, for mpirun is about to kill its ranks; whether that went well."""
    child = leave_process_group()
    if child:
        return ended_well(child)
    status = 1
    try:
        task.observers.forget_sockets()
        task.finish(settle=False)
        unlink_run(task.topology.run_id)  # nobody else will: the ranks are being killed
        _tell(f"saved; go on: python -m ddrl.run --resume {task.directory.path}")
        status = 0
    finally:
        os._exit(status)


def _tell(text: str) -> None:
    """Say it on the terminal itself, where there is one: mpirun no longer passes on what its ranks print."""
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"ddrl: {text}\n")
    except OSError:
        return


def _discard(channels: HostChannels | None, launcher: int) -> None:
    """Take rows that came after the end, so that no relay waits for room in a lane. Without its launcher the job has no
    other rank left: end here."""
    if is_orphan(launcher):
        if channels is not None:
            unlink_run(channels.topology.run_id)
        os._exit(1)
    if channels is not None:
        rows = np.zeros(DISCARDED_ROWS, channels.topology.schema.dtype)
        LaneSet(channels.drained_lanes()).drain(rows)

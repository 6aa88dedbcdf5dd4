"""Rank 0 under mpirun: the trainer's host, its session, and the end of the job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Board, Command
from ddrl.channels.lane import LaneSet
from ddrl.channels.segment import sweep_dead
from ddrl.core.layouts import row_dtype
from ddrl.run.failure import JobFailed, read_failure
from ddrl.run.final_evaluation import FinalEvaluation
from ddrl.run.interrupts import Interrupts
from ddrl.run.last_save import save_and_exit
from ddrl.run.leftovers import sweep_open_mpi
from ddrl.run.messages import Barrier, barrier
from ddrl.run.mpi import CHANNELS_STAND, CHANNELS_UNUSED
from ddrl.run.preparation import Preparation
from ddrl.run.session import Session
from ddrl.run.wiring import HostChannels, Topology, board_name

if TYPE_CHECKING:
    from mpi4py import MPI

DISCARDED_ROWS = 64


def lead(world: MPI.Comm, topology: Topology, preparation: Preparation) -> dict[str, Any]:
    """Train to the end; the summary. The learner is built while the other ranks still start."""
    sweep_dead()
    sweep_open_mpi()
    board = Board.create(board_name(topology.run_id, 0))
    channels: HostChannels | None = None
    standing: Barrier | None = None
    document: dict[str, Any] | None = None
    late_failure = ""
    try:
        channels = HostChannels.create(topology, 0, board)
        standing = Barrier(world, CHANNELS_STAND)
        with Interrupts(escape=True) as interrupts:
            session = Session(topology, preparation.directory, channels, interrupts, resume=preparation.resume)
            try:
                standing.wait()
                session.start()
                reason = session.run()
                if interrupts.escaped:
                    save_and_exit(session, topology.run_id)
                saved = interrupts.child_saved
                document = session.finish(
                    reason, evaluate=FinalEvaluation(topology, session.model), saved=saved, settle=not saved
                )
            except BaseException as error:
                if interrupts.escaped:
                    os._exit(1)  # this child must not speak MPI
                session.abandon(error)
                raise
    except BaseException:
        board.command = Command.FAIL
        raise
    finally:
        (standing or Barrier(world, CHANNELS_STAND)).wait()
        barrier(world, CHANNELS_UNUSED, lambda: _discard(channels))
        if document is not None and board.command == Command.FAIL:  # a relay, after the session had ended
            late_failure = read_failure(topology.run_id, 0)
        if channels is not None:
            channels.close()
    if late_failure:
        raise JobFailed(late_failure)
    assert document is not None
    return document


def _discard(channels: HostChannels | None) -> None:
    """Take rows that came after the end, so that no relay waits for room in a lane."""
    if channels is not None:
        rows = np.zeros(DISCARDED_ROWS, row_dtype(channels.topology.spec))
        LaneSet(channels.drained_lanes()).drain(rows)

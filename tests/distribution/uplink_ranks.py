"""Programs of two ranks that tests of the uplink alone run under mpirun: `python uplink_ranks.py NAME`. Rank 0 prints
one JSON line of findings."""

import numpy as np
from mpi4py import MPI
from ranks import RANK, ROW, WORLD, report, run_all

from ddrl.channels.lane import Lane, LaneSet
from ddrl.distribution.flows import RowsUp
from ddrl.distribution.membership import TAG_BLOCK as TAG

NEVER = 1e12  # s between blocks


class Alone:
    """A membership whose relays talk by COMM_WORLD."""

    control = WORLD

    def keep(self, part):
        pass

    def drop(self, part):
        pass


class Refilled:
    """Lanes of `capacity` rows in all that rollouts fill again while they are drained."""

    def __init__(self, capacity, pending):
        self.capacity, self.pending, self.drained = capacity, pending, []

    def drain(self, out):
        rows = min(len(out), self.pending)
        self.drained.append(rows)
        return rows


def taken():
    """Root: rows of each block in the order of their coming, up to an empty one."""
    block, status, rows = np.empty(1 << 16, ROW), MPI.Status(), []
    while not rows or rows[-1]:
        WORLD.Recv(block.view(np.uint8), 1, TAG, status)
        rows.append(status.Get_count(MPI.BYTE) // ROW.itemsize)
    return rows[:-1]


def end():
    """An empty block."""
    WORLD.Send(np.empty(0, np.uint8), 0, TAG)


def capped():
    """What a sender drains at once, by the lanes' capacity and by the bytes of a block; never by time."""
    too_few, first, held = None, None, []
    if RANK == 1:
        lanes = [Lane.create(None, ROW, 8) for _ in range(2)]
        sender = RowsUp(Alone(), LaneSet(lanes), ROW, 1 << 20, period=NEVER)
        lanes[0].push(np.zeros(2, ROW))
        lanes[1].push(np.zeros(1, ROW))
        too_few = sender.progress()
        lanes[1].push(np.zeros(1, ROW))
        first = sender.progress()
        sender.close()
        for capacity, block_bytes in ((16, 1 << 20), (1000, 4096)):
            refilled = Refilled(capacity, 5000)
            sender = RowsUp(Alone(), refilled, ROW, block_bytes, period=NEVER)
            sender.progress()
            held += refilled.drained
            sender.close()
        end()
    report(blocks=taken() if RANK == 0 else [], too_few=too_few, first=first, held=held)


def untaken():
    """The root takes no block before the other's producers are refused."""
    pushed = 0
    figures = {}
    if RANK == 1:
        lanes = [Lane.create(None, ROW, 8) for _ in range(2)]
        sender = RowsUp(Alone(), LaneSet(lanes), ROW, 1 << 20, period=NEVER)
        while room := sum(lane.push(np.zeros(8, ROW), timeout=0) for lane in lanes):
            pushed += room
            sender.progress()
        figures = sender.figures()
    WORLD.Barrier()
    blocks = []
    if RANK == 0:
        blocks = taken()
    else:
        while sender.pending:
            sender.flush = True
            sender.progress()
        sender.close()
        end()
    report(blocks=blocks, pushed=pushed, figures=figures)


if __name__ == "__main__":
    run_all({"capped": capped, "untaken": untaken})

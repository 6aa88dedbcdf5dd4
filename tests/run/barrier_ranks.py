"""Two ranks at barriers; `python barrier_ranks.py NAME`. Rank 0 prints one JSON line."""

import json
import sys
import time

from mpi4py import MPI

from ddrl.run.ranks import Barrier, BarrierError, barrier
from tests.sources import check_sources

check_sources()

WORLD = MPI.COMM_WORLD


def met():
    """The last to come is not passed before it has come; the names are the same."""
    come = time.time()
    if WORLD.rank:
        time.sleep(0.3)
        come = time.time()
    meeting = Barrier(WORLD, "both stand")
    meeting.wait()
    meeting.wait()
    return WORLD.bcast(come, 1) <= time.time()


def apart():
    """They come to different ones."""
    try:
        barrier(WORLD, f"place {WORLD.rank}")
    except BarrierError as error:
        return str(error)


def late():
    """One does not come in time."""
    text = ""
    meeting = Barrier(WORLD, "both stand") if WORLD.rank == 0 else None
    if meeting is not None:
        try:
            meeting.wait(limit=0.05)
        except BarrierError as error:
            text = str(error)
    WORLD.barrier()
    (meeting or Barrier(WORLD, "both stand")).wait()
    return text


found = WORLD.gather({"met": met, "apart": apart, "late": late}[sys.argv[1]]())
if WORLD.rank == 0:
    print(json.dumps(found), flush=True)

"""Two ranks at barriers; `python barrier_ranks.py NAME`. Rank 0 prints one JSON line."""

import json
import sys
import time

from mpi4py import MPI

from ddrl.run.ranks import BarrierError, barrier
from tests.sources import check_sources

check_sources()

WORLD = MPI.COMM_WORLD


def met():
    """The last to come is not passed before it has come; the names are the same."""
    come = time.time()
    if WORLD.rank:
        time.sleep(0.3)
        come = time.time()
    barrier(WORLD, "both are here")
    return WORLD.bcast(come, 1) <= time.time()


def apart():
    """They come to different ones."""
    try:
        barrier(WORLD, f"place {WORLD.rank}")
    except BarrierError as error:
        return str(error)


found = WORLD.gather({"met": met, "apart": apart}[sys.argv[1]]())
if WORLD.rank == 0:
    print(json.dumps(found), flush=True)

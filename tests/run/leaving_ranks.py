"""Ranks that end at once; each prints a line where its interpreter ends by itself, as MPI_Finalize needs."""

import atexit
import os
import sys

from mpi4py import MPI

from ddrl.run import slot
from tests.sources import check_sources

check_sources()
MPI.COMM_WORLD.Barrier()
atexit.register(print, "the interpreter ends", flush=True)
sys.exit(slot.leave(0, bytes([slot.SLOT, slot.RECOVERY if slot.may_lose_ranks(os.getppid()) else 0])))

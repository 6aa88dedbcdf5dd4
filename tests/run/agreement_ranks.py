"""Ranks that agree and end; each prints a line where its interpreter ends by itself, as MPI_Finalize needs."""

import atexit

from mpi4py import MPI

from ddrl.run.process import end
from ddrl.run.ranks import Agreement
from tests.sources import check_sources

check_sources()
Agreement(MPI.COMM_WORLD).wait()
atexit.register(print, "the interpreter ends", flush=True)
end(0)

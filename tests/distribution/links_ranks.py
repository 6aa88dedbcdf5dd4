"""Programs that tests run under mpirun, one rank a host: `python links_ranks.py NAME`. Rank 0 prints one JSON line, a
value a rank."""

import json
import sys
from dataclasses import asdict

from mpi4py import MPI

from ddrl.distribution.links import measure_links
from tests.sources import check_sources

check_sources()

WORLD = MPI.COMM_WORLD


def measured():
    """Three times, for what one left behind must not disturb the next; the last with what is known."""
    found = [measure_links(WORLD) for _ in range(2)]
    found.append(measure_links(WORLD, known=found[0]))
    everyone = WORLD.gather([asdict(links) for links in found])
    if WORLD.rank == 0:
        print(json.dumps(everyone), flush=True)


{"measured": measured}[sys.argv[1]]()

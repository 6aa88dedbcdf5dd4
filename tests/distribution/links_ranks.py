"""Programs that tests run under mpirun, one rank a host: `python links_ranks.py NAME`. Rank 0 prints one JSON line, a
value a rank."""

import json
import sys
from dataclasses import asdict

from mpi4py import MPI

from ddrl.distribution.links import measure_links
from ddrl.distribution.membership import Membership
from tests.sources import check_sources

check_sources()

WORLD = MPI.COMM_WORLD


def measured():
    """Three times, for what one left behind must not disturb the next; the last with what is known."""
    membership = Membership(WORLD)
    found = [measure_links(membership.data, membership) for _ in range(2)]
    found.append(measure_links(membership.data, membership, found[0]))
    membership.leave()
    everyone = WORLD.gather([asdict(links) for links in found])
    if WORLD.rank == 0:
        print(json.dumps(everyone), flush=True)


{"measured": measured}[sys.argv[1]]()

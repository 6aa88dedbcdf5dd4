"""Everything from the root to everyone."""

from __future__ import annotations

from ddrl.distribution.plan import Plan
from ddrl.distribution.plans.building import chunk_bounds
from ddrl.distribution.plans.scheme import Scheme


class Direct(Scheme):
    """The baseline: the root's link carries n models."""

    name = "direct"
    takes_chunks = True

    @staticmethod
    def plan(hosts: int, nbytes: int, *, chunk_bytes: int = 0) -> Plan:
        """The root sends the whole model to each host in turn."""
        bounds = chunk_bounds(nbytes, chunk_bytes)
        chunks = len(bounds) - 1
        return Plan.of(
            "direct",
            hosts,
            bounds,
            ((0, host, chunk, 1) for host in range(1, hosts + 1) for chunk in range(chunks)),
            chunk_bytes=chunk_bytes,
        )

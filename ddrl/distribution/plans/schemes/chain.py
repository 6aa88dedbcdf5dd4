"""Chunks through all hosts, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddrl.distribution.plans import costs
from ddrl.distribution.plans.building import chunk_bounds
from ddrl.distribution.plans.plan import Plan
from ddrl.distribution.plans.scheme import LAG_WEIGHT, Scheme, Situation

MAX_HOSTS = 64  # that a chain is proposed for


class Chain(Scheme):
    """Slow to fill, but each host has one sender only; where versions follow one another, the filling hardly counts."""

    name = "chain"
    takes_chunks = True

    @staticmethod
    def plan(hosts: int, nbytes: int, *, chunk_bytes: int = 1 << 16) -> Plan:
        """Host i sends each chunk on to host i + 1 as it arrives."""
        bounds = chunk_bounds(nbytes, chunk_bytes)
        return Plan.of(
            "chain",
            hosts,
            bounds,
            ((host, host + 1, chunk, 1) for chunk in range(len(bounds) - 1) for host in range(hosts)),
            chunk_bytes=chunk_bytes,
        )

    @classmethod
    def proposals(cls, situation: Situation) -> Iterator[tuple[dict[str, Any], float]]:
        """See Scheme."""
        if situation.versions_in_flight == 1 or not 1 < situation.hosts <= MAX_HOSTS:
            return
        nbytes, rate, a = situation.nbytes, situation.rate, situation.message_seconds
        for size in situation.chunk_sizes:
            chunks = situation.chunks(size)
            filling = costs.chain_seconds(situation.hosts, nbytes, rate, a, chunks)
            steady = nbytes / rate + chunks * a
            yield {"chunk_bytes": size}, situation.floor + (steady + LAG_WEIGHT * filling) / (1 + LAG_WEIGHT)

"""Chunks through all hosts, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import Plan
from ddrl.distribution.plans.building import chunk_bounds
from ddrl.distribution.plans.scheme import LAG_WEIGHT, Scheme, Situation


class Chain(Scheme):
    """Slow to fill, but each host has one sender only; where versions follow one another, or an idle link lets a chunk
    through at once, the filling hardly counts."""

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
        nbytes = situation.nbytes
        rate = situation.rate
        a = situation.message_seconds
        burst = situation.network.burst
        for size in situation.chunk_sizes:
            chunks = situation.chunks(size)
            seconds = costs.chain_seconds(situation.hosts, nbytes, rate, a, chunks, burst)
            if situation.versions_in_flight > 1:
                seconds = (nbytes / rate + chunks * a + LAG_WEIGHT * seconds) / (1 + LAG_WEIGHT)
            yield {"chunk_bytes": size}, situation.floor + seconds

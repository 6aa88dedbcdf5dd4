"""Two trees, each host inner in at most one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import Plan
from ddrl.distribution.plans.building import chunks_over_trees
from ddrl.distribution.plans.scheme import Scheme, Situation
from ddrl.distribution.plans.trees import striped_trees


class TwoTree(Scheme):
    """Sanders, Speck and Traeff 2009."""

    name = "two_tree"
    takes_chunks = True

    @staticmethod
    def plan(hosts: int, nbytes: int, *, chunk_bytes: int = 1 << 16) -> Plan:
        """Two binary trees, each over all hosts, a host inner in at most one; even chunks take one, odd chunks the
        other."""
        return chunks_over_trees("two_tree", hosts, nbytes, striped_trees(hosts, 2), chunk_bytes)

    @classmethod
    def proposals(cls, situation: Situation) -> Iterator[tuple[dict[str, Any], float]]:
        """See Scheme. The form is that of stripes with a fan-out of 2, which these trees are."""
        if situation.hosts < 2:
            return
        for size in situation.chunk_sizes:
            seconds = costs.stripes_seconds(
                situation.hosts, situation.nbytes, situation.rate, situation.message_seconds, 2, situation.chunks(size)
            )
            yield {"chunk_bytes": size}, situation.floor + seconds

"""Sharded, with shards as large as each link can carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddrl.core.errors import PlanError
from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import Plan, cut_by_weight, cut_evenly
from ddrl.distribution.plans.building import shards_over_relays
from ddrl.distribution.plans.scheme import Scheme, Situation

MAX_HOSTS = 64  # that it is proposed for: every host speaks to every other


class Weighted(Scheme):
    """For unequal links; without measured ones all shards are equal."""

    name = "weighted"
    takes_chunks = uses_links = True

    @staticmethod
    def plan(hosts: int, nbytes: int, *, up: Sequence[float], chunk_bytes: int = 1 << 14) -> Plan:
        """Sharded with a relay on every host and shards as large as each link can carry: `up` [hosts + 1], any unit,
        the root's first.

        Where the root can send more than one copy's worth, it sends the rest to all hosts itself; in the limit of small
        chunks this reaches the bound nS / (B_root + sum B_up) of unequal links (Mundinger, Weber and Weiss 2008)."""
        if len(up) != hosts + 1 or min(up) < 0 or sum(up) <= 0:
            raise PlanError(
                f"weighted: the upward rates of all {hosts + 1} hosts are needed, at least 0, not {list(up)}"
            )
        if hosts == 0 or nbytes == 0:
            return shards_over_relays(
                "weighted", hosts, nbytes, cut_evenly(nbytes, max(1, hosts)), chunk_bytes, up=list(up)
            )
        total = float(sum(up))
        others = float(sum(up[1:]))
        rate = min(float(up[0]), total / hosts)  # at which a model can leave the root once, and reach all
        shares = [rate * value / others if others else 0.0 for value in up[1:]]
        relayed = [min(share, value / max(1, hosts - 1)) for share, value in zip(shares, up[1:], strict=True)]
        itself = max(0.0, rate - sum(relayed))  # the root serves this part to everybody
        if itself < 1e-6 * rate:
            itself = 0.0
        bounds = cut_by_weight(nbytes, [*relayed, itself])
        return shards_over_relays("weighted", hosts, nbytes, bounds, chunk_bytes, up=list(up))

    @classmethod
    def parameters(cls, settings: None, situation: Situation) -> dict[str, Any]:
        """See Scheme."""
        return {"up": list(situation.network.up), **super().parameters(settings, situation)}

    @classmethod
    def proposals(cls, situation: Situation) -> Iterator[tuple[dict[str, Any], float]]:
        """See Scheme."""
        hosts = situation.hosts
        nbytes = situation.nbytes
        if hosts > MAX_HOSTS or not situation.unequal:
            return
        for size in situation.chunk_sizes:
            chunks = max(situation.chunks(size), min(hosts, nbytes // 64 or 1))
            seconds = costs.pipelined_shards_seconds(
                hosts, nbytes, situation.rate, situation.message_seconds, chunks, hosts
            )
            yield {"up": list(situation.network.up), "chunk_bytes": size}, 0.9 * (situation.floor + seconds)

"""Trees over all hosts, each host inner in one of them; chunks take the trees in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddrl.core.config import setting
from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import Plan
from ddrl.distribution.plans.building import chunks_over_trees
from ddrl.distribution.plans.scheme import Scheme, Situation
from ddrl.distribution.plans.trees import striped_trees
from ddrl.distribution.simulator import Network

FANOUTS = (2, 3, 4, 6, 8)


class Stripes(Scheme):
    """After SplitStream (Castro et al. 2003)."""

    name = "stripes"
    takes_chunks = True

    @staticmethod
    def plan(
        hosts: int, nbytes: int, *, fanout: int = 8, chunk_bytes: int = 1 << 14, budgets: Sequence[float] | None = None
    ) -> Plan:
        """`fanout` trees over all hosts, each host inner in one of them and serving `fanout` others there; chunks take
        the trees in turn.

        Every host sends and receives about S, as with shards on every host, but a chunk passes through log_fanout(n)
        hosts and a host speaks to about 2 fanout others instead of n: the last chunk is there after about
        depth * fanout chunk times instead of n."""
        fanout = max(1, min(fanout, hosts))
        trees = striped_trees(hosts, fanout, budgets) if hosts else []
        extra: dict[str, Any] = {} if budgets is None else {"budgets": list(budgets)}
        return chunks_over_trees("stripes", hosts, nbytes, trees, chunk_bytes, fanout=fanout, **extra)

    @dataclass(frozen=True)
    class Settings:
        """[cluster.stripes]."""

        fanout: int = setting(8, "trees", "Trees, and hosts that each host serves in the one where it is inner.", ge=1)

    @classmethod
    def parameters(cls, settings: Settings, situation: Situation) -> dict[str, Any]:
        """See Scheme."""
        return {"fanout": settings.fanout, **super().parameters(settings, situation)}

    @classmethod
    def proposals(cls, situation: Situation) -> Iterator[tuple[dict[str, Any], float]]:
        """See Scheme. Equal trees of fan-out 2 are two_tree's."""
        hosts = situation.hosts
        network = situation.network
        for size in situation.chunk_sizes:
            chunks = situation.chunks(size)
            for fanout in FANOUTS:
                if fanout > hosts:
                    continue
                seconds = situation.floor + costs.stripes_seconds(
                    hosts, situation.nbytes, situation.rate, situation.message_seconds, fanout, chunks
                )
                if fanout > 2:
                    yield {"fanout": fanout, "chunk_bytes": size}, seconds
                if situation.unequal and chunks >= fanout:
                    yield {"fanout": fanout, "chunk_bytes": size, "budgets": budgets(network, fanout)}, 0.95 * seconds


def budgets(network: Network, fanout: int) -> list[float]:
    """Children that each host should serve over all stripes, in proportion to what its link can send, [hosts]."""
    hosts = len(network.up) - 1
    share = hosts * fanout / sum(network.up)
    return [float(round(rate * share)) for rate in network.up[1:]]

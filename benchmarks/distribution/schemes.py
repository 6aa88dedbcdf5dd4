"""Schemes that others use, to compare with: what MPI libraries do for small and large messages, and two trees.

Plug-ins for cluster.scheme (`benchmarks.distribution.schemes:Binomial`); auto never chooses them. Moved here from the
library, which had no links on which one of them was the best scheme.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddrl.distribution.plan import Edges, Plan, chunks_over_trees, cut_evenly, striped_trees, whole_models
from ddrl.distribution.schemes import Scheme

HERE = "benchmarks.distribution.schemes"
BINOMIAL = f"{HERE}:Binomial"
TWO_TREE = f"{HERE}:TwoTree"
SCATTER_RING = f"{HERE}:ScatterRing"


def binomial_tree(hosts: int) -> Edges:
    """Every host that holds the model sends it to one that lacks it, so their number doubles each round."""
    edges: Edges = []
    step = 1
    while step <= hosts:
        edges += [(holder, holder + step) for holder in range(step) if holder + step <= hosts]
        step *= 2
    return edges


class Binomial(Scheme):
    """What MPI libraries use for small messages."""

    name = "binomial"

    @staticmethod
    def plan(hosts: int, nbytes: int) -> Plan:
        """Whole models; the number of hosts that hold it doubles each round."""
        return whole_models("binomial", hosts, nbytes, binomial_tree(hosts))


class TwoTree(Scheme):
    """Sanders, Speck and Traeff 2009."""

    name = "two_tree"
    takes_chunks = True

    @staticmethod
    def plan(hosts: int, nbytes: int, *, chunk_bytes: int = 1 << 16) -> Plan:
        """Two binary trees, each over all hosts, a host inner in at most one; even chunks take one, odd chunks the
        other."""
        return chunks_over_trees("two_tree", hosts, nbytes, striped_trees(hosts, 2), chunk_bytes)


class ScatterRing(Scheme):
    """What MPI libraries use for large messages: a part to each host, then around the ring."""

    name = "scatter_ring"

    @staticmethod
    def plan(hosts: int, nbytes: int) -> Plan:
        """Scatter over a binomial tree, then ring allgather (van de Geijn); blocks that the scatter left behind are not
        sent again."""
        size = hosts + 1
        bounds, blocks = without_empty(cut_evenly(nbytes, size))
        messages: list[tuple[int, int, int, int]] = []
        held: list[set[int]] = [set(range(len(bounds) - 1)), *(set[int]() for _ in range(hosts))]

        def send(source: int, target: int, wanted: Sequence[int]) -> None:
            run: list[int] = []
            for chunk in [*wanted, -1]:
                if run and chunk != run[-1] + 1:
                    messages.append((source, target, run[0], len(run)))
                    run = []
                if chunk >= 0:
                    run.append(chunk)
            held[target].update(wanted)

        def scatter(low: int, high: int) -> None:  # `low` holds the blocks of hosts low .. high - 1
            if high - low < 2:
                return
            middle = (low + high + 1) // 2
            wanted = [blocks[block] for block in range(middle, high) if blocks[block] >= 0]
            send(low, middle, wanted)
            scatter(low, middle)
            scatter(middle, high)

        scatter(0, size)
        for turn in range(size - 1):
            for host in range(size):
                chunk = blocks[(host - turn) % size]
                target = (host + 1) % size
                if chunk >= 0 and target and chunk not in held[target]:
                    send(host, target, [chunk])
        return Plan.of("scatter_ring", hosts, bounds, messages)


def without_empty(edges: list[int]) -> tuple[list[int], list[int]]:
    """Chunk boundaries without the empty shards, and the chunk of each shard (-1: empty)."""
    bounds = [0]
    chunk_of: list[int] = []
    for start, stop in itertools.pairwise(edges):
        chunk_of.append(len(bounds) - 1 if stop > start else -1)
        if stop > start:
            bounds.append(stop)
    if len(bounds) == 1:
        return [0, 0], [0, *[-1] * (len(edges) - 2)]
    return bounds, chunk_of

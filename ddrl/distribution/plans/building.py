"""What schemes build plans from: whole models over a tree, chunks over several trees in turn, shards over relays.

Pure functions to `Plan`; root and hosts are numbered as in `plan`."""

from __future__ import annotations

import itertools
from typing import Any

from ddrl.distribution.plan import Plan, cut_chunks
from ddrl.distribution.plans.trees import Edges


def chunk_bounds(nbytes: int, chunk_bytes: int) -> list[int]:
    """Chunk boundaries of an uncut model; an empty model is one empty chunk, so that its header still travels."""
    return [0, *cut_chunks(0, nbytes, chunk_bytes)] if nbytes else [0, 0]


def whole_models(name: str, hosts: int, nbytes: int, edges: Edges, **parameters: Any) -> Plan:
    """Whole models, stored and then forwarded, along the edges of one tree."""
    return Plan.of(
        name, hosts, chunk_bounds(nbytes, 0), ((parent, child, 0, 1) for parent, child in edges), **parameters
    )


def without_empty(edges: list[int]) -> tuple[list[int], list[int]]:
    """Chunk boundaries without the empty shards, and the chunk of each shard (-1: empty)."""
    bounds = [0]
    chunk_of = list[int]()
    for start, stop in itertools.pairwise(edges):
        chunk_of.append(len(bounds) - 1 if stop > start else -1)
        if stop > start:
            bounds.append(stop)
    if len(bounds) == 1:
        return [0, 0], [0, *[-1] * (len(edges) - 2)]
    return bounds, chunk_of


def chunks_over_trees(
    name: str, hosts: int, nbytes: int, trees: list[Edges], chunk_bytes: int, **parameters: Any
) -> Plan:
    """Chunks take the trees in turn, each forwarded as it arrives."""
    bounds = chunk_bounds(nbytes, chunk_bytes)
    messages = (
        ((parent, child, chunk, 1) for chunk in range(len(bounds) - 1) for parent, child in trees[chunk % len(trees)])
        if trees
        else ()
    )
    return Plan.of(name, hosts, bounds, messages, chunk_bytes=chunk_bytes, **parameters)


def shards_over_relays(
    name: str, hosts: int, nbytes: int, edges: list[int], chunk_bytes: int, **parameters: Any
) -> Plan:
    """Shard i (the i-th interval of `edges`) goes to host i + 1, which serves all others; one past the hosts the root
    serves itself."""
    bounds = [0]  # (turn, shard, chunk)
    pieces = list[tuple[int, int, int]]()
    for shard, (start, stop) in enumerate(itertools.pairwise(edges)):
        ends = cut_chunks(start, stop, chunk_bytes)
        pieces += [(turn, shard, len(bounds) - 1 + turn) for turn in range(len(ends))]
        bounds += ends
    if nbytes == 0:
        bounds = [0, 0]
        pieces = [(0, 0, 0)]
    depth = [0] * len(edges)
    for turn, shard, _ in pieces:
        depth[shard] = max(depth[shard], turn + 1)
    pieces.sort(
        key=lambda piece: ((piece[0] + 0.5) / depth[piece[1]], piece[1])
    )  # large shards are dealt out as evenly as small ones
    messages: list[tuple[int, int, int, int]] = []
    # Whole shards arrive one after another. Were the first host that a relay serves the one beside it, each relay would
    # reach a host together with the one that began before it, and all would hold each other up to the end; so they
    # begin apart.
    apart = 0 if chunk_bytes else max(1, hosts // max(1, len(edges) - 1))
    for _, shard, chunk in pieces:
        relay = shard + 1
        if relay > hosts:
            messages += [(0, host, chunk, 1) for host in range(1, hosts + 1)]
            continue
        messages.append((0, relay, chunk, 1))
        served = ((relay + shard * apart + step) % hosts + 1 for step in range(hosts))
        messages += [(relay, host, chunk, 1) for host in served if host != relay]
    return Plan.of(name, hosts, bounds, messages, chunk_bytes=chunk_bytes, **parameters)

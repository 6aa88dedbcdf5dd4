"""The schemes: pure functions (hosts n, model size S, settings) -> Plan.

Root and hosts are numbered as in `plan`. `direct`, `tree`, `binomial`, `chain`, `scatter_ring` and `two_tree` are what
MPI libraries and the literature use; `sharded` is the method of patent CN113780554B, with chunks forwarded on arrival
where `chunk_bytes` says so; `stripes`, `weighted` and `postal` are our own. All are reached by name through
`make_plan`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ddrl.core.errors import PlanError
from ddrl.distribution.plan import Plan
from ddrl.distribution.shards import cut_by_weight, cut_chunks, cut_evenly
from ddrl.distribution.trees import Edges, binomial_tree, earliest_tree, level_tree, striped_trees


def direct(hosts: int, nbytes: int, *, chunk_bytes: int = 0) -> Plan:
    """The root sends the whole model to each host in turn."""
    bounds = _bounds(nbytes, chunk_bytes)
    chunks = len(bounds) - 1
    return Plan.of(
        "direct",
        hosts,
        bounds,
        ((0, host, chunk, 1) for host in range(1, hosts + 1) for chunk in range(chunks)),
        chunk_bytes=chunk_bytes,
    )


def tree(hosts: int, nbytes: int, *, fanout: int = 2, depth: int = 2) -> Plan:
    """Whole models, stored and then forwarded, over `depth` levels of fan-out `fanout` (depth 0: as many levels as it
    takes)."""
    if fanout < 1 or depth < 0:
        raise PlanError(f"a tree needs a fan-out of at least 1 (not {fanout}) and a depth of at least 0 (not {depth})")
    return _whole("tree", hosts, nbytes, level_tree(hosts, fanout, depth), fanout=fanout, depth=depth)


def binomial(hosts: int, nbytes: int) -> Plan:
    """Whole models; the number of hosts that hold it doubles each round."""
    return _whole("binomial", hosts, nbytes, binomial_tree(hosts))


def chain(hosts: int, nbytes: int, *, chunk_bytes: int = 1 << 16) -> Plan:
    """Host i sends each chunk on to host i + 1 as it arrives."""
    bounds = _bounds(nbytes, chunk_bytes)
    return Plan.of(
        "chain",
        hosts,
        bounds,
        ((host, host + 1, chunk, 1) for chunk in range(len(bounds) - 1) for host in range(hosts)),
        chunk_bytes=chunk_bytes,
    )


def scatter_ring(hosts: int, nbytes: int) -> Plan:
    """Scatter over a binomial tree, then ring allgather (van de Geijn); blocks that the scatter left behind are not
    sent again."""
    size = hosts + 1
    bounds, blocks = _merge(cut_evenly(nbytes, size))
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
            chunk, target = blocks[(host - turn) % size], (host + 1) % size
            if chunk >= 0 and target and chunk not in held[target]:
                send(host, target, [chunk])
    return Plan.of("scatter_ring", hosts, bounds, messages)


def two_tree(hosts: int, nbytes: int, *, chunk_bytes: int = 1 << 16) -> Plan:
    """Two binary trees, each over all hosts, a host inner in at most one; even chunks take one, odd chunks the
    other."""
    return _striped("two_tree", hosts, nbytes, striped_trees(hosts, 2), chunk_bytes)


def sharded(hosts: int, nbytes: int, *, relays: int | None = None, chunk_bytes: int = 0) -> Plan:
    """Shard i goes to relay i, which forwards it to all other hosts. `relays` is m, 1 <= m <= n (None: every host
    relays).

    chunk_bytes = 0 forwards whole shards, as the source does; else each chunk of a shard is forwarded as it arrives,
    and the root deals the chunks out in turn so that all relays begin early."""
    if relays is None:
        return _shards("sharded", hosts, nbytes, cut_evenly(nbytes, max(1, hosts)), chunk_bytes)
    if relays < 1:
        raise PlanError(
            f"sharded: a model cannot go through {relays} relays: set cluster.shards to at least 1, or to 0 for the "
            "planner's choice"
        )
    if relays > hosts:
        raise PlanError(f"sharded: {relays} relays need as many hosts, but there are {hosts}: lower cluster.shards")
    return _shards("sharded", hosts, nbytes, cut_evenly(nbytes, relays), chunk_bytes, relays=relays)


def weighted(hosts: int, nbytes: int, *, up: Sequence[float], chunk_bytes: int = 1 << 14) -> Plan:
    """Sharded with a relay on every host and shards as large as each link can carry: `up` [hosts + 1], any unit, the
    root's first.

    Where the root can send more than one copy's worth, it sends the rest to all hosts itself; in the limit of small
    chunks this reaches the bound nS / (B_root + sum B_up) of unequal links (Mundinger, Weber and Weiss 2008)."""
    if len(up) != hosts + 1 or min(up) < 0 or sum(up) <= 0:
        raise PlanError(f"weighted: the upward rates of all {hosts + 1} hosts are needed, at least 0, not {list(up)}")
    if hosts == 0 or nbytes == 0:
        return _shards("weighted", hosts, nbytes, cut_evenly(nbytes, max(1, hosts)), chunk_bytes, up=list(up))
    total, others = float(sum(up)), float(sum(up[1:]))
    rate = min(float(up[0]), total / hosts)  # at which a model can leave the root once, and reach all
    shares = [rate * value / others if others else 0.0 for value in up[1:]]
    relayed = [min(share, value / max(1, hosts - 1)) for share, value in zip(shares, up[1:], strict=True)]
    itself = max(0.0, rate - sum(relayed))  # the root serves this part to everybody
    if itself < 1e-6 * rate:
        itself = 0.0
    bounds = cut_by_weight(nbytes, [*relayed, itself])
    return _shards("weighted", hosts, nbytes, bounds, chunk_bytes, up=list(up))


def stripes(
    hosts: int, nbytes: int, *, fanout: int = 8, chunk_bytes: int = 1 << 14, budgets: Sequence[float] | None = None
) -> Plan:
    """`fanout` trees over all hosts, each host inner in one of them and serving `fanout` others there; chunks take the
    trees in turn.

    Every host sends and receives about S, as with shards on every host, but a chunk passes through log_fanout(n) hosts
    and a host speaks to about 2 fanout others instead of n: the last chunk is there after about depth * fanout chunk
    times instead of n."""
    fanout = max(1, min(fanout, hosts))
    trees = striped_trees(hosts, fanout, budgets) if hosts else []
    extra: dict[str, Any] = {} if budgets is None else {"budgets": list(budgets)}
    return _striped("stripes", hosts, nbytes, trees, chunk_bytes, fanout=fanout, **extra)


def postal(
    hosts: int, nbytes: int, *, up: Sequence[float], down: Sequence[float], message_seconds: float, latency: float
) -> Plan:
    """Whole models over the tree that grows fastest: whoever can deliver first serves the next host. For small models.

    `up`, `down` [hosts + 1] in bytes/s.
    """
    edges = earliest_tree(
        hosts, [nbytes / rate for rate in up], [nbytes / rate for rate in down], message_seconds, latency
    )
    return _whole(
        "postal", hosts, nbytes, edges, up=list(up), down=list(down), message_seconds=message_seconds, latency=latency
    )


PRESETS = {100: 10, 298: 30}  # hosts -> m that the source used


SCHEMES: dict[str, Callable[..., Plan]] = {
    scheme.__name__: scheme
    for scheme in (direct, tree, binomial, chain, scatter_ring, two_tree, sharded, weighted, stripes, postal)
}


def make_plan(scheme: str, hosts: int, nbytes: int, **parameters: Any) -> Plan:
    """The plan of a scheme by name; raises PlanError for an unknown name or settings it does not have."""
    if scheme not in SCHEMES:
        raise PlanError(f"cluster.scheme '{scheme}' is not known: use auto, {', '.join(SCHEMES)}")
    if hosts < 0:
        raise PlanError(f"a plan cannot have {hosts} hosts")
    try:
        inspect.signature(SCHEMES[scheme]).bind(hosts, nbytes, **parameters)
    except TypeError as error:
        raise PlanError(f"cluster.scheme '{scheme}': {error}") from None
    return SCHEMES[scheme](hosts, nbytes, **parameters)


def _bounds(nbytes: int, chunk_bytes: int) -> list[int]:
    """Chunk boundaries of an uncut model; an empty model is one empty chunk, so that its header still travels."""
    return [0, *cut_chunks(0, nbytes, chunk_bytes)] if nbytes else [0, 0]


def _whole(name: str, hosts: int, nbytes: int, edges: Edges, **parameters: Any) -> Plan:
    return Plan.of(name, hosts, _bounds(nbytes, 0), ((parent, child, 0, 1) for parent, child in edges), **parameters)


def _merge(edges: list[int]) -> tuple[list[int], list[int]]:
    """Chunk boundaries without the empty shards, and the chunk of each shard (-1: empty)."""
    bounds, chunk_of = [0], list[int]()
    for start, stop in itertools.pairwise(edges):
        chunk_of.append(len(bounds) - 1 if stop > start else -1)
        if stop > start:
            bounds.append(stop)
    if len(bounds) == 1:
        return [0, 0], [0, *[-1] * (len(edges) - 2)]
    return bounds, chunk_of


def _striped(name: str, hosts: int, nbytes: int, trees: list[Edges], chunk_bytes: int, **parameters: Any) -> Plan:
    bounds = _bounds(nbytes, chunk_bytes)
    messages = (
        ((parent, child, chunk, 1) for chunk in range(len(bounds) - 1) for parent, child in trees[chunk % len(trees)])
        if trees
        else ()
    )
    return Plan.of(name, hosts, bounds, messages, chunk_bytes=chunk_bytes, **parameters)


def _shards(name: str, hosts: int, nbytes: int, edges: list[int], chunk_bytes: int, **parameters: Any) -> Plan:
    """Shard i (the i-th interval of `edges`) goes to host i + 1, which serves all others; one past the hosts the root
    serves itself."""
    bounds, pieces = [0], list[tuple[int, int, int]]()  # (turn, shard, chunk)
    for shard, (start, stop) in enumerate(itertools.pairwise(edges)):
        ends = cut_chunks(start, stop, chunk_bytes)
        pieces += [(turn, shard, len(bounds) - 1 + turn) for turn in range(len(ends))]
        bounds += ends
    if nbytes == 0:
        bounds, pieces = [0, 0], [(0, 0, 0)]
    depth = [0] * len(edges)
    for turn, shard, _ in pieces:
        depth[shard] = max(depth[shard], turn + 1)
    pieces.sort(
        key=lambda piece: ((piece[0] + 0.5) / depth[piece[1]], piece[1])
    )  # large shards are dealt out as evenly as small ones
    messages: list[tuple[int, int, int, int]] = []
    # Whole shards arrive one after another. Were the first host that a relay serves the one beside it, each relay would
    # come to a host together with the one that began before it, and all would hold each other up to the end; so they
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

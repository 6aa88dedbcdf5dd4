"""Trees over hosts that the schemes are made of: who sends on to whom.

Pure functions. A tree is a list of (parent, child) in the order in which edges should be served; host 0 is the root,
every host 1..n is the child of exactly one edge."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence

Edges = list[tuple[int, int]]


def binomial_tree(hosts: int) -> Edges:
    """Every host that holds the model sends it to one that lacks it, so their number doubles each round."""
    edges: Edges = []
    step = 1
    while step <= hosts:
        edges += [(holder, holder + step) for holder in range(step) if holder + step <= hosts]
        step *= 2
    return edges


def level_tree(hosts: int, fanout: int, depth: int) -> Edges:
    """Levels 1 .. depth - 1 have fanout ** level hosts each, and the last level takes the rest, spread evenly over the
    level above it.

    Depth 0: as many levels as a fan-out of `fanout` needs.
    """
    levels: list[list[int]] = [[0]]
    placed = 0
    while placed < hosts:
        size = fanout ** len(levels)
        last = depth > 0 and len(levels) == depth
        size = hosts - placed if last else min(size, hosts - placed)
        levels.append(list(range(placed + 1, placed + 1 + size)))
        placed += size
    edges: Edges = []
    for parents, children in itertools.pairwise(levels):
        edges += [(parents[index % len(parents)], child) for index, child in enumerate(children)]
    return edges


def striped_trees(hosts: int, stripes: int, budgets: Sequence[float] | None = None) -> list[Edges]:
    """One tree a stripe, each over all hosts, such that a host sends on in as few stripes as possible (SplitStream,
    Castro et al. 2003).

    With equal hosts each sends on in one stripe, to `stripes` others, so all carry the same load and every tree has a
    depth of about log_stripes(hosts); 2 stripes are the two trees of Sanders, Speck and Traeff (2009), and stripes =
    hosts is the sharded scheme with a relay on each host. `budgets` [hosts] says how many children each host may have
    over all stripes (default: `stripes` each); where they do not suffice, the root serves the rest."""
    left = [float(stripes)] * (hosts + 1) if budgets is None else [0.0, *budgets]
    need = [float(hosts - 1)] * stripes
    shares: list[dict[int, int]] = [{} for _ in range(stripes)]
    order = sorted(range(1, hosts + 1), key=lambda host: (-left[host], host))
    queue = [(-need[stripe], stripe) for stripe in range(stripes)]
    heapq.heapify(queue)
    for host in order:
        while left[host] >= 1 and queue and need[queue[0][1]] > 0:
            _, stripe = heapq.heappop(queue)
            take = int(min(left[host], need[stripe]))
            if host not in shares[stripe]:
                shares[stripe][host] = 0
            shares[stripe][host] += take
            left[host] -= take
            need[stripe] -= take
            if need[stripe] >= 1:
                heapq.heappush(queue, (-need[stripe], stripe))
    return [_grow(hosts, share) for share in shares]


def _grow(hosts: int, share: dict[int, int]) -> Edges:
    """Breadth first: hosts with many children stand nearest to the root, leaves are dealt out evenly."""
    inner = deque(sorted(share, key=lambda host: (-share[host], host)))
    leaves = deque(host for host in range(1, hosts + 1) if host not in share)
    edges: Edges = []
    if not inner:
        return [(0, leaf) for leaf in leaves]
    top = inner.popleft()
    edges.append((0, top))
    open_hosts = deque([(top, share[top])])
    while inner or leaves:
        if not open_hosts:  # budgets are used up: the root serves the rest itself
            child = inner.popleft() if inner else leaves.popleft()
            edges.append((0, child))
            if share.get(child):
                open_hosts.append((child, share[child]))
            continue
        parent, room = open_hosts.popleft()
        child = inner.popleft() if inner else leaves.popleft()
        edges.append((parent, child))
        if room > 1:
            open_hosts.append((parent, room - 1))
        if share.get(child):
            open_hosts.append((child, share[child]))
    return edges


def earliest_tree(
    hosts: int, send_seconds: Sequence[float], receive_seconds: Sequence[float], message_seconds: float, latency: float
) -> Edges:
    """Greedy broadcast of one whole message in the postal model (Bar-Noy and Kipnis 1992), hosts unequal.

    Whoever can deliver first serves the next host, and fast senders are served before slow ones. `send_seconds` and
    `receive_seconds` [hosts + 1] are what the message takes on each host's link."""
    waiting = deque(sorted(range(1, hosts + 1), key=lambda host: (send_seconds[host], host)))
    free = [(0.0, 0)]  # when a holder can begin its next send
    edges: Edges = []
    while waiting:
        begin, holder = heapq.heappop(free)
        child = waiting.popleft()
        edges.append((holder, child))
        wire = max(send_seconds[holder], receive_seconds[child])
        heapq.heappush(free, (begin + message_seconds + send_seconds[holder], holder))
        heapq.heappush(free, (begin + message_seconds + latency + wire, child))
    return edges

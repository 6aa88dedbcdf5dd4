"""Closed-form time of each scheme, and the bound none can beat.

Symbols: n hosts beside the root, S bytes, B bytes/s each way of every link, a seconds a message. Equal links only;
unequal ones are the simulator's work. The formulas are the usual ones of the postal and pipelining literature; each
stands beside its function."""

from __future__ import annotations

import math
from collections.abc import Sequence


def direct_seconds(n: int, S: float, B: float, a: float) -> float:
    """n (a + S/B)."""
    return n * (a + S / B)


def tree_seconds(n: int, S: float, B: float, a: float, fanout: int, depth: int = 2) -> float:
    """f + f + ... whole models one after another; the last level's fan-out is what its parents must serve."""
    levels = 0.0
    parents = 1
    placed = 0
    for level in range(1, depth + 1):
        size = n - placed if level == depth else min(fanout**level, n - placed)
        levels += math.ceil(size / parents)
        placed = placed + size
        parents = max(1, size)
    return levels * (a + S / B)


def binomial_seconds(n: int, S: float, B: float, a: float) -> float:
    """ceil(log2(n + 1)) (a + S/B)."""
    return math.ceil(math.log2(n + 1)) * (a + S / B)


def sharded_seconds(n: int, S: float, B: float, a: float, m: int) -> float:
    """(m + n - 1) a + (1 + (n - 1)/m) S/B: whole shards to m relays, each forwarded to all others."""
    return (m + n - 1) * a + (1 + (n - 1) / m) * S / B


def best_relays(n: int, S: float, B: float, a: float) -> int:
    """m* = sqrt((n - 1) S / (a B)), at least 1 and at most n."""
    if n <= 1:
        return 1
    return max(1, min(n, round(math.sqrt((n - 1) * S / (a * B)) if a > 0 else n)))


def ring_seconds(n: int, S: float, B: float, a: float) -> float:
    """(log2 p + p - 1) a + 2 (p - 1)/p S/B with p = n + 1: scatter, then ring allgather."""
    p = n + 1
    return (math.log2(p) + p - 1) * a + 2 * (p - 1) / p * S / B


def chain_seconds(n: int, S: float, B: float, a: float, chunks: int, b: float = 0.0) -> float:
    """k (a + S/(kB)) + (n - 1)(a + max(0, S/k - b)/B) with k chunks, of which an idle link lets b bytes through at
    once; (n + k - 1)(a + S/(kB)) without."""
    return chunks * (a + S / (chunks * B)) + (n - 1) * (a + max(0.0, S / chunks - b) / B)


def best_chunks(n: int, S: float, B: float, a: float) -> int:
    """k of a chain: sqrt((n - 1) S / (a B)), at least 1."""
    return max(1, round(math.sqrt(max(1, n - 1) * S / (a * B)))) if a > 0 else 1 << 20


def two_tree_seconds(n: int, S: float, B: float, a: float, chunks: int) -> float:
    """(2 log2 n + 2k)(a + S/(2kB)) with k chunks of S/(2k) in each tree (Sanders, Speck and Traeff 2009)."""
    return (2 * math.log2(max(2, n)) + 2 * chunks) * (a + S / (2 * chunks * B))


def best_two_tree_chunks(n: int, S: float, B: float, a: float) -> int:
    """k of the two trees: sqrt(log2 n S / (2 a B)), at least 1."""
    return max(1, round(math.sqrt(math.log2(max(2, n)) * S / (2 * a * B)))) if a > 0 else 1 << 20


def stripes_seconds(n: int, S: float, B: float, a: float, fanout: int, chunks: int) -> float:
    """(K + depth f)(a + S/(KB)): K chunks leave the root one by one, and the last passes `depth` hosts that serve f
    others each."""
    depth = max(1, math.ceil(math.log(max(2, n * (fanout - 1) / fanout + 1), fanout))) if fanout > 1 else n
    return (chunks + (depth - 1) * fanout + 1) * (a + S / (chunks * B))


def pipelined_shards_seconds(n: int, S: float, B: float, a: float, chunks: int, m: int | None = None) -> float:
    """(K max(1, (n - 1)/m) + n - 1)(a + S/(KB)): m relays (None: one on every host), K chunks forwarded as they arrive;
    tends to S/B max(1, (n - 1)/m)."""
    return (chunks * max(1.0, (n - 1) / (m or max(1, n))) + n - 1) * (a + S / (chunks * B))


def bound_seconds(n: int, S: float, B: float, a: float = 0.0) -> float:
    """max(S/B_root, S/B_down, n S / (B_root + sum B_up)) + a ceil(log2(n + 1)) for equal links."""
    return bound_unequal([B] * (n + 1), [B] * (n + 1), S, a)


def bound_unequal(up: Sequence[float], down: Sequence[float], S: float, a: float = 0.0) -> float:
    """The same for `up`, `down` [n + 1] in bytes/s, the root first."""
    n = len(up) - 1
    if n < 1:
        return 0.0
    return max(S / up[0], S / min(down[1:]), n * S / sum(up)) + a * math.ceil(math.log2(n + 1))


def efficiency(bound: float, measured: float) -> float:
    """bound / measured: 1 is as fast as the links allow."""
    return bound / measured if measured > 0 else math.nan

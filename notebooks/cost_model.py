"""Closed-form times of schemes that the library's planner does not rank: for comparison alone.

Symbols as in `ddrl.distribution.plan`: n hosts beside the root, S bytes, B bytes/s each way of every link, a
seconds a message. The formulas are the usual ones of the postal and pipelining literature.
"""

from __future__ import annotations

import math


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
        placed += size
        parents = max(1, size)
    return levels * (a + S / B)


def ring_seconds(n: int, S: float, B: float, a: float) -> float:
    """(log2 p + p - 1) a + 2 (p - 1)/p S/B with p = n + 1: scatter, then ring allgather."""
    p = n + 1
    return (math.log2(p) + p - 1) * a + 2 * (p - 1) / p * S / B


def best_chunks(n: int, S: float, B: float, a: float) -> int:
    """k of a chain: sqrt((n - 1) S / (a B)), at least 1."""
    return max(1, round(math.sqrt(max(1, n - 1) * S / (a * B)))) if a > 0 else 1 << 20


def two_tree_seconds(n: int, S: float, B: float, a: float, chunks: int) -> float:
    """(2 log2 n + 2k)(a + S/(2kB)) with k chunks of S/(2k) in each tree (Sanders, Speck and Traeff 2009)."""
    return (2 * math.log2(max(2, n)) + 2 * chunks) * (a + S / (2 * chunks * B))


def best_two_tree_chunks(n: int, S: float, B: float, a: float) -> int:
    """k of the two trees: sqrt(log2 n S / (2 a B)), at least 1."""
    return max(1, round(math.sqrt(math.log2(max(2, n)) * S / (2 * a * B)))) if a > 0 else 1 << 20

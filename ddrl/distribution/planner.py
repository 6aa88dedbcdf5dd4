"""Choosing a plan: from the settings, or, with cluster.scheme = "auto", from the links.

Pure: measured links go in (`links`), a scheme by name with its settings comes out, so that every relay can build the same plan for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddrl.core.config import ClusterConfig
from ddrl.core.errors import ConfigError
from ddrl.distribution.schemes import SCHEMES

WHOLE_BELOW = 1 << 15  # bytes; a smaller model travels in one piece


@dataclass(frozen=True)
class Choice:
    """A scheme by name, with its settings; `seconds` is the time that the planner expects to the last host (0: not predicted)."""

    scheme: str
    parameters: dict[str, Any]
    seconds: float = 0.0


def choose(config: ClusterConfig, hosts: int, nbytes: int) -> Choice:
    """The scheme that the settings ask for."""
    scheme, chunk = config.scheme, config.chunk_bytes
    if scheme == "auto":
        if nbytes <= WHOLE_BELOW:
            return Choice("binomial", {})
        return Choice("stripes", {"fanout": min(8, max(1, hosts)), "chunk_bytes": chunk or max(1 << 13, min(1 << 18, nbytes // 128))})
    if scheme not in SCHEMES:
        raise ConfigError(f"cluster.scheme ({scheme!r}) must be one of auto, {', '.join(SCHEMES)}")
    parameters: dict[str, Any] = {}
    if scheme == "sharded":
        if config.shards > hosts:
            raise ConfigError(f"cluster.shards ({config.shards}) exceeds the {hosts} relays beside the root: lower it, or start more hosts")
        parameters["relays"] = config.shards
    if scheme in ("weighted", "postal"):
        parameters["up"] = [1.0] * (hosts + 1)
    if scheme == "postal":
        parameters |= {"down": [1.0] * (hosts + 1), "message_seconds": 0.0, "latency": 0.0}
    if chunk and scheme in ("direct", "chain", "two_tree", "sharded", "weighted", "stripes"):
        parameters["chunk_bytes"] = chunk
    return Choice(scheme, parameters)

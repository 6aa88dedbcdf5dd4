"""The method of patent CN113780554B: shard i goes to relay i, which serves all other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddrl.core.config import setting
from ddrl.core.errors import ConfigError, PlanError
from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import Plan, cut_evenly
from ddrl.distribution.plans.building import shards_over_relays
from ddrl.distribution.plans.scheme import Scheme, Situation, preset_relays

MAX_CONNECTIONS = 64 * 64  # relays times hosts of a proposal: each pair is a connection


class Sharded(Scheme):
    """Whole shards as in the source, or chunks that are forwarded as they arrive."""

    name = "sharded"
    takes_shards = takes_chunks = True

    @staticmethod
    def plan(hosts: int, nbytes: int, *, relays: int | None = None, chunk_bytes: int = 0) -> Plan:
        """Shard i goes to relay i, which forwards it to all other hosts. `relays` is m, 1 <= m <= n (None: every host
        relays).

        chunk_bytes = 0 forwards whole shards, as the source does; else each chunk of a shard is forwarded as it
        arrives, and the root deals the chunks out in turn so that all relays begin early."""
        if relays is None:
            return shards_over_relays("sharded", hosts, nbytes, cut_evenly(nbytes, max(1, hosts)), chunk_bytes)
        if relays < 1:
            raise PlanError(
                f"sharded: a model cannot go through {relays} relays: set cluster.shards to at least 1, or to 0 for a "
                "relay on every host"
            )
        if relays > hosts:
            raise PlanError(f"sharded: {relays} relays need as many hosts, but there are {hosts}: lower cluster.shards")
        return shards_over_relays("sharded", hosts, nbytes, cut_evenly(nbytes, relays), chunk_bytes, relays=relays)

    @dataclass(frozen=True)
    class Settings:
        """[cluster.sharded]."""

        relays: str = setting(
            "all",
            "",
            "Where cluster.shards is 0: a relay on every host, or the source's preset, one for each 10 hosts (m = 10 "
            "at 100 hosts, 30 at 298).",
            choices=("all", "preset"),
        )

    @classmethod
    def parameters(cls, settings: Settings, situation: Situation) -> dict[str, Any]:
        """See Scheme."""
        parameters = super().parameters(settings, situation)
        situation.check_shards()
        if situation.shards and settings.relays == "preset":
            raise ConfigError(
                f"cluster.shards ({situation.shards}) and cluster.sharded.relays = preset both say how many relays get "
                "a shard: set one of them"
            )
        if situation.shards or settings.relays == "preset":
            parameters["relays"] = situation.shards or preset_relays(situation.hosts)
        return parameters

    @classmethod
    def proposals(cls, situation: Situation) -> Iterator[tuple[dict[str, Any], float]]:
        """See Scheme. Every host, half of them, or the m that is best for whole shards, which is less than n where
        messages are dear."""
        hosts = situation.hosts
        nbytes = situation.nbytes
        rate = situation.rate
        a = situation.message_seconds
        counts = (
            {situation.shards}
            if situation.shards
            else {hosts, (hosts + 1) // 2, costs.best_relays(hosts, nbytes, rate, a)}
        )
        for relays in sorted(counts):
            if relays > hosts or (relays * hosts > MAX_CONNECTIONS and not situation.shards):
                continue
            count = {"relays": relays} if situation.shards or relays < hosts else {}
            if not situation.chunk_bytes:
                yield count, situation.floor + costs.sharded_seconds(hosts, nbytes, rate, a, relays)
            for size in situation.chunk_sizes:
                chunks = max(situation.chunks(size), min(relays, nbytes // 64 or 1))
                seconds = costs.pipelined_shards_seconds(hosts, nbytes, rate, a, chunks, relays)
                yield {**count, "chunk_bytes": size}, situation.floor + seconds

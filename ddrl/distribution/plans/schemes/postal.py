"""Whole models over the tree that grows fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import Plan
from ddrl.distribution.plans.building import whole_models
from ddrl.distribution.plans.scheme import Scheme, Situation
from ddrl.distribution.plans.trees import earliest_tree


class Postal(Scheme):
    """For small models: all of the time is messages and latency (Bar-Noy and Kipnis 1992)."""

    name = "postal"
    uses_links = True

    @staticmethod
    def plan(
        hosts: int, nbytes: int, *, up: Sequence[float], down: Sequence[float], message_seconds: float, latency: float
    ) -> Plan:
        """Whole models over the tree that grows fastest: the host that can deliver first serves the next one.

        `up`, `down` [hosts + 1] in bytes/s.
        """
        edges = earliest_tree(
            hosts, [nbytes / rate for rate in up], [nbytes / rate for rate in down], message_seconds, latency
        )
        return whole_models(
            "postal",
            hosts,
            nbytes,
            edges,
            up=list(up),
            down=list(down),
            message_seconds=message_seconds,
            latency=latency,
        )

    @classmethod
    def parameters(cls, settings: None, situation: Situation) -> dict[str, Any]:
        """See Scheme."""
        network = situation.network
        return {
            "up": list(network.up),
            "down": list(network.down),
            "message_seconds": network.message_seconds + network.send_cpu + network.receive_cpu,
            "latency": network.latency,
        }

    @classmethod
    def proposals(cls, situation: Situation) -> Iterator[tuple[dict[str, Any], float]]:
        """See Scheme."""
        a = situation.message_seconds + situation.network.latency
        seconds = 0.99 * costs.binomial_seconds(situation.hosts, situation.nbytes, situation.rate, a)
        yield cls.parameters(None, situation), situation.floor + seconds

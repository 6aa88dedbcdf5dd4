"""Whole models; the number of holders doubles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import Plan
from ddrl.distribution.plans.building import whole_models
from ddrl.distribution.plans.scheme import Scheme, Situation
from ddrl.distribution.plans.trees import binomial_tree


class Binomial(Scheme):
    """What MPI libraries use for small messages."""

    name = "binomial"

    @staticmethod
    def plan(hosts: int, nbytes: int) -> Plan:
        """Whole models; the number of hosts that hold it doubles each round."""
        return whole_models("binomial", hosts, nbytes, binomial_tree(hosts))

    @classmethod
    def proposals(cls, situation: Situation) -> Iterator[tuple[dict[str, Any], float]]:
        """See Scheme."""
        a = situation.message_seconds + situation.network.latency
        yield {}, situation.floor + costs.binomial_seconds(situation.hosts, situation.nbytes, situation.rate, a)

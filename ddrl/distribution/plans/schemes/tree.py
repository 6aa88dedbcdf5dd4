"""Whole models down a tree of a given fan-out and depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddrl.core.config import setting
from ddrl.core.errors import PlanError
from ddrl.distribution.plan import Plan
from ddrl.distribution.plans.building import whole_models
from ddrl.distribution.plans.scheme import Scheme, Situation
from ddrl.distribution.plans.trees import level_tree


class Tree(Scheme):
    """Store and forward; what the source compares with."""

    name = "tree"

    @staticmethod
    def plan(hosts: int, nbytes: int, *, fanout: int = 2, depth: int = 2) -> Plan:
        """Whole models, stored and then forwarded, over `depth` levels of fan-out `fanout` (depth 0: as many levels
        as it takes)."""
        if fanout < 1 or depth < 0:
            raise PlanError(
                f"a tree needs a fan-out of at least 1 (not {fanout}) and a depth of at least 0 (not {depth})"
            )
        return whole_models("tree", hosts, nbytes, level_tree(hosts, fanout, depth), fanout=fanout, depth=depth)

    @dataclass(frozen=True)
    class Settings:
        """[cluster.tree]."""

        fanout: int = setting(2, "hosts", "Hosts that each inner host sends to.", ge=1)
        depth: int = setting(
            2, "levels", "Levels of the tree, the last takes all that remain; 0: as many as it takes.", ge=0
        )

    @classmethod
    def parameters(cls, settings: Settings, situation: Situation) -> dict[str, Any]:
        """See Scheme."""
        return {"fanout": settings.fanout, "depth": settings.depth}

"""The best of all schemes for the links that the relays measured."""

from __future__ import annotations

from typing import Any

from ddrl.distribution.plans.planner import choose_best
from ddrl.distribution.plans.scheme import Choice, Scheme, Situation

PLANNING_SECONDS = 3.0  # after which the ranking of proposals ends


class Auto(Scheme):
    """Makes no plans of its own; cluster.shards narrows it to schemes with shards."""

    name = "auto"
    takes_shards = takes_chunks = uses_links = True

    @classmethod
    def choose(cls, settings: None, situation: Situation) -> Choice:
        """See Scheme."""
        return choose_best(situation, budget_seconds=PLANNING_SECONDS)

    @classmethod
    def check(cls, settings: Any, situation: Situation) -> None:
        """See Scheme."""
        situation.check_shards()

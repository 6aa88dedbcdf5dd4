"""What is sent beside a parameter vector: the values in a mailbox's slot, by name.

A slot holds up to eight float64 values. A `VersionStamp` goes from the trainer to rollouts with each version; an
`Evaluation` goes back from the evaluator with the version it judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class VersionStamp(NamedTuple):
    """What rollouts and evaluators know of a version beside its parameters."""

    env_steps: float  # of all rollouts together, when it was published
    epsilon: float  # exploration of all rollouts: a chooser's schedule, or what was set live
    updates: float  # that made it

    @classmethod
    def of(cls, values: Sequence[float]) -> VersionStamp:
        """Read a slot's values."""
        return cls(*values[:3])


class Returns(NamedTuple):
    """Raw returns of some greedy episodes."""

    mean: float
    std: float
    episodes: int

    @classmethod
    def read(cls, mean: float, std: float, episodes: float) -> Returns:
        """The same from numbers of any kind."""
        return cls(float(mean), float(std), int(episodes))


@dataclass(frozen=True)
class Evaluation:
    """Greedy episodes played with one version, and further ones that confirm it where run.target_return was reached."""

    policy_version: int
    env_steps: int
    played: Returns
    confirmed: Returns | None = None

    @property
    def best(self) -> Returns:
        """The most reliable returns of this version: its confirmation where there was one."""
        return self.confirmed or self.played

    def values(self) -> tuple[float, ...]:
        """As the values of a mailbox's slot."""
        return (float(self.env_steps), *self.played, *(self.confirmed or (math.nan, math.nan, 0)))

    @classmethod
    def of(cls, policy_version: int, values: Sequence[float]) -> Evaluation:
        """Read a slot's values."""
        second = Returns.read(*values[4:7])
        return cls(policy_version, int(values[0]), Returns.read(*values[1:4]), second if second.episodes else None)

    def to_json(self) -> dict[str, Any]:
        """As the policy file and checkpoints keep it."""
        document = {"policy_version": self.policy_version, "env_steps": self.env_steps, **self.played._asdict()}
        return document if self.confirmed is None else {**document, "confirmed": self.confirmed._asdict()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Evaluation:
        """Read what `to_json` made; KeyError, TypeError or ValueError for anything else."""
        second = document.get("confirmed")
        confirmed = Returns.read(*_named(second)) if second else None
        return cls(
            int(document["policy_version"]), int(document["env_steps"]), Returns.read(*_named(document)), confirmed
        )


def _named(document: dict[str, Any]) -> tuple[Any, Any, Any]:
    return document["mean"], document["std"], document["episodes"]

"""What travels beside a parameter vector: the values in a mailbox's slot, by name.

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


@dataclass(frozen=True)
class Returns:
    """Raw returns of some greedy episodes."""

    mean: float
    std: float
    episodes: int


@dataclass(frozen=True)
class Evaluation:
    """Greedy episodes played with one version, and further ones that confirm it where run.target_return was reached."""

    policy_version: int
    env_steps: int
    played: Returns
    confirmed: Returns | None = None

    @property
    def best(self) -> Returns:
        """What is known best of this version: its confirmation where there was one."""
        return self.confirmed or self.played

    def values(self) -> tuple[float, ...]:
        """As the values of a mailbox's slot."""
        second = self.confirmed or Returns(math.nan, math.nan, 0)
        return (float(self.env_steps), *_floats(self.played), *_floats(second))

    @classmethod
    def of(cls, policy_version: int, values: Sequence[float]) -> Evaluation:
        """Read a slot's values."""
        played = _returns(values[1:4])
        second = _returns(values[4:7])
        return cls(policy_version, int(values[0]), played, second if second.episodes else None)

    def to_json(self) -> dict[str, Any]:
        """As the policy file and checkpoints keep it."""
        document = {"policy_version": self.policy_version, "env_steps": self.env_steps, **_named(self.played)}
        return document | ({"confirmed": _named(self.confirmed)} if self.confirmed else {})

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Evaluation:
        """Read what `to_json` made; KeyError, TypeError or ValueError for anything else."""
        confirmed = document.get("confirmed")
        return cls(
            int(document["policy_version"]),
            int(document["env_steps"]),
            _of_named(document),
            _of_named(confirmed) if confirmed else None,
        )


def _floats(returns: Returns) -> tuple[float, float, float]:
    return returns.mean, returns.std, float(returns.episodes)


def _returns(values: Sequence[float]) -> Returns:
    return Returns(values[0], values[1], int(values[2]))


def _named(returns: Returns) -> dict[str, Any]:
    return {"mean": returns.mean, "std": returns.std, "episodes": returns.episodes}


def _of_named(document: dict[str, Any]) -> Returns:
    return Returns(float(document["mean"]), float(document["std"]), int(document["episodes"]))

"""What a chooser is, and how one is made by name.

A chooser reads the outputs of an acting model and gives actions, with columns of its own for the rows. It draws its own
random numbers: one row of numbers for each vector step, whatever is asked, so that a seed gives one stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from ddrl.core import plugins
from ddrl.core.specs import Column, EnvSpec

PACKAGE = "ddrl.acting.choosers"
Columns = Mapping[str, NDArray[Any]]


class Chooser(Protocol):
    """Choices for N environments. Made as cls(spec, num_envs, seed, settings); raises ConfigError for an environment
    whose actions it cannot choose."""

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]  # outputs of the acting model
    settings: ClassVar[tuple[str, ...]]  # of its own, that rollout.by_rollout may set

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        """What it records beside the action."""
        ...

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None: ...

    def choose(self, outputs: Columns, observation: NDArray[Any], exploration: float) -> tuple[NDArray[Any], Columns]:
        """An action for each environment [N, *action.shape] and the columns [N, ...]; both belong to the caller."""
        ...

    def random(self, observation: NDArray[Any]) -> tuple[NDArray[Any], Columns]:
        """The same without a policy: before the first version and in the warm-up."""
        ...

    def greedy(self, outputs: Columns) -> NDArray[Any]:
        """The best actions by the outputs [N, *action.shape]; draws nothing."""
        ...


def chooser_class(name: str) -> type[Chooser]:
    """The chooser that rollout.chooser or an algorithm names; ConfigError where there is none."""
    return plugins.load("rollout.chooser", PACKAGE, name)

"""What every process must know of a learning algorithm, without torch.

Made by an algorithm's `describe(config, spec)` on rank 0 before any channel is created, and part of the topology. Lanes
and counters are made from it, rollouts act by it, and none of them loads the algorithm's module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ddrl.core.metrics import Metric
from ddrl.core.specs import Column


@dataclass(frozen=True)
class ActingInput:
    """An input of an acting model beside the observation.

    `state`: recurrent state [*shape], `initial` at an episode's start; the model's output `output` is the next one.
    `noise`: drawn from `distribution` by the policy's own generator, once a step or once an episode.
    """

    name: str
    kind: Literal["state", "noise"]
    shape: tuple[int, ...]
    dtype: str = "float32"
    initial: float = 0.0
    output: str = ""
    distribution: Literal["uniform", "normal"] = "uniform"
    per: Literal["step", "episode"] = "step"


@dataclass(frozen=True)
class Experience:
    """The source of an algorithm's batches, and what one draw is."""

    source: Literal["replay", "trajectories"] = "replay"
    pick_len: int = 1  # [records] of a draw; above 1: sequences
    burn_in: int = 0  # [records] before a sequence
    n_step: int | None = None  # rewards summed before the bootstrap; None: replay.n_step
    length: int = 0  # [records] of a trajectory
    max_policy_lag: int | None = None  # [versions] older trajectories are dropped and counted; None: none are


@dataclass(frozen=True)
class Declaration:
    """What an algorithm needs of the processes that never load it."""

    algorithm: str
    chooser: str
    columns: tuple[Column, ...] = ()  # beside those that every row has
    figures: tuple[Metric, ...] = ()  # gauges that its updates report
    experience: Experience = field(default_factory=Experience)
    inputs: tuple[ActingInput, ...] = ()  # of the acting model, beside the observation
    settings: dict[str, Any] = field(default_factory=dict[str, Any])  # of the chooser; opaque to everybody else
    unread: tuple[str, ...] = ()  # settings that are not at their defaults though nothing reads them; by the library

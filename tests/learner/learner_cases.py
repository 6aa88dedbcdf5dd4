"""Batches and environments' specs that the learner's tests share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Gradient, Learner
from ddrl.learner.algorithms.dqn import DQN

VECTOR = EnvSpec("Vector-v0", ArraySpec((4,), "float32"), 3)
IMAGE = EnvSpec("Image-v0", ArraySpec((4, 84, 84), "uint8"), 6, frame_stack=4)


class Transitions(NamedTuple):
    """The fields of replay's Transitions that the learner reads."""

    s_tm1: NDArray[Any]
    a_tm1: NDArray[np.int64]
    r_t: NDArray[np.float32]
    discount_t: NDArray[np.float32]
    s_t: NDArray[Any]
    weight: NDArray[np.float32]


def learner_of(
    config: LearnerConfig, spec: EnvSpec = VECTOR, seed: int = 1, module: Any = None, algorithm: Any = DQN
) -> Learner:
    """A learner by the settings; `module` in place of the network that they name."""
    whole = Config(run=RunConfig(seed=seed), learner=config)
    if module is None:
        return Learner.of(whole, spec)
    made = algorithm(whole, spec)
    made.network = module
    return Learner(made, whole, spec)


def values(learner: Learner, observation: NDArray[Any]) -> NDArray[np.float32]:
    """q [B, num_actions] as the learner acts."""
    return learner.inspect(observation)["q"]


def gradients_of(learner: Learner, gradient: Gradient) -> list[torch.Tensor]:
    """A copy of the gradient by each parameter that learns, in their order."""
    part = learner.parts[gradient.part]
    whole = torch.zeros_like(part.online.vector)
    part.learned(whole).copy_(gradient.vector)
    named = zip(part.online.layout.entries, part.online.split(whole), strict=True)
    names = part.online.parameters()
    return [view for entry, view in named if entry.name in names]


def random_batch(spec: EnvSpec, size: int, seed: int) -> Transitions:
    """Transitions without meaning, the same for the same seed."""
    generator = np.random.default_rng(seed)

    def states() -> NDArray[Any]:
        if spec.observation.dtype == "uint8":
            return generator.integers(0, 256, (size, *spec.observation.shape), np.uint8)
        return generator.standard_normal((size, *spec.observation.shape)).astype(spec.observation.dtype)

    return Transitions(
        states(),
        generator.integers(0, spec.num_actions, size),
        generator.standard_normal(size).astype(np.float32),
        generator.choice([0.0, 0.97], size).astype(np.float32),
        states(),
        generator.random(size).astype(np.float32),
    )

"""Batches and specs of continuous actions that the tests of TD3 and D4PG share."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner
from tests.learner.learner_cases import Transitions, gradients_of

BOX = EnvSpec(
    "Box-v0", ArraySpec((3,), "float32"), 0, ArraySpec((2,), "float32"), action_low=(-2.0, 0.0), action_high=(2.0, 1.0)
)
UNBOUNDED = EnvSpec("Open-v0", ArraySpec((3,), "float32"), 0, ArraySpec((2,), "float32"))
SEVERAL_AXES = EnvSpec(
    "Grid-v0",
    ArraySpec((2, 3), "uint8"),
    0,
    ArraySpec((2, 2), "float32"),
    action_low=(-1.0,) * 4,
    action_high=(1.0, 1.0, 3.0, 3.0),
)


def learner_of(algorithm: str, spec: EnvSpec = BOX, table: dict | None = None, **options) -> Learner:
    """A small learner; `table` is the algorithm's own."""
    options = {"hidden": [16], "loss": "mse", "max_grad_norm": 1e6, **options}
    return Learner.of(
        Config(
            run=RunConfig(seed=3),
            learner=LearnerConfig(algorithm=algorithm, **options),
            tables={f"learner.{algorithm}": table or {}},
        ),
        spec,
    )


def random_batch(spec: EnvSpec, size: int, seed: int) -> Transitions:
    """Transitions without meaning, with actions within the bounds."""
    generator = np.random.default_rng(seed)

    def states() -> np.ndarray:
        if spec.observation.dtype == "uint8":
            return generator.integers(0, 256, (size, *spec.observation.shape), np.uint8)
        return generator.standard_normal((size, *spec.observation.shape)).astype(np.float32)

    actions = generator.uniform(spec.action_low, spec.action_high, (size, spec.action.size))
    return Transitions(
        states(),
        actions.reshape(size, *spec.action.shape).astype(np.float32),
        generator.standard_normal(size).astype(np.float32),
        generator.choice([0.0, 0.97], size).astype(np.float32),
        states(),
        generator.random(size).astype(np.float32),
    )


def bandit(size: int, generator: np.random.Generator, noise: float = 0.0) -> Transitions:
    """One state of `BOX`; actions are uniform, and pay -|d|^2 +- noise, with d the distance from (0.8, 0.3) in units of
    half the bounds' distance. Episodes have one step."""
    ones = np.ones((size, 3), np.float32)
    action = generator.uniform(BOX.action_low, BOX.action_high, (size, 2)).astype(np.float32)
    pay = -np.square((action - [0.8, 0.3]) / [2.0, 0.5]).sum(1) + noise * generator.choice([-1.0, 1.0], size)
    return Transitions(
        ones, action, pay.astype(np.float32), np.zeros(size, np.float32), ones, np.ones(size, np.float32)
    )


def check_gradients(learner: Learner, batch: Transitions, part: str) -> None:
    """One random place of each vector of the part's gradient agrees with a difference of losses."""
    vectors = gradients_of(learner, learner.gradient(batch, part))
    generator = np.random.default_rng(0)
    for slope, parameter in zip(vectors, learner.parts[part].online.parameters().values(), strict=True):
        flat, place = parameter.detach().view(-1), int(generator.integers(parameter.numel()))
        losses = []
        for step in (3e-3, -6e-3):
            flat[place] += step
            losses.append(learner.gradient(batch, part).figures["loss"].item())
        flat[place] += 3e-3
        assert slope.view(-1)[place].item() == pytest.approx((losses[0] - losses[1]) / 6e-3, rel=0.05, abs=2e-3)
    assert max(float(slope.abs().max()) for slope in vectors) > 1e-2

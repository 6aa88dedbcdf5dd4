"""Scales of observations and actions follow the bounds of their spaces, hold in every network of the library, are said
at the start, and stay with a run and its policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ddrl.acting.choosers import Gaussian
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.core.config import Config, EnvConfig, LearnerConfig
from ddrl.core.errors import ConfigError
from ddrl.core.rows import row_schema
from ddrl.core.settings import config_from_toml, config_to_toml
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.envs.making import make_vector_env
from ddrl.envs.vectors import LoopVectorEnv
from ddrl.learner import Learner, describe
from ddrl.learner.actor_critic import Critics
from ddrl.learner.checks import checked_learner
from ddrl.learner.networks import CNN, FlatInputs
from ddrl.replay.sources import small_source
from tests.learner.continuous_cases import BOX, random_batch

LARGE = np.iinfo(np.int64)
UNEQUAL = replace(
    BOX,
    action=ArraySpec((2,), "float32", ranges=((0.0, 1000.0), (-1.0, 1.0))),
    action_low=(0.0, -1.0),
    action_high=(1000.0, 1.0),
)


class Observing(gymnasium.Env[Any, Any]):
    """Observes one value; its actions can be chosen."""

    def __init__(self, space: Any, value: Any, action: Any = None) -> None:
        self.observation_space = space
        self.action_space = action or spaces.Discrete(2)
        self.value = value

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self.value, {}


def make(name: str) -> Observing:
    return Observing(*CASES[name][:2])


CASES: dict[str, tuple[Any, Any, list[float], str]] = {
    "bytes": (spaces.Box(0, 255, (2,), np.uint8), np.array([0, 51], np.uint8), [0, 0.2], "uint8 from 0 to 255"),
    "flags": (spaces.Box(0, 1, (2,), np.uint8), np.array([0, 1], np.uint8), [0, 1], "uint8 from 0 to 1"),
    "few": (spaces.Box(0, 4, (2,), np.uint8), np.array([1, 4], np.uint8), [0.25, 1], "uint8 from 0 to 4"),
    "shifted": (spaces.Box(2, 6, (2,), np.int64), np.array([2, 5]), [0, 0.75], "int64 from 2 to 6"),
    "unequal": (
        spaces.Box(np.array([0, -10]), np.array([4, 10]), dtype=np.int32),
        np.array([1, 0], np.int32),
        [0.25, 0.5],
        "int32 from -10 to 10",
    ),
    "open": (
        spaces.Box(LARGE.min, LARGE.max, (2,), np.int64),
        np.array([3, -7]),
        [3, -7],
        "int64 without bounds",
    ),
    "open as a narrower dtype": (
        spaces.Box(-(2**31), 2**31 - 1, (2,), np.int64),
        np.array([3, -7]),
        [3, -7],
        "int64 without bounds",
    ),
    "open in part": (
        spaces.Box(np.array([0, -(2**31)]), np.array([4, 2**31 - 1]), dtype=np.int64),
        np.array([1, -7]),
        [0.25, -7],
        "int64 from 0 to 4) as 0 to 1, and 1 numbers without bounds as they are",
    ),
    "unsigned": (spaces.Box(0, 4, (2,), np.uint32), np.array([1, 4], np.uint32), [0.25, 1], "uint32 from 0 to 4"),
    "floats": (spaces.Box(0, 255, (2,), np.float32), np.array([1, 255], np.float32), [1, 255], ""),
    "several": (
        spaces.Dict(a=spaces.Box(0, 10, (), np.int16), b=spaces.Discrete(2), c=spaces.Box(-9, 9, (2,), np.float32)),
        {"a": np.int16(5), "b": 1, "c": np.array([9, -3], np.float32)},
        [0.5, 0, 1, 9, -3],
        "the entry a (int16 from 0 to 10) as 0 to 1",
    ),
    "tuple": (
        spaces.Tuple((spaces.Box(0, 8, (2,), np.uint8), spaces.MultiDiscrete([2, 2]))),
        (np.array([4, 8], np.uint8), np.array([0, 1])),
        [0.5, 1, 1, 0, 0, 1],
        "the entry 0 (uint8 from 0 to 8)",
    ),
}


def seen(env: Any) -> list[float]:
    """What a network's first layer is given."""
    spec = env.spec.observation
    observation = torch.from_numpy(env.reset(1))
    inputs = FlatInputs(spec)
    before = observation.clone()
    values = inputs(observation)[0]
    assert torch.equal(observation, before)
    for columns in inputs.columns():
        flat = observation.flatten(1).float()
        torch.testing.assert_close(columns.scale(flat)[0], values)
    return values.tolist()


@pytest.mark.parametrize("name", CASES)
def test_integers_are_scaled_by_their_bounds_and_what_is_done_is_said(name: str) -> None:
    _, _, expected, words = CASES[name]
    env = make_vector_env(EnvConfig(id=f"{__name__}:make", kwargs={"name": name}, num_envs=1))
    assert seen(env) == pytest.approx(expected)
    assert words in " ".join(env.spec.notes)
    assert bool(words) == bool(env.spec.notes)


@pytest.mark.parametrize(
    ("name", "how", "expected"),
    [
        ("bytes", "none", [0, 51]),
        ("few", "none", [1, 4]),
        ("several", "none", [5, 0, 1, 9, -3]),
        ("bytes", "bytes", [0, 0.2]),
        ("flags", "bytes", [0, 1 / 255]),
        ("shifted", "bytes", [2, 5]),
    ],
)
def test_scaling_can_be_left_out_or_kept_as_it_was(name: str, how: str, expected: list[float]) -> None:
    env = make_vector_env(EnvConfig(id=f"{__name__}:make", kwargs={"name": name}, num_envs=1, scale=how))
    assert seen(env) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "dtype"), [(0, 10, np.int32), (5, 9, np.int64), (0, 3, np.uint8), (0, 255, np.uint8)]
)
def test_a_convolution_sees_the_scaled_picture_and_leaves_the_batch_as_it_is(low: int, high: int, dtype: Any) -> None:
    generator = np.random.default_rng(0)
    picture = generator.integers(low, high + 1, (1, 40, 40)).astype(dtype)
    env = LoopVectorEnv("picture", [Observing(spaces.Box(low, high, (1, 40, 40), dtype), picture)])
    torch.manual_seed(1)
    network = CNN(env.spec.observation, 2, "mean")
    torch.manual_seed(1)
    plain = CNN(ArraySpec((1, 40, 40), "float32"), 2, "mean")
    given = torch.from_numpy(env.reset(1))
    before = given.clone()
    expected = plain(torch.from_numpy((picture[None].astype(np.float32) - low) / (high - low)))
    torch.testing.assert_close(network(given), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(given, before)


def test_ranges_for_each_pixel_of_an_image_hold_too() -> None:
    high = np.full((40, 40, 1), 10)
    high[:20] = 20
    space = spaces.Box(np.zeros((40, 40, 1), np.int64), high, dtype=np.int64)
    env = LoopVectorEnv("picture", [Observing(space, high)])
    torch.manual_seed(1)
    network = CNN(env.spec.observation, 2, "mean")
    torch.manual_seed(1)
    plain = CNN(ArraySpec((40, 40, 1), "float32"), 2, "mean")
    torch.testing.assert_close(network(torch.from_numpy(env.reset(1))), plain(torch.ones(1, 40, 40, 1)))


# ---- Actions ----


def test_bounds_of_actions_become_their_ranges_unless_they_are_minus_one_to_one() -> None:
    def spec_of(low: Any, high: Any) -> EnvSpec:
        box = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
        return LoopVectorEnv("acting", [Observing(spaces.Discrete(2), 0, box)]).spec

    assert spec_of([-1, -1], [1, 1]).action.ranges == ()
    assert spec_of([0, -1], [1000, 1]).action.ranges == ((0, 1000), (-1, 1))
    assert "actions from -1 to 1000 as -1 to 1" in " ".join(spec_of([0, -1], [1000, 1]).notes)
    assert spec_of([-np.inf, -1], [np.inf, 1]).action.ranges == ()
    assert spec_of([-3e38, -1], [3e38, 1]).action_low == ()
    assert spec_of([0, -1], [1000, 1]).scaled("bytes").action.ranges == ()


def test_critics_of_any_bounds_compute_what_those_of_minus_one_to_one_do() -> None:
    even = replace(BOX, action_low=(-1.0, -1.0), action_high=(1.0, 1.0))
    batch = random_batch(even, 6, 0)
    outputs = []
    for spec in (even, UNEQUAL):
        torch.manual_seed(2)
        critics = Critics(spec, [8], count=2)
        action = torch.from_numpy(batch.a_tm1)
        if spec is UNEQUAL:
            action = 0.5 * (action + 1) * torch.tensor([1000.0, 2.0]) + torch.tensor([0.0, -1.0])
        outputs.append(critics(torch.from_numpy(batch.s_tm1), action))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("algorithm", ["td3", "d4pg"])
def test_the_kernels_gradient_through_scaled_actions_is_autograds(algorithm: str) -> None:
    config = Config(learner=LearnerConfig(algorithm=algorithm, hidden=[8], device="cpu"))
    declaration = describe(config, UNEQUAL)
    source = small_source(config, row_schema(UNEQUAL, declaration.columns), declaration.experience)
    lines: list[str] = []
    learner = checked_learner(config, UNEQUAL, source, lines.append)
    assert lines == []
    assert isinstance(learner, Learner)


def test_noise_is_in_units_of_half_the_bounds_distance() -> None:
    middle = np.tile(np.array([500, 0], np.float32), (4000, 1))
    action, _ = Gaussian(UNEQUAL, 4000, 1, {}).choose({"mean": middle}, middle, 0.1)
    assert action.std(axis=0) == pytest.approx([50, 0.1], rel=0.05)
    raw = replace(UNEQUAL, action=replace(UNEQUAL.action, ranges=()))
    action, _ = Gaussian(raw, 4000, 1, {}).choose({"mean": middle}, middle, 0.1)
    assert action.std(axis=0) == pytest.approx([0.1, 0.1], rel=0.05)


# ---- What stays ----


def test_a_run_that_began_before_the_setting_keeps_its_scales() -> None:
    text = config_to_toml(Config())
    assert config_from_toml(text, "a run").env.scale == "auto"
    older = "\n".join(line for line in text.splitlines() if not line.startswith("scale ="))
    assert config_from_toml(older, "a run").env.scale == "bytes"


def test_a_policy_acts_by_the_scales_that_it_was_saved_with(tmp_path: Path) -> None:
    config = Config(learner=LearnerConfig(algorithm="td3", hidden=[8], device="cpu"))
    learner = Learner.of(config, UNEQUAL)
    model = learner.acting_model()
    generator = np.random.default_rng(0)
    vector = generator.standard_normal(model.layout.nbytes // 4).astype(np.float32).view(np.uint8)
    save_policy(tmp_path, model, vector)
    saved = load_policy(tmp_path)
    assert saved.model.spec.action.ranges == UNEQUAL.action.ranges
    seen = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(
        ActingPolicy(saved.model).greedy(seen, saved.vector), ActingPolicy(model).greedy(seen, vector)
    )


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.scale .* must be one of auto, none, bytes"):
        Config(env=EnvConfig(scale="255"))

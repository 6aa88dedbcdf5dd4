"""learner.normalize: means and deviations of what was learned from are a part of the network, wherever that goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.errors import ConfigError
from ddrl.core.specs import EnvSpec
from ddrl.learner import Learner, describe
from ddrl.learner.own_networks import Standardize
from tests.learner.continuous_cases import BOX
from tests.learner.continuous_cases import random_batch as continuous_batch
from tests.learner.learner_cases import IMAGE, VECTOR, random_batch

OWN = "tests.learner.learner_user_networks:Plain"
CASES = [("dqn", "auto"), ("dqn", OWN), ("c51", "auto"), ("iqn", "auto"), ("td3", "auto"), ("d4pg", "auto")]


def learner_of(algorithm: str, network: str = "auto", **options: Any) -> Learner:
    learner = LearnerConfig(algorithm=algorithm, network=network, hidden=[16], device="cpu", normalize=True, **options)
    return Learner.of(Config(run=RunConfig(seed=1), learner=learner), spec_of(algorithm))


def spec_of(algorithm: str) -> EnvSpec:
    return BOX if algorithm in ("td3", "d4pg") else VECTOR


def batch_of(algorithm: str, seed: int, scale: float = 1.0, shift: float = 0.0) -> Any:
    make = continuous_batch if algorithm in ("td3", "d4pg") else random_batch
    batch = make(spec_of(algorithm), 32, seed)
    s_tm1, s_t = (state * np.float32(scale) + np.float32(shift) for state in (batch.s_tm1, batch.s_t))
    return batch._replace(s_tm1=s_tm1, s_t=s_t)


def test_merged_moments_are_those_of_all_rows_together() -> None:
    standard = Standardize(3)
    rows = torch.from_numpy(np.random.default_rng(0).normal([1e4, 0, -3], [0.1, 5, 0], (900, 3)).astype(np.float32))
    for part in rows.split([1, 299, 600]):
        standard(part)
    whole = rows.double()
    torch.testing.assert_close(standard.mean.double(), whole.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((1 / standard.factor.double())[:2], whole.std(0, correction=0)[:2], rtol=1e-4, atol=0.0)
    assert (standard.eval()(rows)[:, 2].abs() < 1e-3).all()  # a number that never changes
    before = standard.mean.clone()
    standard(rows + 5)
    assert torch.equal(standard.mean, before)


@pytest.mark.parametrize(("algorithm", "network"), CASES)
def test_scale_and_shift_of_observations_change_nothing(algorithm: str, network: str, tmp_path: Path) -> None:
    plain, moved = learner_of(algorithm, network), learner_of(algorithm, network)
    for seed in range(3):
        plain.update(batch_of(algorithm, seed))
        moved.update(batch_of(algorithm, seed, 50.0, 300.0))
    name = "mean" if algorithm in ("td3", "d4pg") else "q"
    seen = batch_of(algorithm, 9).s_tm1
    far = batch_of(algorithm, 9, 50.0, 300.0).s_tm1
    np.testing.assert_allclose(moved.inspect(far)[name], plain.inspect(seen)[name], rtol=1e-3, atol=1e-4)
    save_policy(tmp_path, moved.acting_model(), moved.parameters.numpy())
    saved = load_policy(tmp_path)
    if algorithm != "iqn":  # which draws
        given = ActingPolicy(saved.model).act(far, saved.vector)[name]
        np.testing.assert_allclose(given, moved.inspect(far)[name], rtol=1e-3, atol=1e-4)
    moved.save(tmp_path / "learner.safetensors")
    again = learner_of(algorithm, network)
    again.load(tmp_path / "learner.safetensors")
    again.check()
    np.testing.assert_array_equal(again.inspect(far)[name], moved.inspect(far)[name])


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_target_takes_means_whole_however_slowly_its_weights_follow(rate: float) -> None:
    learner = learner_of("dqn", target_period=2, target_rate=rate)
    part = learner.parts["value"]
    for seed in range(4):
        learner.update(batch_of("dqn", seed, 5.0, 30.0))
        theirs = dict(part.target_module.named_buffers())
        same = [torch.equal(buffer, theirs[name]) for name, buffer in part.module.named_buffers() if buffer.numel()]
        if seed % 2:
            assert all(same)
    weights = [
        torch.equal(*pair) for pair in zip(part.module.parameters(), part.target_module.parameters(), strict=True)
    ]
    assert all(weights) == (rate == 1.0)


def test_it_is_refused_where_means_would_not_be_kept() -> None:
    for algorithm in ("r2d2", "pqn"):
        with pytest.raises(ConfigError, match=f"{algorithm} would not keep"):
            describe(Config(learner=LearnerConfig(algorithm=algorithm, normalize=True)), VECTOR)
    with pytest.raises(ConfigError, match="2 gradient nodes would not keep"):
        describe(Config(learner=LearnerConfig(nodes=2, normalize=True)), VECTOR)
    with pytest.raises(ConfigError, match="sees pictures"):
        Learner.of(Config(learner=LearnerConfig(normalize=True)), IMAGE)

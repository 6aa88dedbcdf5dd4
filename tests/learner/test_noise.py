"""Noise as an input of the acting model: drawn by the policy, kept until the step is committed, checked at export."""

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.acting.policy import ActingPolicy
from ddrl.core.errors import NetworkError
from ddrl.core.specs import ActingInput, Declaration
from ddrl.learner.algorithm import Acting
from ddrl.learner.export import export_model
from ddrl.learner.part import FlatParameters
from tests.learner.learner_cases import VECTOR


class Noisy(nn.Module):
    """Values that carry the noise they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, observation: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(observation) + noise, noise * 1.0


def policy_of(per: str, distribution: str = "uniform", seed: int = 0) -> tuple[ActingPolicy, np.ndarray]:
    declared = ActingInput("noise", "noise", (3,), per=per, distribution=distribution)
    network = Noisy()
    acting = Acting("value", network, ("q", "seen"))
    model = export_model(acting, network, VECTOR, Declaration("noisy", "epsilon_greedy", inputs=(declared,)))
    return ActingPolicy(model, seed=seed), FlatParameters(network).numpy()


def seen(policy: ActingPolicy, vector: np.ndarray) -> np.ndarray:
    return policy.act(np.zeros((2000, 4), np.float32), vector)["seen"].copy()


@pytest.mark.parametrize(("distribution", "mean", "std"), [("uniform", 0.5, 12**-0.5), ("normal", 0.0, 1.0)])
def test_noise_of_a_step_stays_until_the_step_is_committed(distribution: str, mean: float, std: float) -> None:
    policy, vector = policy_of("step", distribution)
    first = seen(policy, vector)
    assert first.mean() == pytest.approx(mean, abs=0.05)
    assert first.std() == pytest.approx(std, abs=0.05)
    np.testing.assert_array_equal(seen(policy, vector.copy()), first)
    policy.commit()
    assert not np.isin(seen(policy, vector), first).all()


def test_noise_of_an_episode_is_drawn_anew_where_one_begins() -> None:
    policy, vector = policy_of("episode")
    first = seen(policy, vector)
    policy.commit()
    np.testing.assert_array_equal(seen(policy, vector), first)
    ended = np.arange(2000) < 500
    policy.reset(ended)
    second = seen(policy, vector)
    np.testing.assert_array_equal(second[500:], first[500:])
    assert (second[:500] != first[:500]).all()


def test_the_noise_is_the_seed_s() -> None:
    one, same, other = (seen(*policy_of("step", seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_outputs_that_are_not_all_named_are_refused() -> None:
    network = Noisy()
    declared = ActingInput("noise", "noise", (3,))
    with pytest.raises(NetworkError, match="gives 2 outputs to act with: it must give those that are named, q"):
        export_model(
            Acting("value", network, ("q",)), network, VECTOR, Declaration("", "epsilon_greedy", inputs=(declared,))
        )

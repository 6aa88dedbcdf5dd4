"""Actor and critics: bounds, shapes, bytes, and independence of the critics."""

import numpy as np
import pytest
import torch

from ddrl.core.specs import EnvSpec
from ddrl.learner.actor_critic import Actor, Critics
from ddrl.learner.networks import FlatInputs
from tests.learner.continuous_cases import BOX, SEVERAL_AXES, random_batch


@pytest.mark.parametrize("spec", [BOX, SEVERAL_AXES])
def test_actions_fill_their_bounds_and_never_leave_them(spec: EnvSpec) -> None:
    actor = Actor(spec, [8])
    low, high = (np.reshape(bound, spec.action.shape) for bound in (spec.action_low, spec.action_high))
    observation = torch.from_numpy(random_batch(spec, 5, 0).s_tm1)
    with torch.no_grad():
        assert actor(observation).shape == (5, *spec.action.shape)
        for bias, bound in ((-30.0, low), (0.0, (low + high) / 2), (30.0, high)):
            actor.head.weight.zero_()
            actor.head.bias.fill_(bias)
            np.testing.assert_allclose(actor(observation), np.broadcast_to(bound, (5, *bound.shape)), atol=1e-6)


def test_noise_is_in_units_of_half_the_bounds_distance_and_cut_off_at_the_bounds() -> None:
    actor = Actor(BOX, [8])
    with torch.no_grad():
        actor.head.weight.zero_()
        actor.head.bias.zero_()  # the centre: (0, 0.5)
        action = actor(torch.zeros(3, 3), torch.tensor([[0.5, -0.5], [0.0, 0.0], [1.5, -9.0]]))
    np.testing.assert_allclose(action, [[1.0, 0.25], [0.0, 0.5], [2.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("spec", [BOX, SEVERAL_AXES])
def test_each_critic_is_an_mlp_of_its_own(spec: EnvSpec, count: int) -> None:
    critics, batch = Critics(spec, [8, 6], count, 4), random_batch(spec, 5, 1)
    observation, action = torch.from_numpy(batch.s_tm1), torch.from_numpy(batch.a_tm1)
    inputs = np.concatenate([FlatInputs(spec.observation)(observation), batch.a_tm1.reshape(5, -1)], axis=1)
    with torch.no_grad():
        given = critics(observation, action).numpy()
        np.testing.assert_allclose(critics(observation, action, 1), given[:, :1], rtol=1e-5, atol=1e-6)
    assert given.shape == (5, count, 4)
    for place in range(count):
        x = inputs
        for layer, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = x @ weight[place].detach().numpy().T + bias[place].detach().numpy()
            x = np.maximum(x, 0) if layer < 2 else x
        np.testing.assert_allclose(given[:, place], x, rtol=1e-4, atol=1e-5)
    assert count == 1 or np.abs(given[:, 0] - given[:, 1]).min() > 0


def test_bytes_become_shares() -> None:
    spec = SEVERAL_AXES.observation
    given = FlatInputs(spec)(torch.full((2, 2, 3), 255, dtype=torch.uint8))
    torch.testing.assert_close(given, torch.ones(2, 6))

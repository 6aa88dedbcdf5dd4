"""Noisy layers and Rainbow: what noise does to a layer, where it is drawn, and how large it must be."""

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.acting.policy import ActingPolicy
from ddrl.core.errors import ConfigError
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner, describe
from ddrl.learner.networks import NoisyLinear, NoisyNetwork
from tests.learner.learner_cases import IMAGE, VECTOR, Transitions, random_batch


def rainbow(spec: EnvSpec = VECTOR, *overrides: str) -> Learner:
    small = ("learner.algorithm=c51", "learner.c51.sigma=0.5", "learner.c51.atoms=11", "learner.hidden=[16]")
    return Learner.of(load_config(overrides=[*small, *overrides]), spec)


def test_a_layer_computes_with_the_noisy_parameters_of_the_paper() -> None:
    """Equations 9 to 11 of Fortunato et al. (2018) with the matrices written out, a row at a time."""
    torch.manual_seed(0)
    layer = NoisyLinear(4, 3, 0.5)
    nn.init.normal_(layer.weight_sigma)
    nn.init.normal_(layer.bias_sigma)
    x, noise = torch.randn(6, 4), torch.randn(6, 7)
    layer.noise = noise
    ours = layer(x)

    def f(e: torch.Tensor) -> torch.Tensor:
        return e.sign() * e.abs().sqrt()

    for row in range(6):
        of_input, of_output = f(noise[row, :4]), f(noise[row, 4:])
        weight = layer.weight + layer.weight_sigma * torch.outer(of_output, of_input)
        bias = layer.bias + layer.bias_sigma * of_output
        torch.testing.assert_close(ours[row], weight @ x[row] + bias)
    layer.noise = noise[:1]  # one draw for all rows
    torch.testing.assert_close(layer(x)[0], ours[0])
    layer.noise = None
    torch.testing.assert_close(layer(x), x @ layer.weight.t() + layer.bias)


def test_a_layer_begins_as_in_the_paper() -> None:
    torch.manual_seed(0)
    layer = NoisyLinear(100, 50, 0.5)
    assert (layer.weight_sigma == 0.05).all()
    assert (layer.bias_sigma == 0.05).all()
    for mean in (layer.weight, layer.bias):
        assert mean.abs().max() <= 0.1
        assert mean.abs().max() > 0.09


def test_the_gradient_agrees_with_finite_differences() -> None:
    torch.manual_seed(0)
    layer = NoisyLinear(3, 2, 0.5).double()
    layer.noise, x = torch.randn(4, 5).double(), torch.randn(4, 3).double()
    names = [name for name, _ in layer.named_parameters()]

    def forward(*values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(forward, tuple(layer.parameters()))


@pytest.mark.parametrize("dueling", ["mean", "none"])
@pytest.mark.parametrize(
    ("spec", "network"),
    [
        (VECTOR, "mlp"),
        (EnvSpec("Ram-v0", ArraySpec((2, 5), "uint8"), 4), "auto"),
        (IMAGE, "auto"),
        (IMAGE, "small_cnn"),
        (EnvSpec("Last-v0", ArraySpec((40, 44, 3), "uint8"), 2), "auto"),
        (EnvSpec("Gray-v0", ArraySpec((36, 50), "float32"), 2), "small_cnn"),
    ],
)
def test_the_declared_noise_is_what_the_network_takes(spec: EnvSpec, network: str, dueling: str) -> None:
    learner = rainbow(spec, f"learner.network={network}", f"learner.dueling={dueling}")
    (declared,) = learner.declaration.inputs
    module = learner.parts["value"].module
    assert isinstance(module, NoisyNetwork)
    assert declared.shape == (module.noise,)
    assert not [layer for layer in module.modules() if type(layer) is nn.Linear]
    assert all(torch.isfinite(torch.tensor(list(learner.update(random_batch(spec, 4, 0)).figures.values()))))


def test_rollouts_draw_noise_for_each_environment_and_step() -> None:
    learner = rainbow()
    policy, vector = ActingPolicy(learner.acting_model(), seed=1), learner.parameters.numpy()
    observation = np.repeat(random_batch(VECTOR, 1, 2).s_t, 4000, axis=0)
    first = policy.act(observation, vector)["q"].copy()
    assert len(np.unique(first[:, 0])) > 3900
    policy.commit()
    assert (policy.act(observation, vector)["q"] != first).mean() > 0.99
    # q is no linear function of the noise, so its mean stands near the one of the mean parameters, not at it
    np.testing.assert_allclose(first.mean(0), learner.inspect(observation[:1])["q"][0], atol=0.5)
    network = learner.parts["value"].module
    for layer in network.layers:
        for sigma in (layer.weight_sigma, layer.bias_sigma):
            sigma.data.zero_()
    quiet = policy.act(observation[:3], learner.parameters.numpy())["q"]
    np.testing.assert_allclose(quiet, learner.inspect(observation[:3])["q"], rtol=1e-3, atol=1e-4)


def test_an_update_draws_its_noise_from_the_learner_s_own_state() -> None:
    one, same, batch = rainbow(), rainbow(), random_batch(VECTOR, 16, 0)
    torch.manual_seed(1)
    one.update(batch)
    torch.manual_seed(2)
    same.update(batch)
    assert torch.equal(one.parameters.vector, same.parameters.vector)
    drawn = [made.inputs[1] for made in one.algorithm.evaluations(one._loader.load(batch), "value")]
    assert [noise.shape for noise in drawn] == [(1, one.declaration.inputs[0].shape[0])] * 3
    for other in drawn[1:]:
        assert not torch.equal(drawn[0], other)


def test_the_noise_fades_where_everything_is_known_and_stays_in_place_otherwise() -> None:
    """A state whose actions pay 1 and -1 for certain: the noise of the action values falls."""
    spec = EnvSpec("Bandit", ArraySpec((1,), "float32"), 2)
    learner = rainbow(spec, "learner.c51.v_min=-2", "learner.c51.v_max=2", "learner.lr=0.01", "learner.dueling=none")
    policy, ones = ActingPolicy(learner.acting_model(), seed=1), np.ones((64, 1), np.float32)

    def spread() -> float:
        policy.reset(count=500)
        policy.commit()
        return float(policy.act(np.ones((500, 1), np.float32), learner.parameters.numpy())["q"].std(0).mean())

    before, generator = spread(), np.random.default_rng(0)
    for _ in range(300):
        action = generator.integers(0, 2, 64)
        pay = (1.0 - 2.0 * action).astype(np.float32)
        batch = Transitions(ones, action, pay, np.zeros(64, np.float32), ones, np.ones(64, np.float32))
        learner.update(batch, statistics=False)
    assert spread() < 0.5 * before
    assert learner.inspect(ones[:1])["q"][0] == pytest.approx([1.0, -1.0], abs=0.15)


def test_without_sigma_there_is_no_noise() -> None:
    assert describe(load_config(overrides=["learner.algorithm=c51"]), VECTOR).inputs == ()
    plain = Learner.of(load_config(overrides=["learner.algorithm=c51"]), VECTOR)
    assert not any(isinstance(layer, NoisyLinear) for layer in plain.parts["value"].module.modules())


def test_noisy_layers_in_a_network_of_the_user_s_own_are_refused() -> None:
    network = "learner.network=tests.learner.learner_user_networks:Plain"
    with pytest.raises(ConfigError, match="only the library's networks can have noisy layers"):
        describe(load_config(overrides=["learner.algorithm=c51", "learner.c51.sigma=0.5", network]), VECTOR)

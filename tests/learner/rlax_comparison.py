"""Projections and losses against `rlax`, DeepMind's implementation in JAX, on random batches. Run by `test_rlax`."""

import jax
import numpy as np
import pytest
import rlax
import torch

from ddrl.learner.losses import Support, at_action, divergence, midpoints, q_learning, quantile_terms

ROWS, ACTIONS = 64, 3
SEEDS = range(2)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def transitions(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    discount = generator.choice([0.0, 0.9, 0.99**3], ROWS).astype(np.float32)
    return generator.integers(0, ACTIONS, ROWS), 3 * random(seed + 1, ROWS), discount


def agree(ours: torch.Tensor, theirs: object) -> None:
    np.testing.assert_allclose(ours.numpy(), np.asarray(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("v_min", "v_max", "atoms"), [(-10.0, 10.0, 51), (0.0, 3.0, 7), (-1.0, 2.0, 2)])
def test_the_projection(v_min: float, v_max: float, atoms: int, seed: int) -> None:
    support = Support(v_min, v_max, atoms)
    p = torch.from_numpy(2 * random(seed, ROWS, atoms)).softmax(1)
    _, r_t, discount_t = transitions(seed)
    z = np.linspace(v_min, v_max, atoms, dtype=np.float32)
    theirs = jax.vmap(rlax.categorical_l2_project, (0, 0, None))(r_t[:, None] + discount_t[:, None] * z, p.numpy(), z)
    agree(support.project(p, torch.from_numpy(r_t), torch.from_numpy(discount_t)), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loss_of_c51(seed: int) -> None:
    """rlax gives the cross-entropy; the divergence is that less the target's entropy."""
    atoms, support = 21, Support(-5.0, 5.0, 21)
    z = np.linspace(-5, 5, atoms, dtype=np.float32)
    logits_tm1, logits_t, selector = (random(10 * seed + n, ROWS, ACTIONS, atoms) for n in range(3))
    a_tm1, r_t, discount_t = transitions(seed)
    q_selector = support.mean(torch.from_numpy(selector).softmax(2))
    p_t = at_action(torch.from_numpy(logits_t), q_selector.argmax(1)).softmax(1)
    target = support.project(p_t, torch.from_numpy(r_t), torch.from_numpy(discount_t))
    ours = divergence(target, at_action(torch.from_numpy(logits_tm1), torch.from_numpy(a_tm1)).log_softmax(1))
    theirs = jax.vmap(rlax.categorical_double_q_learning, (None, 0, 0, 0, 0, None, 0, 0))(
        z, logits_tm1, a_tm1, r_t, discount_t, z, logits_t, q_selector.numpy()
    )
    agree(ours - torch.xlogy(target, target).sum(1), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("n", "m", "drawn"), [(9, 9, False), (8, 5, True)])
def test_the_loss_and_the_gradient_of_quantiles(n: int, m: int, drawn: bool, kappa: float, seed: int) -> None:
    """rlax's Huber loss is not divided by kappa."""
    values, values_t, selector = (random(10 * seed + k, ROWS, ACTIONS, count) for k, count in enumerate((n, m, n)))
    fraction = torch.rand(ROWS, n) if drawn else midpoints(n).expand(ROWS, n).contiguous()
    a_tm1, r_t, discount_t = transitions(seed)
    best = torch.from_numpy(selector).mean(2).argmax(1)
    target = torch.from_numpy(r_t)[:, None] + torch.from_numpy(discount_t)[:, None] * at_action(
        torch.from_numpy(values_t), best
    )
    value = torch.from_numpy(values)
    chosen = torch.from_numpy(a_tm1)
    ours, slopes = (each * (kappa or 1.0) for each in quantile_terms(at_action(value, chosen), fraction, target, kappa))
    slope = torch.zeros_like(value)
    slope[torch.arange(ROWS), chosen] = slopes

    def loss(values: jax.Array) -> jax.Array:
        """[B]; rlax takes values [N, A]."""
        mapped = jax.vmap(rlax.quantile_q_learning, (0, 0, 0, 0, 0, 0, 0, None))
        last = (a_tm1, r_t, discount_t, selector.swapaxes(1, 2), values_t.swapaxes(1, 2), kappa)
        return mapped(values.swapaxes(1, 2), fraction.numpy(), *last)

    agree(ours, loss(jax.numpy.asarray(values)))
    agree(slope, jax.grad(lambda values: loss(values).sum())(jax.numpy.asarray(values)))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_errors_of_q_learning(seed: int) -> None:
    q_tm1, q_t, selector = (random(10 * seed + n, ROWS, ACTIONS) for n in range(3))
    a_tm1, r_t, discount_t = transitions(seed)
    given = [torch.from_numpy(array) for array in (q_tm1, a_tm1, r_t, discount_t, q_t)]
    ones = torch.ones(ROWS)
    single = jax.vmap(rlax.q_learning)(q_tm1, a_tm1, r_t, discount_t, q_t)
    double = jax.vmap(rlax.double_q_learning)(q_tm1, a_tm1, r_t, discount_t, q_t, selector)
    for chosen, theirs in ((None, single), (torch.from_numpy(selector), double)):
        ours = q_learning(*given, chosen, ones, "mse")
        agree(ours.priority, np.abs(theirs))
        ((_, slope),) = ours.derivatives  # -error / rows at the action taken
        agree(-ROWS * slope[torch.arange(ROWS), given[1]], theirs)

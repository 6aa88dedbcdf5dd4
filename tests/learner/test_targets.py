"""Targets and losses against their equations."""

import numpy as np
import pytest
import torch

from ddrl.learner.targets import double_q_target, linear_lr, loss_gradient, loss_of, q_gradient, q_learning_target


def test_the_target_bootstraps_from_the_largest_value_and_not_from_terminal_states() -> None:
    q_t = torch.tensor([[1.0, 3.0], [5.0, 2.0]])
    target = q_learning_target(torch.tensor([0.5, -1.0]), torch.tensor([0.9, 0.0]), q_t)
    torch.testing.assert_close(target, torch.tensor([0.5 + 0.9 * 3.0, -1.0]))


def test_the_double_target_takes_the_selector_s_action_and_the_other_network_s_value() -> None:
    q_t, selector = torch.tensor([[1.0, 3.0], [5.0, 2.0]]), torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    target = double_q_target(torch.tensor([0.5, -1.0]), torch.tensor([0.9, 0.5]), q_t, selector)
    torch.testing.assert_close(target, torch.tensor([0.5 + 0.9 * 1.0, -1.0 + 0.5 * 2.0]))


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_the_loss_s_derivative_is_its_finite_difference(kind: str) -> None:
    d = torch.tensor([-3.0, -1.5, -0.5, 0.0, 0.7, 1.2, 40.0], dtype=torch.float64)
    step = 1e-6
    slope = (loss_of(d + step, kind) - loss_of(d - step, kind)) / (2 * step)
    torch.testing.assert_close(loss_gradient(d, kind), slope, rtol=1e-6, atol=1e-6)


def test_the_huber_loss_is_torch_s() -> None:
    d = torch.linspace(-4, 4, 33)
    torch.testing.assert_close(
        loss_of(d, "huber"), torch.nn.functional.huber_loss(d, torch.zeros_like(d), reduction="none")
    )


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_the_gradient_handed_to_autograd_is_that_of_the_weighted_mean_loss(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = (3 * torch.randn(16, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    a = torch.randint(0, 4, (16,), generator=generator)
    target, weight = (
        torch.randn(16, generator=generator, dtype=torch.float64),
        torch.rand(16, generator=generator, dtype=torch.float64),
    )
    td_error = target - q.gather(1, a.unsqueeze(1)).squeeze(1)
    (expected,) = torch.autograd.grad((weight * loss_of(td_error, kind)).mean(), q)
    torch.testing.assert_close(q_gradient(q.detach(), a, td_error.detach(), weight, kind), expected)


def test_the_step_size_falls_linearly_and_stays_at_its_end() -> None:
    assert np.allclose(
        [linear_lr(1e-3, 0.1, progress) for progress in (-1, 0, 0.5, 1, 7)], [1e-3, 1e-3, 5.5e-4, 1e-4, 1e-4]
    )
    assert linear_lr(1e-3, 1.0, 0.3) == 1e-3

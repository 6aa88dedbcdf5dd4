"""Targets and losses against their equations."""

import numpy as np
import pytest
import torch

from ddrl.learner import devices
from ddrl.learner.losses import (
    double_q_target,
    linear_lr,
    q_learning_target,
    q_slopes,
    value_slope,
    weighted_loss,
)


def test_the_target_bootstraps_from_the_largest_value_and_not_from_terminal_states() -> None:
    q_t = torch.tensor([[1.0, 3.0], [5.0, 2.0]])
    target = q_learning_target(torch.tensor([0.5, -1.0]), torch.tensor([0.9, 0.0]), q_t)
    torch.testing.assert_close(target, torch.tensor([0.5 + 0.9 * 3.0, -1.0]))


def test_the_double_target_takes_the_selector_s_action_and_the_other_network_s_value() -> None:
    q_t, selector = torch.tensor([[1.0, 3.0], [5.0, 2.0]]), torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    target = double_q_target(torch.tensor([0.5, -1.0]), torch.tensor([0.9, 0.5]), q_t, selector)
    torch.testing.assert_close(target, torch.tensor([0.5 + 0.9 * 1.0, -1.0 + 0.5 * 2.0]))


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_the_loss_and_its_derivative_are_those_of_its_equation(kind: str) -> None:
    target = torch.tensor([-3.0, -1.5, -0.5, 0.0, 0.7, 1.2, 40.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 0.5, 0.25, 3.0, 1.0, 0.1, 0.7], dtype=torch.float64)
    value = torch.full_like(target, 0.25, requires_grad=True)
    d = target - value.detach()
    each = torch.where(d.abs() <= 1, d.square() / 2, d.abs() - 0.5) if kind == "huber" else d.square() / 2
    loss = weighted_loss(target - value, weight, kind)
    torch.testing.assert_close(loss, (weight * each).mean())
    (slope,) = torch.autograd.grad(loss, value)
    torch.testing.assert_close(slope, -weight / 7 * (d.clamp(-1, 1) if kind == "huber" else d))
    torch.testing.assert_close(value_slope(d, weight, kind), slope)


def test_the_step_size_falls_linearly_and_stays_at_its_end() -> None:
    assert np.allclose(
        [linear_lr(1e-3, 0.1, progress) for progress in (-1, 0, 0.5, 1, 7)], [1e-3, 1e-3, 5.5e-4, 1e-4, 1e-4]
    )
    assert linear_lr(1e-3, 1.0, 0.3) == 1e-3


def q_batch(rows: int, actions: int, double: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(rows * actions)
    q_tm1, q_t, selector = (torch.randn(rows, actions).round(decimals=1) for _ in range(3))  # with equal values
    r_t, discount_t, weight = torch.randn(rows), torch.rand(rows), torch.rand(rows)
    return [q_tm1, torch.randint(actions, (rows,)), r_t, discount_t, q_t, selector if double else None, weight]


@pytest.mark.parametrize("kind", ["huber", "mse"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("rows", "actions"), [(1, 1), (64, 2), (33, 18)])
def test_the_kernel_and_torch_give_the_same_slopes(
    kind: str, double: bool, rows: int, actions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = q_batch(rows, actions, double)
    ours = q_slopes(*given, kind)
    monkeypatch.setattr(devices, "has_kernel", lambda device: False)
    for mine, torchs in zip(ours, q_slopes(*given, kind), strict=True):
        torch.testing.assert_close(mine, torchs)
    given[4][0, 0] = float("nan")
    assert q_slopes(*given, kind)[0][0].isnan() or double
    monkeypatch.undo()
    assert q_slopes(*given, kind)[0][0].isnan() or double


def test_the_kernel_refuses_actions_that_the_values_do_not_have_and_columns_of_another_length() -> None:
    for action in (-1, 2, 2**62):
        given = q_batch(4, 2, True)
        given[1][3] = action
        with pytest.raises(IndexError, match="not in"):
            q_slopes(*given, "huber")
    for place in (1, 2, 3, 4, 6):
        given = q_batch(4, 2, True)
        given[place] = given[place][:3]
        with pytest.raises(ValueError, match="rows"):
            q_slopes(*given, "huber")

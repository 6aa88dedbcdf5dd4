"""Targets and losses of Q-learning as pure functions of tensors.

Symbols: r_t is the discounted sum of the rewards after s_tm1 (n of them, fewer at an episode's end), discount_t the
discount of what follows s_t: gamma ** n, and 0 where s_t is terminal. Replay forms both, so nothing here knows n or
termination."""

from __future__ import annotations

import torch


def q_learning_target(r_t: torch.Tensor, discount_t: torch.Tensor, q_t: torch.Tensor) -> torch.Tensor:
    """r_t + discount_t max_a q_t(a) (Mnih et al. 2015): [B] from [B], [B], [B, A]."""
    return torch.addcmul(r_t, discount_t, q_t.amax(dim=1))


def double_q_target(
    r_t: torch.Tensor, discount_t: torch.Tensor, q_t: torch.Tensor, q_t_selector: torch.Tensor
) -> torch.Tensor:
    """r_t + discount_t q_t(argmax_a q_t_selector(a)) (van Hasselt et al. 2016, eq. 4): [B] from [B], [B], [B, A], [B,
    A].

    `q_t` is the target network's, `q_t_selector` the online network's.
    """
    best = q_t_selector.argmax(dim=1, keepdim=True)
    return torch.addcmul(r_t, discount_t, q_t.gather(1, best).squeeze(1))


def loss_of(td_error: torch.Tensor, kind: str) -> torch.Tensor:
    """Elementwise loss of the TD error, [B]: "huber" (delta 1) is d^2 / 2 within [-1, 1] and |d| - 1/2 beyond, "mse" is
    d^2 / 2."""
    if kind == "mse":
        return 0.5 * td_error.square()
    size = td_error.abs()
    inside = size.clamp(max=1.0)
    return inside * (size - 0.5 * inside)


def loss_gradient(td_error: torch.Tensor, kind: str) -> torch.Tensor:
    """Derivative of `loss_of` by the TD error, [B]: the TD error, clipped to [-1, 1] for "huber"."""
    return td_error.clamp(-1.0, 1.0) if kind == "huber" else td_error


def q_gradient(
    q_tm1: torch.Tensor, a_tm1: torch.Tensor, td_error: torch.Tensor, weight: torch.Tensor, kind: str
) -> torch.Tensor:
    """Derivative of mean_b weight_b loss(td_error_b) by q_tm1, [B, A], where td_error = target - q_tm1(a_tm1) and the
    target is constant.

    Handed to autograd in place of a loss: the same numbers for a third of the operations.
    """
    slope = loss_gradient(td_error, kind) * weight * (-1.0 / td_error.shape[0])
    return torch.zeros_like(q_tm1).scatter_(1, a_tm1.unsqueeze(1), slope.unsqueeze(1))


def linear_lr(lr: float, end_fraction: float, progress: float) -> float:
    """lr falling linearly from `lr` at progress 0 to `lr * end_fraction` at progress 1; progress is clipped to [0,
    1]."""
    progress = min(max(progress, 0.0), 1.0)
    return lr * (1.0 + (end_fraction - 1.0) * progress)

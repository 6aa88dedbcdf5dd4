"""Targets and losses of Q-learning as pure functions of tensors.

Symbols: r_t is the discounted sum of the rewards after s_tm1 (n of them, fewer at an episode's end), discount_t the
discount of what follows s_t: gamma ** n, and 0 where s_t is terminal. Replay forms both, so nothing here knows n or
termination."""

from __future__ import annotations

import numpy as np
import torch

from ddrl import _kernel
from ddrl.learner import devices


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


def weighted_loss(td_error: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """mean_b weight_b l(d_b) [], of TD errors d = target - value [B] and weights [B].

    "huber" (delta 1): l(d) is d^2 / 2 within [-1, 1] and |d| - 1/2 beyond; "mse": l(d) = d^2 / 2."""
    size = td_error.abs()
    inside = size.clamp(max=1.0) if kind == "huber" else size
    return (weight * inside * (size - 0.5 * inside)).mean()


def value_slope(td_error: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The derivative of `weighted_loss` by the values [B], their targets held constant; or of several such losses by
    theirs [B, N], with weights [B, 1]."""
    slope = td_error.clamp(-1.0, 1.0) if kind == "huber" else td_error
    return slope * weight * (-1.0 / len(weight))


def q_slopes(
    q_tm1: torch.Tensor,
    action: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    q_t: torch.Tensor,
    q_t_selector: torch.Tensor | None,
    weight: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """TD errors [B] of the actions taken, their sizes [B], the values of those actions [B], and `weighted_loss`'s
    derivative by q_tm1 [B, A]; without a selector q_t is maximized. On the processor one call of the kernel: in torch
    it is twenty, and each costs more than these numbers."""
    selector = q_t if q_t_selector is None else q_t_selector
    if devices.has_kernel(q_tm1.device):
        columns = (r_t.numpy(), discount_t.numpy(), q_t.numpy(), selector.numpy(), weight.numpy())
        td_error, td_size, q_taken = (np.empty(len(q_tm1), np.float32) for _ in range(3))
        slope = np.empty(q_tm1.shape, np.float32)
        _kernel.q_slopes(q_tm1.numpy(), action.numpy(), *columns, kind == "huber", td_error, td_size, q_taken, slope)
        shared = torch.from_numpy
        return shared(td_error), shared(td_size), shared(q_taken), shared(slope)
    chosen = action.unsqueeze(1)
    q_taken = q_tm1.gather(1, chosen).squeeze(1)
    td_error = double_q_target(r_t, discount_t, q_t, selector) - q_taken
    slope = q_tm1.new_zeros(q_tm1.shape).scatter_(1, chosen, value_slope(td_error, weight, kind).unsqueeze(1))
    return td_error, td_error.abs(), q_taken, slope


def linear_lr(lr: float, end_fraction: float, progress: float) -> float:
    """lr falling linearly from `lr` at progress 0 to `lr * end_fraction` at progress 1; progress is clipped to [0,
    1]."""
    progress = min(max(progress, 0.0), 1.0)
    return lr * (1.0 + (end_fraction - 1.0) * progress)

"""Quantiles of the return, as pure functions of tensors (Dabney et al. 2018a, "QR-DQN"; 2018b, "IQN")."""

from __future__ import annotations

import torch


def midpoints(count: int) -> torch.Tensor:
    """Fractions (2 i + 1) / (2 N), i = 0 .. N - 1, in the middle of N equal shares (Dabney et al. 2018a, lemma 2)."""
    return (torch.arange(count) + 0.5) / count


def quantile_loss(value: torch.Tensor, fraction: torch.Tensor, target: torch.Tensor, kappa: float) -> torch.Tensor:
    """sum_i mean_j |tau_i - 1{d_ij < 0}| L(d_ij) with d_ij = target_j - value_i (Dabney et al. 2018b, eq. 3): [B] from
    [B, N], [N] or [B, N], [B, M]. O(B N M).

    L is the Huber loss over kappa: d^2 / (2 kappa) up to kappa, |d| - kappa / 2 beyond; kappa 0: |d|, whose minimum is
    at the quantiles themselves."""
    error = target.unsqueeze(1) - value.unsqueeze(2)  # [B, N, M]
    size = error.abs()
    if kappa:
        near = size.clamp(max=kappa)
        size = near * (size - 0.5 * near) / kappa
    weight = (fraction.unsqueeze(-1) - (error.detach() < 0).to(value.dtype)).abs()
    return (weight * size).mean(dim=2).sum(dim=1)

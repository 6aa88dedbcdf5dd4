"""Distributions of the return on fixed atoms, as pure functions of tensors (Bellemare, Dabney & Munos 2017)."""

from __future__ import annotations

import torch
from torch import nn


class Support:
    """Atoms z_i = v_min + i dz, i = 0 .. N - 1; moves to the device of what it is asked about."""

    def __init__(self, v_min: float, v_max: float, atoms: int) -> None:
        self.v_min = v_min
        self.v_max = v_max
        self.atoms = atoms
        self.spacing = (v_max - v_min) / (atoms - 1)
        self._z = torch.linspace(v_min, v_max, atoms)

    def mean(self, probability: torch.Tensor) -> torch.Tensor:
        """sum_i z_i p_i: [...] from [..., N]."""
        return probability @ self._on(probability)

    def project(self, probability: torch.Tensor, r_t: torch.Tensor, discount_t: torch.Tensor) -> torch.Tensor:
        """The distribution of r_t + discount_t z, z ~ p, clipped to the ends and shared out between the two nearest
        atoms in proportion to nearness (eq. 7): [B, N] from [B, N], [B], [B]. O(B N)."""
        moved = (r_t.unsqueeze(1) + discount_t.unsqueeze(1) * self._on(probability)).clamp(self.v_min, self.v_max)
        place = ((moved - self.v_min) / self.spacing).clamp(0, self.atoms - 1)  # b_j of algorithm 1
        below = place.floor().clamp(max=self.atoms - 2)
        share = place - below  # of the atom above
        lower = below.long()
        projected = torch.zeros_like(probability)
        projected.scatter_add_(1, lower, probability * (1.0 - share))
        return projected.scatter_add_(1, lower + 1, probability * share)

    def _on(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._z.device != tensor.device:
            self._z = self._z.to(tensor.device)
        return self._z


class MeanValues(nn.Module):
    """A network of logits [B, A, N] as it acts: action values [B, A] from what the network takes."""

    def __init__(self, network: nn.Module, support: Support) -> None:
        super().__init__()
        self.network = network
        self._support = support

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """q [B, A]."""
        return self._support.mean(self.network(*inputs).softmax(2))


def taken(values: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """The row of each action taken: [B, N] from [B, A, N], [B]."""
    return values.gather(1, action.view(-1, 1, 1).expand(-1, 1, values.shape[2])).squeeze(1)


def at_taken(rows: torch.Tensor, action: torch.Tensor, num_actions: int) -> torch.Tensor:
    """[B, A, N] that holds the rows [B, N] at each action taken [B], and zeros elsewhere."""
    spread = rows.new_zeros((len(rows), num_actions, rows.shape[1]))
    return spread.scatter_(1, action.view(-1, 1, 1).expand(-1, 1, rows.shape[1]), rows.unsqueeze(1))


def divergence(target: torch.Tensor, log_probability: torch.Tensor) -> torch.Tensor:
    """KL(target || p) [B], from [B, N] each; its gradient is that of the cross-entropy."""
    return (torch.xlogy(target, target) - target * log_probability).sum(dim=1)

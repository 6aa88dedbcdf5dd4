"""Recurrent action values: an LSTM along sequences, and what a loss along them needs, as pure functions of tensors."""

from __future__ import annotations

import torch
from torch import nn

from ddrl.core.specs import EnvSpec
from ddrl.learner.observations import FlatInputs, Observation


class RecurrentValues(nn.Module):
    """Observations [B, T, *observation.shape] and a state [B, 2 units] (h, then c) -> q [B, T, num_actions].

    The cell is written out (Hochreiter & Schmidhuber 1997, with forget gates): one step of it is exported as it stands.
    """

    def __init__(self, spec: EnvSpec, units: int) -> None:
        super().__init__()
        self.units = units
        self.flatten = FlatInputs(spec.observation)
        self.inputs = nn.Linear(spec.observation.size, units)
        self.gates = nn.Linear(2 * units, 4 * units)
        self.values = nn.Linear(units, spec.num_actions)

    def forward(self, observation: Observation, memory: torch.Tensor, burn_len: torch.Tensor) -> torch.Tensor:
        """q [B, T, num_actions]; nothing is differentiated through the first `burn_len` [B] steps."""
        features = self.features(observation)
        outputs = []
        for place in range(features.shape[1]):
            memory = self.step(features[:, place], memory)
            memory = torch.where((place < burn_len).unsqueeze(1), memory.detach(), memory)
            outputs.append(memory[:, : self.units])
        return self.values(torch.stack(outputs, dim=1))

    def features(self, observation: Observation, leading: int = 2) -> torch.Tensor:
        """[B, T, units], or [B, units] with one leading axis."""
        return torch.relu(self.inputs(self.flatten(observation, leading)))

    def step(self, features: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """The state after one step [B, 2 units], from [B, units] and [B, 2 units]."""
        h, c = memory.split(self.units, dim=1)
        admit, forget, give, new = self.gates(torch.cat([features, h], dim=1)).chunk(4, dim=1)
        c = torch.sigmoid(forget + 1.0) * c + torch.sigmoid(admit) * torch.tanh(new)
        return torch.cat([torch.sigmoid(give) * torch.tanh(c), c], dim=1)


class OneStep(nn.Module):
    """The network as it acts: (observation [N, ...], state [N, 2 units]) -> (q [N, num_actions], the next state)."""

    def __init__(self, network: RecurrentValues) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Observation, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        network = self.network
        following = network.step(network.features(observation, 1), memory)
        return network.values(following[:, : network.units]), following


def positions(burn_len: torch.Tensor, length: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's positions stand [B, L], and which of them are in use [B, L] (1.0 or 0.0)."""
    steps = torch.arange(longest, device=burn_len.device)
    return burn_len.unsqueeze(1) + steps, (steps < length.unsqueeze(1)).float()


def at(values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """values[b, place[b, t]]: [B, L, ...] from [B, T, ...], [B, L]."""
    rows = torch.arange(len(values), device=values.device).unsqueeze(1)
    return values[rows, place.clamp(max=values.shape[1] - 1)]


def rescale(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x (Pohlen et al. 2018, prop. A.2)."""
    return x.sign() * ((x.abs() + 1.0).sqrt() - 1.0) + epsilon * x


def unscale(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The inverse of `rescale`."""
    if epsilon == 0.0:
        return x.sign() * ((x.abs() + 1.0).square() - 1.0)
    root = (1.0 + 4.0 * epsilon * (x.abs() + 1.0 + epsilon)).sqrt()
    return x.sign() * (((root - 1.0) / (2.0 * epsilon)).square() - 1.0)

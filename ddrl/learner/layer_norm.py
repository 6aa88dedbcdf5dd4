"""An mlp with layer normalization: what keeps Q-learning stable without a target network (Gallici et al. 2024)."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ddrl.core.specs import EnvSpec
from ddrl.learner.actor_critic import flat_observation


class NormalizedMLP(nn.Module):
    """Flattened observation -> (linear, layer normalization, relu) for each hidden layer -> q [B, num_actions]."""

    def __init__(self, spec: EnvSpec, hidden: list[int]) -> None:
        super().__init__()
        self._observation = spec.observation
        self.trunk = nn.Sequential()
        for width, following in itertools.pairwise((spec.observation.size, *hidden)):
            self.trunk.extend([nn.Linear(width, following), nn.LayerNorm(following), nn.ReLU(inplace=True)])
        self.head = nn.Linear(hidden[-1], spec.num_actions)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.head(self.trunk(flat_observation(observation, self._observation)))

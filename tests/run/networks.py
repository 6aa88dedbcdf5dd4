"""User modules for the tests."""

import torch
from torch import nn


class Linear(nn.Module):
    """The smallest network there is."""

    def __init__(self, spec):
        super().__init__()
        self.layer = nn.Linear(spec.observation.size, spec.num_actions)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation)


class WrongOutputs(Linear):
    """Gives one value instead of one an action."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation)[:, :1]

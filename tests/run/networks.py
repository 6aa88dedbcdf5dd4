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


class Dropout(nn.Module):
    """Draws from torch's global random state while it learns."""

    def __init__(self, spec):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(spec.observation.size, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, spec.num_actions)
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation)


class FlushesDenormals(Linear):
    """Refuses to learn where denormal numbers are computed with."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self.training and float(torch.full((1,), 1e-39) * 0.5) != 0.0:
            raise FloatingPointError("denormal numbers are not flushed to zero")
        return self.layer(observation)

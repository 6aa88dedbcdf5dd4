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


class Scores(nn.Module):
    """A score for each entry of a queue, from the entry itself and the mean of all; padding is never the best."""

    def __init__(self, spec):
        super().__init__()
        self.entry = nn.Linear(2, 32)
        self.context = nn.Linear(32 + 1, 32)
        self.score = nn.Linear(32, 1)

    def forward(self, observation):
        queue, mask = observation["queue"], observation["queue_mask"].unsqueeze(2)
        entries = torch.relu(self.entry(queue)) * mask
        mean = entries.sum(1) / mask.sum(1).clamp(min=1)
        context = self.context(torch.cat([mean, observation["cash"]], dim=1)).unsqueeze(1)
        score = self.score(torch.relu(entries + context)).squeeze(2)
        return score.masked_fill(~observation["queue_mask"], -10.0)

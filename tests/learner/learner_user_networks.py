"""Networks as a user would write them, good and bad."""

from __future__ import annotations

import torch
from torch import nn

from ddrl.core.specs import EnvSpec


class Plain(nn.Module):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(spec.observation.size, 16), nn.Tanh(), nn.Linear(16, spec.num_actions))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation)


class Normalized(Plain):
    """With buffers (one of them int64), dropout, a parameter that acting does not use, and one that does not learn."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.norm = nn.BatchNorm1d(spec.observation.size)
        self.dropout = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.ones(3))
        self.fixed = nn.Parameter(torch.full((spec.observation.size,), 0.5), requires_grad=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(self.dropout(self.norm(observation)) * self.fixed)


class Tied(nn.Module):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, spec.num_actions)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(observation)))))


class Strided(nn.Module):
    """Parameters whose gradients autograd returns transposed, expanded, or with channels last."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 2)
        self.matrix = nn.Parameter(torch.randn(spec.num_actions, 12))
        self.scale = nn.Parameter(torch.rand(2, 3))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        screen = (
            observation.view(-1, 1, 2, 2)
            .expand(-1, 1, 2, 2)
            .repeat(1, 1, 1, 2)
            .contiguous(memory_format=torch.channels_last)
        )
        return self.convolution(screen).flatten(1) @ self.matrix.t() * self.scale.sum()


class WrongWidth(Plain):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation)[:, :1]


class ReturnsTuple(Plain):
    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return observation, self.layers(observation)


class Fails(Plain):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation @ torch.ones(7, 2)


class CannotBeBuilt(nn.Module):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        raise ValueError("needs a pretrained file")


class Branches(Plain):
    """Python control flow on the values: tracing keeps one branch."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        q = self.layers(observation)
        return q if float(observation.sum()) > 1e9 else (q * 2 if observation.shape[0] == 2 else q)


class NotExportable(Plain):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation) + torch.linalg.matrix_exp(observation.T @ observation)[:1, :3]


class Doubles(Plain):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.double()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation.double()).float()


class NothingToLearn(nn.Module):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.num_actions = spec.num_actions

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[:, : self.num_actions] * 1.0


class NotAModule:
    def __init__(self, spec: EnvSpec) -> None:
        pass

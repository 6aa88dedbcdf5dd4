"""Networks for observations whose arrays have an axis "queue": each ad is seen by the same weights beside what is
common to all, and a mean over the queue, so that permuting the queue permutes what the networks say of its ads
(Zaheer et al. 2017, "Deep sets", eq. 4).

Every float32 array is read, ids are not. Inputs are compressed, sign(x) log(1 + |x|): money and shares lie together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import nn

from ddrl.core.specs import EnvSpec
from ddrl.learner.algorithms.td3 import QUEUE as AXIS

PRIOR = "prior"  # the array [queue] of actions that a policy departs from


def has_queue(spec: EnvSpec) -> bool:
    """Whether these networks can take the observation."""
    return any(AXIS in array.axes for array in spec.observation.arrays.values())


class Queue(nn.Module):
    """Named arrays -> hidden features of each place of the queue [B, Q, hidden[-1]], and the mask [B, Q, 1]."""

    def __init__(self, spec: EnvSpec, hidden: list[int], extra: int = 0) -> None:
        super().__init__()
        arrays = {name: array for name, array in spec.observation.arrays.items() if array.dtype == "float32"}
        self._own = [name for name, array in arrays.items() if AXIS in array.axes]
        self._common = [name for name in arrays if name not in self._own]
        width = extra + sum(arrays[name].size // arrays[name].shape[0] for name in self._own)
        width += sum(arrays[name].size for name in self._common)
        self.first = nn.Linear(width, hidden[0])
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(hidden))
        self.pooled = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(hidden))

    def forward(
        self, observation: Mapping[str, torch.Tensor], extra: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class; `extra` [B, Q, extra] are further inputs of each place."""
        mask = observation[f"{AXIS}_mask"].unsqueeze(2).float()
        places = mask.shape[1]
        own = [observation[name].reshape(mask.shape[0], places, -1) for name in self._own]
        common = [observation[name].flatten(1).unsqueeze(1).expand(-1, places, -1) for name in self._common]
        x = torch.cat([*own, *common], 2)
        x = torch.sign(x) * torch.log1p(torch.abs(x))
        x = torch.relu(self.first(x if extra is None else torch.cat([x, extra], 2)))
        for layer, pooled in zip(self.layers, self.pooled, strict=True):
            x = torch.relu(layer(x) + pooled(masked_mean(x, mask)).unsqueeze(1))
        return x, mask


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean [B, F] over the places [B, Q, F] of the mask [B, Q, 1]; 0 where it has none."""
    return (x * mask).sum(1) / mask.sum(1).clamp(min=1.0)


class QueueActor(nn.Module):
    """The action of the first places of the queue: low + (high - low) sigmoid(f + logit of the prior's share), or of
    1/2 where there is no prior. f begins as 0, so that an actor begins as the prior."""

    low: torch.Tensor
    width: torch.Tensor

    def __init__(self, spec: EnvSpec, hidden: list[int]) -> None:
        super().__init__()
        self.queue = Queue(spec, hidden)
        self.head = nn.Linear(hidden[-1], 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._has_prior = PRIOR in spec.observation.arrays
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        self.register_buffer("low", low)
        self.register_buffer("width", high - low)

    def forward(self, observation: Mapping[str, torch.Tensor], noise: torch.Tensor | None = None) -> torch.Tensor:
        """[B, actions]; with `noise` [B, actions], in units of half the bounds' distance, added and clipped."""
        size = self.low.shape[0]
        f = self.head(self.queue(observation)[0])[:, :size, 0]
        if self._has_prior:
            share = ((observation[PRIOR][:, :size] - self.low) / self.width).clamp(0.02, 0.98)
            f = f + torch.log(share) - torch.log1p(-share)
        action = self.low + self.width * torch.sigmoid(f)
        if noise is not None:
            action = torch.minimum(torch.maximum(action + 0.5 * self.width * noise, self.low), self.low + self.width)
        return action


class QueueCritic(nn.Module):
    """`outputs` numbers of (state, action): [B, 1, outputs], or [B, actions, outputs] where rewards are by place."""

    low: torch.Tensor
    width: torch.Tensor

    def __init__(self, spec: EnvSpec, hidden: list[int], outputs: int) -> None:
        super().__init__()
        self.queue = Queue(spec, hidden, extra=1)
        self._by_place = bool(spec.reward_shape)
        self.head = nn.Sequential(nn.Linear(hidden[-1], hidden[-1]), nn.ReLU(), nn.Linear(hidden[-1], outputs))
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        self.register_buffer("low", low)
        self.register_buffer("width", high - low)

    def forward(self, observation: Mapping[str, torch.Tensor], action: torch.Tensor) -> torch.Tensor:
        """See the class."""
        share = (action - self.low) / self.width
        rest = observation[f"{AXIS}_mask"].shape[1] - share.shape[1]
        if rest:
            share = torch.nn.functional.pad(share, (0, rest))
        x, mask = self.queue(observation, share.unsqueeze(2))
        if self._by_place:
            return self.head(x[:, : action.shape[1]])
        return self.head(masked_mean(x, mask)).unsqueeze(1)


class QueueCritics(nn.Module):
    """`count` independent critics: [B, count, outputs] each with rewards of one number."""

    def __init__(self, spec: EnvSpec, hidden: list[int], count: int = 1, outputs: int = 1) -> None:
        super().__init__()
        self.critics = nn.ModuleList(QueueCritic(spec, hidden, outputs) for _ in range(count))

    def forward(self, observation: Mapping[str, torch.Tensor], action: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.cat([critic(observation, action) for critic in self.critics], 1)

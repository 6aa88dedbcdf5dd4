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

AXIS = "queue"  # the axis of the arrays that these networks read (ddrl.core.specs.NETWORKS)
MARGIN = 0.02  # how far the range of the sigmoid reaches beyond the bounds, as a share of their distance
PRIOR = "prior"  # the array [queue] of actions that a policy departs from
Named = Mapping[str, torch.Tensor]  # an observation


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
        self, observation: Named, extra: torch.Tensor | None = None, *, alone: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class; `extra` [B, Q, extra] are further inputs of each place. `alone`: no gradient flows from one
        place to another."""
        mask = observation[f"{AXIS}_mask"].unsqueeze(2).float()
        places = mask.shape[1]
        own = [observation[name].reshape(mask.shape[0], places, -1) for name in self._own]
        common = [observation[name].flatten(1).unsqueeze(1).expand(-1, places, -1) for name in self._common]
        x = torch.cat([*own, *common], 2)
        x = torch.sign(x) * torch.log1p(torch.abs(x))
        x = torch.relu(self.first(x if extra is None else torch.cat([x, extra], 2)))
        for layer, pooled in zip(self.layers, self.pooled, strict=True):
            mean = masked_mean(x.detach() if alone else x, mask)
            x = torch.relu(layer(x) + pooled(mean).unsqueeze(1))
        return x, mask


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean [B, F] over the places [B, Q, F] of the mask [B, Q, 1]; 0 where it has none."""
    return (x * mask).sum(1) / mask.sum(1).clamp(min=1.0)


class Bounds(nn.Module):
    """The bounds of the actions, and where between them the prior lies."""

    low: torch.Tensor
    width: torch.Tensor

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self._has_prior = PRIOR in spec.observation.arrays
        low = torch.tensor(spec.action_low)
        high = torch.tensor(spec.action_high)
        self.register_buffer("low", low)
        self.register_buffer("width", high - low)

    def share(self, action: torch.Tensor) -> torch.Tensor:
        """Where between the bounds an action [B, actions] lies, in [0, 1]."""
        return (action - self.low) / self.width

    def prior(self, observation: Named) -> torch.Tensor:
        """The prior's share [B, actions]; 1/2 where there is no prior."""
        size = self.low.shape[0]
        if not self._has_prior:
            return 0.5 * torch.ones_like(observation[f"{AXIS}_mask"][:, :size], dtype=torch.float32)
        return self.share(observation[PRIOR][:, :size]).clamp(0.0, 1.0)


def logit(share: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of p = (share + MARGIN) / (1 + 2 MARGIN): finite at both bounds."""
    p = (share + MARGIN) / (1 + 2 * MARGIN)
    return torch.log(p) - torch.log1p(-p)


def share_of(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `logit`, within [0, 1]. The gradient is that of the sigmoid beyond the bounds too, so that an
    action at a bound can leave it."""
    share = (1 + 2 * MARGIN) * torch.sigmoid(x) - MARGIN
    return share + (share.clamp(0.0, 1.0) - share).detach()


def by_place(mask: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Inputs [B, actions] of the first places as one [B, Q, inputs], 0 for the places that no action is about."""
    given = torch.stack(inputs, 2)
    rest = mask.shape[1] - given.shape[1]
    return torch.nn.functional.pad(given, (0, 0, 0, rest)) if rest else given


class QueueActor(nn.Module):
    """The action of the first places of the queue: low + (high - low) share_of(f + logit of the prior). f
    begins as 0, so that an actor begins as the prior."""

    def __init__(self, spec: EnvSpec, hidden: list[int]) -> None:
        super().__init__()
        self.queue = Queue(spec, hidden, extra=1)
        self.bounds = Bounds(spec)
        self.head = nn.Linear(hidden[-1], 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, observation: Named, noise: torch.Tensor | None = None) -> torch.Tensor:
        """[B, actions]; with `noise` [B, actions], in units of half the bounds' distance, added and clipped."""
        bounds = self.bounds
        begin = logit(bounds.prior(observation))
        x, _ = self.queue(observation, by_place(observation[f"{AXIS}_mask"], 0.5 * begin))
        action = bounds.low + bounds.width * share_of(self.head(x)[:, : begin.shape[1], 0] + begin)
        if noise is not None:
            moved = action + 0.5 * bounds.width * noise
            action = torch.minimum(torch.maximum(moved, bounds.low), bounds.low + bounds.width)
        return action

    def departure(self, observation: Named, action: torch.Tensor) -> torch.Tensor:
        """How far an action is from the prior, as a share of the bounds' distance [B, actions]."""
        return self.bounds.share(action) - self.bounds.prior(observation)


class QueueCritic(nn.Module):
    """`outputs` numbers of (state, action): [B, 1, outputs], or [B, actions, outputs] where rewards are by place.

    It sees each action as a share of the bounds' distance, and as its departure from the prior: what a departure is
    worth is small beside what the prior says of the state. Where rewards are by place, an actor climbs each place's
    value by that place's action alone: rewards are as in an auction, and an actor that climbs the whole sum learns
    to bid low, so that the others pay less."""

    def __init__(self, spec: EnvSpec, hidden: list[int], outputs: int) -> None:
        super().__init__()
        self.queue = Queue(spec, hidden, extra=3)
        self.bounds = Bounds(spec)
        self._by_place = bool(spec.reward_shape)
        self.head = nn.Sequential(nn.Linear(hidden[-1], hidden[-1]), nn.ReLU(), nn.Linear(hidden[-1], outputs))

    def forward(self, observation: Named, action: torch.Tensor) -> torch.Tensor:
        """See the class."""
        share = self.bounds.share(action)
        begin = self.bounds.prior(observation)
        extra = by_place(observation[f"{AXIS}_mask"], share, 3 * (share - begin), 0.5 * logit(begin))
        x, mask = self.queue(observation, extra, alone=self._by_place and action.requires_grad)
        if self._by_place:
            return self.head(x[:, : action.shape[1]])
        return self.head(masked_mean(x, mask)).unsqueeze(1)


class QueueCritics(nn.Module):
    """`count` independent critics: [B, count, outputs] each with rewards of one number."""

    def __init__(self, spec: EnvSpec, hidden: list[int], count: int = 1, outputs: int = 1) -> None:
        super().__init__()
        self.critics = nn.ModuleList(QueueCritic(spec, hidden, outputs) for _ in range(count))

    def forward(self, observation: Named, action: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """See the class; with `first`, of so many of them only: [B, first, outputs]."""
        return torch.cat([critic(observation, action) for critic in self.critics[:first]], 1)


def make_actor(spec: EnvSpec, hidden: list[int]) -> QueueActor:
    """For `ddrl.learner.actor_critic`: the actor of observations with a queue."""
    return QueueActor(spec, hidden)


def make_critics(spec: EnvSpec, hidden: list[int], count: int = 1, outputs: int = 1) -> QueueCritics:
    """The same for `count` critics of `outputs` numbers each."""
    return QueueCritics(spec, hidden, count, outputs)

"""Networks for continuous actions: a deterministic actor within the action's bounds, and critics of (state, action)."""

from __future__ import annotations

import itertools
import math
from importlib import import_module

import torch
from torch import nn
from torch.nn.functional import linear

from ddrl.core.config import LearnerConfig
from ddrl.core.errors import ConfigError
from ddrl.core.specs import EnvSpec
from ddrl.learner.networks import FlatInputs, action_scale, hidden_layers
from ddrl.learner.own_networks import OwnCritics, own_network
from ddrl.learner.plain import Activation, Bounds, Columns, Layer, Linear, Plain, layers_of


def make_actor(config: LearnerConfig, spec: EnvSpec) -> nn.Module:
    """The actor that is named, or fits the observation: one vector, or what the module `spec.networks` is for."""
    if ":" in config.network:
        return OwnActor(config, spec)
    if spec.networks:
        if config.normalize:
            raise ConfigError(f"learner.normalize: the networks of {spec.env_id} scale observations themselves")
        return import_module(spec.networks).make_actor(spec, config.hidden)
    return Actor(spec, config.hidden, normalize=config.normalize)


def make_critics(config: LearnerConfig, spec: EnvSpec, count: int = 1, outputs: int = 1) -> nn.Module:
    """`count` critics of `outputs` numbers that are named, or fit the observation."""
    if ":" in config.network:
        return OwnCritics(config, spec, action_scale(spec), count, outputs)
    if spec.networks:
        return import_module(spec.networks).make_critics(spec, config.hidden, count, outputs)
    return Critics(spec, config.hidden, count, outputs, normalize=config.normalize)


class Bounded(nn.Module):
    """mu(s) = centre + half f(s) with f from -1 to 1: [B, *action.shape], within the action's bounds, which must be
    finite."""

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self._shape = spec.action.shape

    def bound(self, spec: EnvSpec) -> None:
        """Register the bounds, behind what else there is."""
        self.register_buffer("low", torch.tensor(spec.action_low, dtype=torch.float32))
        self.register_buffer("high", torch.tensor(spec.action_high, dtype=torch.float32))

    def within(self, observation: torch.Tensor) -> torch.Tensor:
        """f [B, action.size]."""
        raise NotImplementedError

    def forward(self, observation: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """The action; with `noise` [B, action.size], in units of half the bounds' distance, added and clipped to the
        bounds."""
        half = 0.5 * (self.high - self.low)
        action = self.low + half + half * self.within(observation)
        if noise is not None:
            action = torch.clamp(action + half * noise, self.low, self.high)
        return action.unflatten(1, self._shape) if len(self._shape) > 1 else action.reshape(-1, *self._shape)


class Actor(Bounded):
    """f is the tanh of an mlp with relu."""

    def __init__(self, spec: EnvSpec, hidden: list[int], *, normalize: bool = False) -> None:
        super().__init__(spec)
        self._inputs = FlatInputs(spec.observation, normalize=normalize)
        self.trunk = hidden_layers(spec.observation, hidden)
        self.head = nn.Linear(hidden[-1], spec.action.size)
        self.bound(spec)

    def plain(self, inputs: int) -> Plain | None:
        """For the engine."""
        layers = layers_of(self.trunk)
        if inputs not in (1, 2) or layers is None or self._inputs.standard is not None:
            return None
        layers += [Linear(self.head.weight, self.head.bias), Activation(tanh=True), Bounds(self.low, self.high)]
        return Plain(self._inputs.columns(), [layers], self._shape, noise=inputs == 2)

    def within(self, observation: torch.Tensor) -> torch.Tensor:
        """See `Bounded`."""
        return torch.tanh(self.head(self.trunk(self._inputs(observation))))


class OwnActor(Bounded):
    """f is the user's own: forward(observation) -> [B, *action.shape], from -1 to 1."""

    def __init__(self, config: LearnerConfig, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.network = own_network(config, spec, {"part": "actor"}, [spec.action.shape], within=1.0 + 1e-5)
        self.bound(spec)

    def within(self, observation: torch.Tensor) -> torch.Tensor:
        """See `Bounded`."""
        return self.network(observation).reshape(-1, len(self.low))


class Critics(nn.Module):
    """`count` independent mlps with relu of state and action, its ranges as [-1, 1]; `outputs` numbers each: [B,
    count, outputs].

    A layer of all of them is one batched matrix product. Weights and biases are drawn as nn.Linear draws its own."""

    def __init__(
        self, spec: EnvSpec, hidden: list[int], count: int = 1, outputs: int = 1, *, normalize: bool = False
    ) -> None:
        super().__init__()
        self._inputs = FlatInputs(spec.observation, normalize=normalize)
        self._action_size = spec.action.size
        self._scale = action_scale(spec)
        widths = (spec.observation.size + spec.action.size, *hidden, outputs)
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for width, following in itertools.pairwise(widths):
            bound = 1.0 / math.sqrt(width)
            self.weights.append(torch.empty(count, following, width).uniform_(-bound, bound))
            self.biases.append(torch.empty(count, 1, following).uniform_(-bound, bound))

    def plain(self, inputs: int, first: int | None = None) -> Plain | None:
        """For the engine."""
        if inputs != 2 or self._inputs.standard is not None:
            return None
        count = first or len(self.weights[0])
        nets = [self._layers(net) for net in range(count)]
        columns = [*self._inputs.columns(), Columns(self._action_size, 1, scale=self._scale)]
        return Plain(columns, nets, (self.weights[-1].shape[1],), stacked=True)

    def _layers(self, net: int) -> list[Layer]:
        layers: list[Layer] = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            layers += [Linear(weight[net], bias[net].view(-1)), Activation(tanh=False)]
        return layers[:-1]

    def forward(self, observation: torch.Tensor, action: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """See the class; with `first`, of so many of them only: [B, first, outputs]."""
        x = self._inputs(observation)
        x = torch.cat([x, self._scale(action.reshape(len(x), -1).to(x.dtype))], dim=1)
        count = first or len(self.weights[0])
        layers = [
            (_front(weight, count), _front(bias, count)) for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        if count == 1:
            for place, (weight, bias) in enumerate(layers, 1):
                x = linear(x, weight.flatten(0, 1), bias.flatten())
                x = x if place == len(layers) else torch.relu(x)
            return x.unsqueeze(1)
        x = x.expand(count, -1, -1)
        for place, (weight, bias) in enumerate(layers, 1):
            x = torch.baddbmm(bias, x, weight.transpose(1, 2))
            x = x if place == len(layers) else torch.relu(x)
        return x.transpose(0, 1)


def _front(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """tensor[:count]; the tensor itself where that is all, for a slice's gradient is a copy among zeros."""
    return tensor if len(tensor) == count else tensor[:count]

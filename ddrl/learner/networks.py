"""Networks: an observation in, one action value for each action out.

Written by users as ordinary torch modules, read by `dqn` (which trains them) and `export` (which turns them into what
rollouts act with). A network takes observations as the environment gives them, [B, *observation.shape] in their own
dtype (a dict of such tensors where the observation is a record of named arrays), and returns q [B, num_actions]
float32: scaling bytes and converting integers is the network's own first step, so that learner and rollout cannot
disagree on it.

Dueling heads: Q(s, a) = V(s) + A(s, a) - E_{a ~ pi}[A(s, a)] (Wang et al. 2016), so that E_pi[Q(s, a)] = V(s). pi is
    mean      uniform: the sample mean of the advantages (their eq. 9)
    policy    the acting policy: epsilon-greedy over the advantages
    softmax   softmax(A(s, .))
Departure from the paper: the mlp's two streams share all hidden layers, and its V and A are rows of one linear layer,
which costs one matrix product instead of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from ddrl.core.config import LearnerConfig
from ddrl.core.errors import ConfigError
from ddrl.core.specs import ACTION_MASK, FORBIDDEN, Array, ArraySpec, EnvSpec
from ddrl.learner.algorithm import CNN_KINDS, image_features, image_of, network_kind, require_discrete
from ddrl.learner.own_networks import Standardize, own_network, require_tensors
from ddrl.learner.plain import Columns, Dueling, Linear, Plain, Scale, layers_of

# -- observations ------------------------------------------------------------------------------------------------------
# Observations as tensors: one tensor, or a dict of them by name where the environment gives a record of arrays.


Observation = Any  # a tensor [B, *shape], or a dict of such tensors; torch's types do not say which


def as_tensors(observations: Array, observation: ArraySpec, device: torch.device) -> Observation:
    """[B, *shape], structured where `observation` is a record, as tensors on `device`."""
    if not observation.fields:
        return torch.from_numpy(np.ascontiguousarray(observations)).to(device)
    # Copies: the fields of a structured array lie at any offset, which torch does not take.
    return {name: torch.from_numpy(observations[name].copy()).to(device) for name in observation.arrays}


def input_scale(array: ArraySpec) -> Scale:
    """By which its ranges become [0, 1], its numbers flat; bytes without any too."""
    ranges = array.ranges or (((0.0, 255.0),) if array.dtype == "uint8" else ((0.0, 1.0),))
    return _scale([low for low, _ in ranges], [1.0 / (high - low) for low, high in ranges])


def action_scale(spec: EnvSpec) -> Scale:
    """By which the ranges of the actions become [-1, 1]."""
    halves = [0.5 * (high - low) for low, high in spec.action.ranges] or [1.0]
    centres = [low + 0.5 * (high - low) for low, high in spec.action.ranges] or [0.0]
    return _scale(centres, [1.0 / half for half in halves])


def _scale(offsets: list[float], factors: list[float]) -> Scale:
    if len(set(zip(offsets, factors, strict=True))) == 1:
        return Scale(offsets[0], factors[0])
    return Scale(torch.tensor(offsets, dtype=torch.float32), torch.tensor(factors, dtype=torch.float32))


class FlatInputs(nn.Module):
    """Observations in their own dtype and shape -> [..., observation.size] float32, by request normalized; the arrays
    of a record side by side, in its order."""

    def __init__(self, observation: ArraySpec, *, normalize: bool = False) -> None:
        super().__init__()
        self.standard = Standardize(observation.size) if normalize else None
        self._record = bool(observation.fields)
        self._arrays = [(name, array, input_scale(array)) for name, array in observation.arrays.items()]

    def columns(self) -> list[Columns]:
        """For the engine."""
        return [Columns(array.size, 0, name if self._record else None, scale) for name, array, scale in self._arrays]

    def forward(self, observation: Observation, leading: int = 1) -> torch.Tensor:
        """See the class; `leading` axes stay as they are."""
        flat = self._numbers(observation, leading)
        return flat if self.standard is None else self.standard(flat)

    def _numbers(self, observation: Observation, leading: int) -> torch.Tensor:
        if self._record:
            flat = [self._flat(observation[name], array, scale, leading) for name, array, scale in self._arrays]
            return torch.cat(flat, dim=leading)
        _, array, scale = self._arrays[0]
        return self._flat(observation, array, scale, leading)

    def _flat(self, x: torch.Tensor, array: ArraySpec, scale: Scale, leading: int) -> torch.Tensor:
        if array.dtype != "float32":
            x = x.float()
        if len(array.shape) != 1:
            x = x.flatten(leading) if array.shape else x.unsqueeze(leading)
        return scale(x)


# -- networks ----------------------------------------------------------------------------------------------------------


def hidden_layers(observation: ArraySpec, hidden: list[int], *, normalized: bool = False) -> nn.Sequential:
    """Linear layers with relu, by request with layer normalization before it."""
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise((observation.size, *hidden)):
        norm = [nn.LayerNorm(following)] if normalized else []
        layers += [nn.Linear(width, following), *norm, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def dueling_values(value: torch.Tensor, advantage: torch.Tensor, form: str, epsilon: float) -> torch.Tensor:
    """Q [B, A, ...] from V [B, 1, ...] and A [B, A, ...] by a form; `epsilon` is that of "policy"."""
    if form == "softmax":
        expected = (torch.softmax(advantage, dim=1) * advantage).sum(dim=1, keepdim=True)  # E_pi[A]
    else:
        expected = advantage.mean(dim=1, keepdim=True)
    if form == "policy":
        expected = epsilon * expected + (1.0 - epsilon) * advantage.amax(dim=1, keepdim=True)
    return value + (advantage - expected)


class ValueHead(nn.Module):
    """Features [B, F] -> q [B, num_actions], or [B, num_actions, atoms] where each action has several values; with
    `stream_width` each stream has a hidden layer of its own (Wang et al. 2016, fig. 1)."""

    def __init__(
        self, features: int, num_actions: int, form: str, stream_width: int = 0, atoms: int = 1, epsilon: float = 0.0
    ) -> None:
        super().__init__()
        self.form = form
        self.epsilon = epsilon
        self.stream_width = stream_width
        self.features = features
        self.num_actions = num_actions
        self.atoms = atoms
        streams = 1 if form == "none" else 2
        if stream_width:
            self.hidden = nn.Linear(features, streams * stream_width)
        width = stream_width or features
        if form == "none":
            self.advantage = nn.Linear(width, num_actions * atoms)
        elif stream_width:
            self.value = nn.Linear(width, atoms)
            self.advantage = nn.Linear(width, num_actions * atoms)
        else:
            self.value_advantage = nn.Linear(width, (1 + num_actions) * atoms)  # V first

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """q [B, num_actions] or [B, num_actions, atoms]."""
        return self.outputs(features)["q"]

    def outputs(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """q, and where there are two streams "value" [B, 1] and "advantage" [B, num_actions] (then [atoms], if any)."""
        if self.stream_width:
            features = torch.relu(self.hidden(features))
        if self.form == "none":
            return {"q": self._by_action(self.advantage(features), self.num_actions)}
        if self.stream_width:
            value_features, advantage_features = features.split(self.stream_width, dim=1)
            value = self._by_action(self.value(value_features), 1)
            advantage = self._by_action(self.advantage(advantage_features), self.num_actions)
        else:
            both = self._by_action(self.value_advantage(features), 1 + self.num_actions)
            value = both[:, :1]
            advantage = both[:, 1:]
        return {"q": dueling_values(value, advantage, self.form, self.epsilon), "value": value, "advantage": advantage}

    @property
    def linear(self) -> bool:
        """Whether q is a fixed linear map of the last layer's output."""
        return not self.stream_width and self.form in ("mean", "none")

    @property
    def last(self) -> nn.Linear:
        """That layer, where q is such a map."""
        return self.advantage if self.form == "none" else self.value_advantage

    def mixing(self) -> torch.Tensor:
        """That map: [num_actions, rows of the last layer]."""
        identity = torch.eye(self.num_actions)
        if self.form == "none":
            return identity
        return torch.cat([torch.ones(self.num_actions, 1), identity - 1.0 / self.num_actions], dim=1)

    def _by_action(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return x if self.atoms == 1 else x.unflatten(1, (rows, self.atoms))


class WithHead(nn.Module):
    """A network of the library: the features [B, F] of observations, and a head."""

    head: ValueHead

    def features(self, observation: Any) -> torch.Tensor:
        """What the head is given [B, F]."""
        raise NotImplementedError

    def forward(self, observation: Observation) -> torch.Tensor:
        """q [B, num_actions] or [B, num_actions, atoms]."""
        return self.head(self.features(observation))

    def outputs(self, observation: Observation) -> dict[str, torch.Tensor]:
        """q and the two streams (`ValueHead.outputs`)."""
        return self.head.outputs(self.features(observation))


class MLP(WithHead):
    """Flattened observation (of a record: all its arrays) -> hidden layers with relu -> head. Byte observations are
    scaled to [0, 1]."""

    def __init__(
        self,
        observation: ArraySpec,
        num_actions: int,
        hidden: list[int],
        form: str,
        atoms: int = 1,
        epsilon: float = 0.0,
        *,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.inputs = FlatInputs(observation, normalize=normalize)
        self.trunk = hidden_layers(observation, hidden)
        self.head = ValueHead([observation.size, *hidden][-1], num_actions, form, 0, atoms, epsilon)

    def features(self, observation: torch.Tensor) -> torch.Tensor:
        """What the head is given [B, F]."""
        return self.trunk(self.inputs(observation))

    def plain(self, inputs: int) -> Plain | None:
        """For the engine; a head whose form weighs actions by their values is none of plain layers."""
        head = self.head
        layers = layers_of(self.trunk)
        if inputs != 1 or layers is None or not head.linear or self.inputs.standard is not None:
            return None
        layers.append(Linear(head.last.weight, head.last.bias))
        if head.form == "mean":
            layers.append(Dueling(head.atoms))
        shape = (head.num_actions,) if head.atoms == 1 else (head.num_actions, head.atoms)
        return Plain(self.inputs.columns(), [layers], shape)


class NormalizedMLP(nn.Module):
    """Flattened observation -> (linear, layer normalization, relu) for each hidden layer -> q [B, num_actions], which
    keeps Q-learning stable without a target network (Gallici et al. 2024)."""

    def __init__(self, spec: EnvSpec, hidden: list[int]) -> None:
        super().__init__()
        self._inputs = FlatInputs(spec.observation)
        self.trunk = hidden_layers(spec.observation, hidden, normalized=True)
        self.head = nn.Linear(hidden[-1], spec.num_actions)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.head(self.trunk(self._inputs(observation)))

    def plain(self, inputs: int) -> Plain | None:
        """For the engine."""
        layers = layers_of(self.trunk)
        if inputs != 1 or layers is None:
            return None
        layers.append(Linear(self.head.weight, self.head.bias))
        return Plain(self._inputs.columns(), [layers], (len(self.head.weight),))


class Convolved(nn.Module):
    """Convolutions over an image [C, H, W] ([H, W, C], [H, W], [frames, H, W, C]): its features [B, F]."""

    def __init__(self, observation: ArraySpec, kind: str) -> None:
        super().__init__()
        self._image = image_of(kind, observation)
        self.scale = input_scale(observation).shaped(observation.shape)
        self._bytes = observation.dtype == "uint8"
        channels = self._image.channels
        layers: list[nn.Module] = []
        for outputs, kernel, stride in CNN_KINDS[kind].layers:
            layers += [nn.Conv2d(channels, outputs, kernel, stride), nn.ReLU(inplace=True)]
            channels = outputs
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        self.width = image_features(kind, self._image)

    def features(self, observation: torch.Tensor) -> torch.Tensor:
        """[B, F], F = `width`."""
        x = observation
        scale = self.scale
        if not scale.identity and (scale.shifts or not self._bytes):
            x = scale(x.float())
            scale = Scale()
        if self._image.stacked:
            x = x.permute(0, 1, 4, 2, 3).flatten(1, 2)
        elif self._image.channels_last:
            x = x.permute(0, 3, 1, 2)
        elif self._image.add_channel:
            x = x.unsqueeze(1)
        # The CPU's convolutions are differentiated a sixth faster where a pixel's channels lie together; CUDA's put
        # them together anyway, image by image.
        together = x.device.type == "cuda" or (x.device.type == "cpu" and torch.is_grad_enabled())
        x = x.to(torch.float32, memory_format=torch.channels_last if together else torch.preserve_format)
        if not scale.identity:
            x = x.mul_(scale.factor)  # bytes, so x is a copy; fresh memory would cost as much as the product
        return self.trunk(x)


class CNN(Convolved, WithHead):
    """Convolutions, then a stream each for V and A.

    `nature_cnn` is the network of Mnih et al. (2015); `small_cnn` that of van Hasselt et al. (2019, data-efficient
    Rainbow), which costs a seventh of it: what a trainer without an accelerator can afford."""

    def __init__(
        self,
        observation: ArraySpec,
        num_actions: int,
        form: str,
        kind: str = "nature_cnn",
        atoms: int = 1,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__(observation, kind)
        self.head = ValueHead(self.width, num_actions, form, CNN_KINDS[kind].stream_width, atoms, epsilon)


class PicturesAndVector(WithHead):
    """Named arrays: convolutions of each picture, beside the numbers of the others, then streams as those of `CNN`."""

    def __init__(
        self, observation: ArraySpec, num_actions: int, form: str, kind: str, atoms: int, epsilon: float
    ) -> None:
        super().__init__()
        pictures = {name: array for name, array in observation.fields if array.is_picture}
        self._names = list(pictures)
        self.pictures = nn.ModuleList(Convolved(array, kind) for array in pictures.values())
        rest = [(name, array) for name, array in observation.fields if name not in pictures]
        self._rest = FlatInputs(ArraySpec((), "void", tuple(rest))) if rest else None
        width = sum(picture.width for picture in self._convolved()) + sum(array.size for _, array in rest)
        self.head = ValueHead(width, num_actions, form, CNN_KINDS[kind].stream_width, atoms, epsilon)

    def _convolved(self) -> list[Convolved]:
        return list(self.pictures)  # type: ignore[arg-type]

    def features(self, observation: Observation) -> torch.Tensor:
        """What the head is given [B, F]."""
        seen = zip(self._convolved(), self._names, strict=True)
        features = [picture.features(observation[name]) for picture, name in seen]
        if self._rest is not None:
            features.append(self._rest(observation))
        return torch.cat(features, dim=1)


class Masked(nn.Module):
    """A network of values [..., A] or [..., A, N] that sees observations without their mask, and gives FORBIDDEN for
    each action that is not allowed: no maximum takes it. lowest: it gives logits, of which the first atom is the least
    value."""

    def __init__(self, network: nn.Module, spec: EnvSpec, *, lowest: bool = False) -> None:
        super().__init__()
        self.network = network
        self._alone = not spec.unmasked.observation.fields
        self._lowest = lowest

    def forward(self, observation: Observation, *further: Any) -> Any:
        """See the class; further outputs as they are."""
        seen = {name: array for name, array in observation.items() if name != ACTION_MASK}
        given = self.network(seen["observation"] if self._alone else seen, *further)
        values, *rest = given if isinstance(given, tuple) else (given,)
        mask: torch.Tensor = observation[ACTION_MASK]
        allowed = (mask | ~mask.any(-1, keepdim=True)).view(*mask.shape, *(1,) * (values.dim() - mask.dim()))
        other = torch.full((), FORBIDDEN, device=values.device)
        if self._lowest:
            other = other * (torch.arange(values.shape[-1], device=values.device) > 0)
        values = torch.where(allowed, values, other)
        return (values, *rest) if rest else values


def masked(network: nn.Module, spec: EnvSpec, *, lowest: bool = False) -> nn.Module:
    """The network, which was made for `spec.unmasked`, with forbidden actions masked where the environment names
    any."""
    return Masked(network, spec, lowest=lowest) if spec.masked else network


class Form(nn.Module):
    """A network as it acts: `outputs` computes what a chooser needs from the network and what that is given."""

    def __init__(self, network: nn.Module, outputs: Callable[..., Any]) -> None:
        super().__init__()
        self.network = network
        self._outputs = outputs

    def forward(self, *inputs: Any) -> Any:
        """A tensor, or a tuple of them."""
        return self._outputs(self.network, *inputs)


def acting_values(network: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The module that acts for a network of action values, and its outputs: "q", and where it is the library's and
    dueling also "value" and "advantage"."""
    if type(network) in (MLP, CNN, PicturesAndVector) and network.head.form != "none":  # type: ignore[union-attr]
        form = Form(network, lambda library, observation: tuple(library.outputs(observation).values()))
        return form, ("q", "value", "advantage")
    return network, ("q",)


def make_network(
    config: LearnerConfig, spec: EnvSpec, *, seed: int | None = None, atoms: int = 1, epsilon: float = 0.0
) -> nn.Module:
    """The network that `config.network` names, checked on a batch of observations; `seed` sets torch's generator first.
    `atoms`: values for each action; `epsilon`: that of the acting policy, for learner.dueling = policy.

    Raises ConfigError for continuous actions, NetworkError for a module that cannot be found, built, or that returns
    something other than action values [B, num_actions] float32."""
    require_discrete(spec, "a network of action values")
    require_tensors(spec.observation)
    if seed is not None:
        torch.manual_seed(seed)
    name = network_kind(config.network, spec.observation)
    if name == "mlp":
        network: nn.Module = MLP(
            spec.observation,
            spec.num_actions,
            config.hidden,
            config.dueling,
            atoms,
            epsilon,
            normalize=config.normalize,
        )
    elif name in CNN_KINDS and config.normalize:
        raise ConfigError(
            f"learner.normalize: learner.network = {name} sees pictures, which are scaled by their bounds: leave it out"
        )
    elif name in CNN_KINDS:
        kind = PicturesAndVector if spec.observation.fields else CNN
        network = kind(spec.observation, spec.num_actions, config.dueling, name, atoms, epsilon)
    else:
        told, row = ({}, ()) if atoms == 1 else ({"atoms": atoms}, (atoms,))
        network = own_network(config, spec, {"part": "value", **told}, [(spec.num_actions, *row)])
    return network


# -- distributions of the return --------------------------------------------------------------------------------------


class ImplicitQuantiles(nn.Module):
    """A network of the library, with its features multiplied by an embedding of the fraction before its head:
    Z_tau(s, .) = head(psi(s) * relu(W [cos(pi k tau)]_k + b)), k = 0 .. cosines - 1 (Dabney et al. 2018b, eq. 4).

    The head of an mlp is one linear layer, so all its hidden layers are computed once for all fractions; where all rows
    share their fractions, the layer's weights are multiplied by the embedding in place of each row's features."""

    def __init__(self, network: WithHead, cosines: int) -> None:
        super().__init__()
        self.network = network
        self.cosines = cosines
        self.embedding = nn.Linear(cosines, network.head.features)
        self._mixing = network.head.mixing() if network.head.linear else None

    def forward(self, observation: torch.Tensor, fraction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantiles [B, A, N] at the fractions [B, N], or at [N] for all rows, and these fractions."""
        features = self.network.features(observation)  # [B, F]
        steps = torch.arange(self.cosines, dtype=fraction.dtype, device=fraction.device) * math.pi
        embedded = torch.relu(self.embedding(torch.cos(fraction.unsqueeze(-1) * steps)))  # [B, N, F] or [N, F]
        if fraction.dim() == 1 and self._mixing is not None:
            layer = self.network.head.last
            mixing = self._mixing = self._mixing.to(features.device)  # a copy only where the network has moved
            weight = (mixing @ layer.weight).unsqueeze(1) * embedded  # [A, N, F]
            values = features @ weight.flatten(0, 1).t()  # [B, A N]
            return values.unflatten(1, weight.shape[:2]) + (mixing @ layer.bias).unsqueeze(1), fraction
        mixed = (features.unsqueeze(1) * embedded).flatten(0, 1)  # [B N, F]
        values = self.network.head(mixed)  # [B N, A]
        return values.unflatten(0, (-1, fraction.shape[-1])).transpose(1, 2), fraction


def one_of_each_share(uniform: torch.Tensor) -> torch.Tensor:
    """Fractions (i + u_i) / N of numbers u [..., N] drawn uniformly from [0, 1): stratified
    sampling, unbiased and of lower variance than free draws."""
    count = uniform.shape[-1]
    return (uniform + torch.arange(count, dtype=uniform.dtype, device=uniform.device)) / count


# -- noisy -------------------------------------------------------------------------------------------------------------
# Noisy layers: parameters with a learned scale of noise, which explores in place of epsilon (Fortunato et al. 2018).
#
# Noise is an input of the network, so that rollouts draw it without torch and an update is a function of its inputs.


class NoisyLinear(nn.Linear):
    """y = (W + S * f(e_out) f(e_in)^T) x + b + s * f(e_out), f(x) = sign(x) sqrt|x| (factorized noise, eq. 10 and 11);
    without noise y = W x + b.

    Factorized noise needs no matrix of its own for each row: y = W x + b + f(e_out) * (S (f(e_in) * x) + s)."""

    def __init__(self, width_in: int, width_out: int, sigma: float) -> None:
        super().__init__(width_in, width_out)  # W and b are drawn as in the paper's section 3.2
        scale = sigma / width_in**0.5
        self.weight_sigma = nn.Parameter(torch.full((width_out, width_in), scale))
        self.bias_sigma = nn.Parameter(torch.full((width_out,), scale))
        self.noise: torch.Tensor | None = None  # [B or 1, width_in + width_out], set for one forward pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[B, width_out] from [B, width_in]."""
        mean = super().forward(input)
        if self.noise is None:
            return mean
        noise = self.noise.sign() * self.noise.abs().sqrt()
        of_input, of_output = noise.split([self.in_features, self.out_features], dim=1)
        return mean + of_output * linear(input * of_input, self.weight_sigma, self.bias_sigma)


class NoisyNetwork(nn.Module):
    """A network whose linear layers are noisy: (observation [B, ...], noise [B or 1, self.noise]) -> what it gives;
    without noise it computes with the means."""

    def __init__(self, network: nn.Module, sigma: float) -> None:
        super().__init__()
        self.network = network
        for parent in list(network.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and "bias" in dict(child.named_parameters()):
                    setattr(parent, name, NoisyLinear(child.in_features, child.out_features, sigma))
        self.layers = [layer for layer in network.modules() if isinstance(layer, NoisyLinear)]
        self.noise = sum(layer.in_features + layer.out_features for layer in self.layers)  # numbers of one draw

    def forward(self, observation: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """See the class."""
        if noise is None:
            return self.network(observation)
        pieces = noise.split([layer.in_features + layer.out_features for layer in self.layers], dim=1)
        for layer, piece in zip(self.layers, pieces, strict=True):
            layer.noise = piece
        try:
            return self.network(observation)
        finally:
            for layer in self.layers:
                layer.noise = None


# -- recurrent ---------------------------------------------------------------------------------------------------------
# Recurrent action values: an LSTM along sequences, and what a loss along them needs, as pure functions of tensors.


class RecurrentValues(nn.Module):
    """Observations [B, T, *observation.shape] and a state [B, 2 units] (h, then c) -> q [B, T, num_actions].

    The cell is written out (Hochreiter & Schmidhuber 1997, with forget gates): a step is exported without a loop.
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

    def act(self, observation: Observation, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [N, num_actions] of observations [N, ...] and states [N, 2 units], and the next states."""
        following = self.step(self.features(observation, 1), memory)
        return self.values(following[:, : self.units]), following

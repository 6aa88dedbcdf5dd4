"""Networks as people publish or write them, each for the observations of its attribute `seen`."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from ddrl.core.specs import ArraySpec, EnvSpec

ACTIONS = 3
VECTOR = EnvSpec("Vector-v0", ArraySpec((4,), "float32"), ACTIONS)
SCREEN = EnvSpec("Screen-v0", ArraySpec((2, 36, 36), "uint8"), ACTIONS)
CODES = EnvSpec("Codes-v0", ArraySpec((4,), "float32", ranges=((0.0, 9.0),)), ACTIONS)
ENTITIES = EnvSpec(
    "Entities-v0",
    ArraySpec.record({"me": ArraySpec((3,), "float32"), "others": ArraySpec((5, 3), "float32")}),
    ACTIONS,
)
PICTURE_AND_VECTOR = EnvSpec(
    "PictureAndVector-v0",
    ArraySpec.record({"screen": ArraySpec((2, 36, 36), "uint8"), "me": ArraySpec((3,), "float32")}),
    ACTIONS,
)
BYTES = EnvSpec("Bytes-v0", ArraySpec((4,), "uint8", ranges=((0.0, 9.0),)), ACTIONS)


class Net(nn.Module):
    """`body` is between a first layer of 8 features and the values."""

    seen: ClassVar[EnvSpec] = VECTOR

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.first = nn.Linear(spec.observation.size, 8)
        self.body = self.make()
        self.last = nn.Linear(8, spec.num_actions)

    def make(self) -> nn.Module:
        return nn.Identity()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(x))

    def forward(self, x: Any) -> torch.Tensor:
        return self.last(self.body(self.features(x)))


def _sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class BatchNormMLP(Net):
    def make(self) -> nn.Module:
        return _sequence(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())


class LayerNormMLP(Net):
    def make(self) -> nn.Module:
        return _sequence(nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())


class GroupNormMLP(Net):
    def make(self) -> nn.Module:
        return _sequence(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Mish())


class RMSNormMLP(Net):
    def make(self) -> nn.Module:
        return _sequence(nn.Linear(8, 8), nn.RMSNorm(8), nn.ELU())


class OldWeightNorm(Net):
    def make(self) -> nn.Module:
        return _sequence(weight_norm(nn.Linear(8, 8)), nn.Tanh())


class NewWeightNorm(Net):
    def make(self) -> nn.Module:
        return _sequence(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh())


class OldSpectralNorm(Net):
    def make(self) -> nn.Module:
        return _sequence(spectral_norm(nn.Linear(8, 8)), nn.ReLU())


class NewSpectralNorm(Net):
    def make(self) -> nn.Module:
        return _sequence(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU())


class Orthogonal(Net):
    def make(self) -> nn.Module:
        return parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder")


class DropoutMLP(Net):
    def make(self) -> nn.Module:
        return _sequence(nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.AlphaDropout(0.1))


class Residual(Net):
    def make(self) -> nn.Module:
        return nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        for layer in self.body:  # type: ignore[attr-defined]
            h = h + torch.relu(layer(h))
        return self.last(h)


class DenseNet(Net):
    def make(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(12, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        a = torch.relu(self.body["a"](h))  # type: ignore[index]
        return self.last(self.body["b"](torch.cat([h, a], -1)))  # type: ignore[index]


class NoisyInside(Net):
    """Draws its noise in training mode alone, as the usual implementations do."""

    def make(self) -> nn.Module:
        self.sigma = nn.Parameter(torch.full((8, 8), 0.1))
        self.register_buffer("epsilon", torch.zeros(8, 8))
        return nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.body.weight
        if self.training:
            self.epsilon.copy_(torch.randn(8, 8))
            weight = weight + self.sigma * self.epsilon
        return self.last(functional.linear(self.features(x), weight, self.body.bias))


class Duel(Net):
    def make(self) -> nn.Module:
        return nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        advantage = self.last(h)
        return self.body(h) + advantage - advantage.mean(dim=1, keepdim=True)


class EntityAttention(nn.Module):
    seen = ENTITIES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.me, self.other = nn.Linear(3, 8), nn.Linear(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(16, spec.num_actions)

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        me, others = self.me(seen["me"]).unsqueeze(1), self.other(seen["others"])
        context, _ = self.attention(me, others, others)
        return self.last(torch.cat([me, context], 2).squeeze(1))


class DeepSet(nn.Module):
    seen = ENTITIES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8))
        self.last = nn.Linear(11, spec.num_actions)

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.last(torch.cat([seen["me"], self.each(seen["others"]).amax(1)], 1))


class PaddedAttention(EntityAttention):
    """With a mask of entities that are all zero."""

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        me = self.me(seen["me"]).unsqueeze(1)
        keys = torch.cat([me, self.other(seen["others"])], 1)
        absent = (seen["others"] == 0).all(2)
        absent = torch.cat([torch.zeros_like(absent[:, :1]), absent], 1)
        context, _ = self.attention(me, keys, keys, key_padding_mask=absent)
        return self.last(torch.cat([me, context], 2).squeeze(1))


class TransformerEncoder(Net):
    def make(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True, norm_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.features(x).view(-1, 2, 4)).flatten(1))


class ScaledDotProduct(Net):
    def make(self) -> nn.Module:
        return nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.body(self.features(x).unflatten(1, (2, 4))).chunk(3, -1)
        return self.last(functional.scaled_dot_product_attention(q, k, v).flatten(1))


class Einsum(Net):
    def make(self) -> nn.Module:
        self.mix = nn.Parameter(torch.randn(2, 4, 2, 4) / 3)
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.einsum("bij,ijkl->bkl", self.features(x).view(-1, 2, 4), self.mix).reshape(-1, 8))


class GRUInside(Net):
    def make(self) -> nn.Module:
        return nn.GRU(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.features(x).view(-1, 2, 4))[0][:, -1])


class LSTMInside(Net):
    def make(self) -> nn.Module:
        return nn.LSTM(4, 4, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.features(x).view(-1, 2, 4))[0][:, -1])


class NatureCNN(nn.Module):
    seen = SCREEN

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(2, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 8, 4, 2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()
        )
        with torch.no_grad():
            width = self.convolutions(torch.zeros(1, *spec.observation.shape)).shape[1]
        self.head = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, spec.num_actions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolutions(x.float() / 255.0))


class ImpalaCNN(nn.Module):
    seen = SCREEN

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
            for _ in range(2)
        )
        self.head = nn.LazyLinear(spec.num_actions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.pool(self.enter(x / 255.0))
        for block in self.blocks:
            h = h + block(h)
        return self.head(functional.relu(h).flatten(1))


class PooledCNN(nn.Module):
    seen = SCREEN

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, groups=8),
            nn.BatchNorm2d(8), nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, spec.num_actions),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.to(torch.float32) / 255)


class Embeddings(nn.Module):
    seen = CODES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.last = nn.Linear(16, spec.num_actions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.table(x.long()).flatten(1)))


class OneHot(nn.Module):
    seen = CODES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.last = nn.Linear(40, spec.num_actions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.one_hot(x.long(), 10).float().flatten(1))


class FiLM(nn.Module):
    seen = ENTITIES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.trunk, self.modulate = nn.Linear(15, 8), nn.Linear(3, 16)
        self.last = nn.Linear(8, spec.num_actions)

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        scale, shift = self.modulate(seen["me"]).chunk(2, 1)
        return self.last(torch.relu((1 + scale) * self.trunk(seen["others"].flatten(1)) + shift))


class HyperNetwork(Net):
    def make(self) -> nn.Module:
        return nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.body(x).view(-1, 8, 8)
        return self.last(torch.bmm(weight, self.features(x).unsqueeze(2)).squeeze(2))


class Functional(Net):
    def make(self) -> nn.Module:
        self.w, self.b = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.zeros(8))
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.softplus(functional.linear(self.features(x), self.w, self.b))
        return self.last(functional.layer_norm(h, (8,)).clamp(-3, 3))


class Shared(Net):
    """One layer used three times, with weights tied to another one's."""

    def make(self) -> nn.Module:
        self.tied = nn.Linear(8, 8)
        layer = nn.Linear(8, 8)
        layer.weight = self.tied.weight
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        for _ in range(3):
            h = torch.tanh(self.body(h))
        return self.last(self.tied(h))


class Lazy(nn.Module):
    seen = VECTOR

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(spec.num_actions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class MadeInForward(nn.Module):
    seen = VECTOR

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.actions, self.layer = spec.num_actions, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            self.layer = nn.Linear(x.shape[1], self.actions)
        return self.layer(x)


class Scripted(Net):
    def make(self) -> nn.Module:
        return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def scripted_whole(spec: EnvSpec) -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, spec.num_actions)))


class CompiledInside(Net):
    def make(self) -> nn.Module:
        return torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))  # type: ignore[return-value]


def compiled_whole(spec: EnvSpec) -> nn.Module:
    return torch.compile(LayerNormMLP(spec))  # type: ignore[return-value]


def compiled_in_place(spec: EnvSpec) -> nn.Module:
    network = LayerNormMLP(spec)
    network.compile()
    return network


class RunningStatistics(Net):
    """Normalizes its observations by buffers that it keeps itself."""

    def make(self) -> nn.Module:
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.count += 1
        return super().forward(x - self.mean)


class AssignedStatistics(RunningStatistics):
    """The same by assignment."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return Net.forward(self, x - self.mean)


class ChangesItsBuffer(RunningStatistics):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = x[:, :2]
        return Net.forward(self, x)


class Frozen(Net):
    """Random features that do not learn."""

    def make(self) -> nn.Module:
        return nn.Linear(8, 8).requires_grad_(False)


class Fourier(Net):
    def make(self) -> nn.Module:
        self.register_buffer("frequencies", torch.randn(4, 4))
        return nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = 2 * math.pi * x @ self.frequencies
        return self.last(self.body(torch.cat([angle.sin(), angle.cos()], -1)))


class KAN(Net):
    def make(self) -> nn.Module:
        self.register_buffer("knots", torch.linspace(-1, 1, 5), persistent=False)
        return nn.Linear(40, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        basis = torch.exp(-((self.features(x).unsqueeze(-1) - self.knots) ** 2))
        return self.last(self.body(basis.flatten(1)))


class Mixture(Net):
    """A dense mixture of experts."""

    def make(self) -> nn.Module:
        self.gate = nn.Linear(8, 3)
        return nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        each = torch.stack([expert(h) for expert in self.body], 1)  # type: ignore[attr-defined]
        return self.last((self.gate(h).softmax(1).unsqueeze(2) * each).sum(1))


class Highway(Net):
    def make(self) -> nn.Module:
        self.carry = nn.Linear(8, 8)
        return nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        gate = torch.sigmoid(self.carry(h))
        return self.last(torch.addcmul((1 - gate) * h, gate, torch.relu(self.body(h))))


class BilinearPool(Net):
    def make(self) -> nn.Module:
        return nn.Bilinear(8, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        return self.last(self.body(h, h))


class WhereBranch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        return self.last(torch.where(x.sum(1, keepdim=True) > 0, h, -h))


class Convolved1d(Net):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.features(x).unsqueeze(1)))


class Ensemble(Net):
    def make(self) -> nn.Module:
        self.members = nn.Parameter(torch.randn(4, 8, 8) / 3)
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.matmul(self.features(x), self.members).mean(0))


class Hooked(Net):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.first.register_forward_hook(functools.partial(_scaled, factor=2.0))


def _scaled(module: nn.Module, inputs: Any, output: torch.Tensor, factor: float) -> torch.Tensor:
    return output * factor


class Mixed(Net):
    """Computes in double precision in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x).double()
        return self.last((h - h.mean(1, keepdim=True)).float())


class Checkpointed(Net):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return self.last(checkpoint(self.body, self.features(x), use_reentrant=False))


class KeywordsOnly(Net):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


class ByLength(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(len(x), -1))


class Vmapped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: self.last(torch.relu(self.first(row))))(x)


class DividesItsInput(Net):
    seen = CODES

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x /= 9.0
        return super().forward(x)


class ViT(nn.Module):
    seen = SCREEN

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 16, 12, 12)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.randn(1, 10, 16) / 50)
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, spec.num_actions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x / 255.0).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.place
        return self.head(self.encoder(tokens)[:, 0])


class ConvNeXt(nn.Module):
    seen = SCREEN

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(2, 8, 4, 4), nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.mix = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, spec.num_actions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x / 255.0)
        return self.head((h + self.mix(self.depthwise(h).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).mean((2, 3)))


class SpatialSoftmax(nn.Module):
    seen = SCREEN

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(2, 4, 4, 4), nn.Linear(8, spec.num_actions)
        line = torch.linspace(-1, 1, 9)
        self.register_buffer("grid", torch.stack(torch.meshgrid(line, line, indexing="ij")).flatten(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.convolution(x / 255.0).flatten(2).softmax(-1)
        return self.head((share.unsqueeze(2) * self.grid).sum(-1).flatten(1))


class PicturesBeside(nn.Module):
    seen = PICTURE_AND_VECTOR

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.convolution, self.vector = nn.Conv2d(2, 4, 4, 4), nn.Linear(3, 8)
        self.head = nn.Linear(332, spec.num_actions)

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        screen = torch.relu(self.convolution(seen["screen"] / 255.0)).flatten(1)
        return self.head(torch.cat([screen, torch.relu(self.vector(seen["me"]))], 1))


class ByteEmbeddings(Embeddings):
    seen = BYTES


class PointNet(nn.Module):
    seen = ENTITIES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.each, self.norm, self.last = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.Linear(8, spec.num_actions)

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.each(seen["others"].transpose(1, 2)))).max(2)[0])


class Perceiver(nn.Module):
    seen = ENTITIES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.latent, self.key = nn.Parameter(torch.randn(2, 4)), nn.Linear(3, 4)
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(8, spec.num_actions)

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        keys = self.key(seen["others"])
        latent = self.latent.unsqueeze(0).repeat(keys.shape[0], 1, 1)
        return self.last(self.attention(latent, keys, keys, need_weights=False)[0].flatten(1))


class Graph(nn.Module):
    """Messages between all pairs."""

    seen = ENTITIES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.node, self.message, self.last = nn.Linear(3, 8), nn.Linear(16, 8), nn.Linear(8, spec.num_actions)

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        h = self.node(seen["others"])
        count = h.shape[1]
        pairs = [h.unsqueeze(1).expand(-1, count, -1, -1), h.unsqueeze(2).expand(-1, -1, count, -1)]
        return self.last(torch.relu(self.message(torch.cat(pairs, -1))).sum(2).mean(1))


class Mixer(nn.Module):
    seen = ENTITIES

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.tokens, self.channels, self.last = nn.Linear(5, 5), nn.Linear(3, 3), nn.Linear(15, spec.num_actions)

    def forward(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        h = seen["others"] + self.tokens(seen["others"].mT).mT
        return self.last((h + self.channels(h)).flatten(1))


class CausalTransformer(Net):
    def make(self) -> nn.Module:
        self.place = nn.Embedding(2, 4)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(2), persistent=False)
        return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x).view(-1, 2, 4) + self.place(torch.arange(2, device=x.device))
        return self.last(self.body(h, src_mask=self.mask).flatten(1))


class Codebook(Net):
    def make(self) -> nn.Module:
        return nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        nearest = self.body(torch.cdist(h, self.body.weight).argmin(1))
        return self.last(h + (nearest - h).detach() + 0.1 * nearest)


class SparseMixture(Mixture):
    """The two best experts of each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        weight, chosen = self.gate(h).topk(2, 1)
        share = torch.zeros(h.shape[0], 3).scatter(1, chosen, weight.softmax(1))
        each = torch.stack([expert(h) for expert in self.body], 1)  # type: ignore[attr-defined]
        return self.last((each * share.unsqueeze(2)).sum(1))


class RoutedMixture(Mixture):
    """Rows go to the expert that each has chosen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        chosen = self.gate(h).argmax(1)
        mixed = torch.zeros_like(h)
        for place, expert in enumerate(self.body):  # type: ignore[arg-type]
            mixed[chosen == place] = expert(h[chosen == place])
        return self.last(mixed)


class OwnParameters(Net):
    def make(self) -> nn.Module:
        self.listed = nn.ParameterList([torch.randn(8, 8) / 3 for _ in range(2)])
        self.named = nn.ParameterDict({"shift": torch.zeros(8)})
        self.unused = nn.Linear(8, 3)
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        for weight in self.listed:
            h = torch.tanh(h @ weight + self.named["shift"])
        return self.last(h)


class Pruned(Net):
    def make(self) -> nn.Module:
        return prune.l1_unstructured(nn.Linear(8, 8), "weight", amount=0.5)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return slope


class Binarized(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Sign.apply(self.features(x) - 0.5))


class InPlace(Net):
    def make(self) -> nn.Module:
        return _sequence(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ELU(inplace=True))


class FrozenNorm(BatchNormMLP):
    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.body.eval()
        return self


class AnnealedByBuffer(Net):
    def make(self) -> nn.Module:
        self.register_buffer("steps", torch.zeros(()))
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x) * (1 - 0.5 ** (self.steps + 1))


MADE_LATE = "CompiledForward"


@functools.cache
def __getattr__(name: str) -> Any:
    """A class whose body imports torch's compiler, which takes as long as the rest of torch: made when it is used."""
    if name != MADE_LATE:
        raise AttributeError(f"no network {name!r}")

    class CompiledForward(Net):
        @torch.compile(backend="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.features(x))

    return CompiledForward


class OnItsDevice(Net):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.to(self.device)


# -- refused -----------------------------------------------------------------------------------------------------------


class Double(Net):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double()).float()


class GivesDouble(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).double()


class Half(Net):
    def make(self) -> nn.Module:
        return nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.features(x).bfloat16()).float())


class Complex(Net):
    def make(self) -> nn.Module:
        return nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.features(x).to(torch.complex64)).abs())


class PythonList(Net):
    def make(self) -> nn.Module:
        self.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.last(h)


class PlainTensor(Net):
    def make(self) -> nn.Module:
        self.scale = torch.ones(8, requires_grad=True)
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.features(x) * self.scale)


class ExtraState(Net):
    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class HoldsALock(Net):
    def make(self) -> nn.Module:
        self.lock = threading.Lock()
        return nn.Identity()


class DrawsWhileActing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * torch.randn(x.shape[0], ACTIONS)


class HiddenState(Net):
    """A recurrent state in an attribute."""

    state: torch.Tensor | None = None

    def make(self) -> nn.Module:
        return nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.state if self.state is not None and len(self.state) == len(x) else torch.zeros(len(x), 8)
        self.state = self.body(self.features(x), state).detach()
        return self.last(self.state)


class LoopsOverRows(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.last(self.features(row)) for row in x])


class ToNumpy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.from_numpy(x.numpy() * 2))


class MatrixExponential(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        return self.last(torch.linalg.matrix_exp(h.view(-1, 2, 2, 2)).flatten(1))


class ReturnsDict(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return {"q": super().forward(x)}


class GivesLogitsOfTwo(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :2]


class ThreeArguments(Net):
    def forward(self, x: torch.Tensor, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class NaNAtZero(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / x.norm(dim=1, keepdim=True))


class RecurrentOverRows(Net):
    """Batches seem sequences to a layer without batch_first."""

    def make(self) -> nn.Module:
        return nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.features(x))[0])


class CenteredByBatch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.features(x)
        return self.last(h - h.mean(0))


class NoStatistics(Net):
    def make(self) -> nn.Module:
        return nn.BatchNorm1d(8, track_running_stats=False)


class ScaledByLargest(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / max(1.0, float(x.abs().max())))


def _turned(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return -x
    return x


_scripted = functools.cache(lambda: torch.jit.script(_turned))


class ScriptedBranch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_scripted()(x))


class Squeezed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze()


class TwoRowsOnly(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(2, 4))


class WithoutGradient(Net):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class FrozenWhole(Net):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.requires_grad_(False)


class AuxiliaryInTraining(Net):
    def forward(self, x: torch.Tensor) -> Any:
        q = super().forward(x)
        return (q, q.mean()) if self.training else q


class ChangesWhatIsNeeded(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(self.first(x))
        q = self.last(h)
        h += 1
        return q


class BoundedEmbeddings(nn.Module):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, 4, max_norm=0.5), nn.Linear(16, spec.num_actions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(x.long() % 10).flatten(1))


class BufferInEvaluation(Net):
    def make(self) -> nn.Module:
        self.register_buffer("memory", torch.zeros(1, 8))
        return nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(self.features(x), self.memory.expand(x.shape[0], -1))
        self.memory = h.detach().mean(0, keepdim=True)
        return self.last(h)


class NestedLists(Net):
    def make(self) -> nn.Module:
        self.towers = [[nn.Linear(8, 8)], [nn.Linear(8, 8)]]
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.towers[1][0](self.towers[0][0](self.features(x))))


class InAClosure(Net):
    def make(self) -> nn.Module:
        layer = nn.Linear(8, 8)
        self.call = lambda h: layer(h)
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.call(self.features(x)))


class WithoutValues(Net):
    def make(self) -> nn.Module:
        return nn.Linear(8, 8, device="meta")


class Autocast(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class OfTheEnvironment(nn.Module):
    """As single files of implementations make it."""

    def __init__(self, envs: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(envs.single_observation_space.shape[0], envs.single_action_space.n)


class OfWidths(nn.Module):
    def __init__(self, observation_width: int, actions: int) -> None:
        super().__init__()
        self.layer = nn.Linear(observation_width, actions)


class StateBeside(Net):
    """As collectors of another library call it."""

    def forward(self, obs: torch.Tensor, state: Any = None, info: Any = None) -> Any:
        return super().forward(obs), state


class NoForward(nn.Module):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)


class ForbidsByInfinity(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).masked_fill(x[:, :1] > 0, -torch.inf)


class Replicated(nn.DataParallel):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(Net(spec))

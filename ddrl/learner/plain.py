"""What the engine computes in the kernel: networks of plain layers, described by their tensors.

A module of the library describes itself by a method `plain(inputs: int) -> Plain | None`; `layers_of` describes what
torch.nn.Sequential makes of plain layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

DRAWS_NOTHING = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.ReLU, nn.Tanh, nn.Flatten, nn.Sequential, nn.ParameterList)


class Linear(NamedTuple):
    """out = x weight^T + bias."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None


class Norm(NamedTuple):
    """Layer normalization of each row."""

    weight: torch.Tensor | None  # [width]
    bias: torch.Tensor | None
    epsilon: float


class Activation(NamedTuple):
    """tanh or relu."""

    tanh: bool


class Dueling(NamedTuple):
    """[(1 + actions) atoms], V first -> Q = V + A - mean A [actions atoms]."""

    atoms: int


class Bounds(NamedTuple):
    """low + half + half x, with half = (high - low) / 2; with the evaluation's second input, noise [B, width], also +
    half noise, cut off at the bounds."""

    low: torch.Tensor  # [width]
    high: torch.Tensor


Layer = Linear | Norm | Activation | Dueling | Bounds


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else _copied(tensor, device)


@lru_cache(maxsize=64)  # by the tensors' identity
def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device)


class Scale(NamedTuple):
    """x -> (x - offset) factor; tensors hold a number for each column."""

    offset: float | torch.Tensor = 0.0
    factor: float | torch.Tensor = 1.0

    @property
    def identity(self) -> bool:
        """Whether x stays as it is."""
        return not isinstance(self.factor, torch.Tensor) and (self.offset, self.factor) == (0.0, 1.0)

    @property
    def shifts(self) -> bool:
        """Whether there is an offset."""
        return isinstance(self.offset, torch.Tensor) or self.offset != 0.0

    def on(self, device: torch.device) -> Scale:
        """The same on another device; its tensors are copied there once."""
        return Scale(*(_on(part, device) if isinstance(part, torch.Tensor) else part for part in self))

    def shaped(self, shape: tuple[int, ...]) -> Scale:
        """The same with its tensors in another shape."""
        return Scale(*(part.view(shape) if isinstance(part, torch.Tensor) else part for part in self))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of its own, or `x` itself where nothing changes."""
        if self.identity:
            return x
        offset, factor = self.on(x.device)
        return (x - offset) * factor if self.shifts else x * factor


class Columns(NamedTuple):
    """Where columns of a network's first layer come from: an input of the evaluation, [B, ...] with `width` numbers a
    row, or an array of it where it is a dict."""

    width: int
    input: int = 0
    array: str | None = None
    scale: Scale = Scale()


class Plain(NamedTuple):
    """A network of plain layers. Modules say so by a method `plain(inputs: int) -> Plain | None`, where `inputs` is how
    many tensors an evaluation gives them."""

    columns: Sequence[Columns]  # side by side
    nets: Sequence[Sequence[Layer]]  # several of equal shape with the same input, or one
    shape: tuple[int, ...]  # of a row of the output of each
    stacked: bool = False  # outputs are [B, nets, *shape], else [B, *shape]
    noise: bool = False  # the evaluation's last input is noise of `Bounds`


def layers_of(module: nn.Module) -> list[Layer] | None:
    """The layers of a Sequential of plain layers, in order; None where another one is among them. A first Flatten
    counts for nothing: inputs are flattened anyway."""
    layers: list[Layer] = []
    for place, leaf in enumerate(leaves_of(module)):
        kind = type(leaf)
        if kind is nn.Linear:
            layers.append(Linear(leaf.weight, leaf.bias))  # type: ignore[arg-type]
        elif kind is nn.LayerNorm and len(leaf.normalized_shape) == 1:  # type: ignore[arg-type]
            layers.append(Norm(leaf.weight, leaf.bias, leaf.eps))  # type: ignore[arg-type]
        elif kind in (nn.ReLU, nn.Tanh):
            layers.append(Activation(kind is nn.Tanh))
        elif kind is not nn.Identity and not (kind is nn.Flatten and place == 0 and leaf.start_dim == 1):
            return None
    return layers


def leaves_of(module: nn.Module) -> list[nn.Module]:
    """The modules in a Sequential, those in further ones in their place; a list of itself for any other."""
    if type(module) is nn.Sequential:
        return [leaf for child in module for leaf in leaves_of(child)]
    return [module]


def linears(layers: Iterable[Layer]) -> Iterator[Linear]:
    """The linear ones of the layers."""
    return (layer for layer in layers if isinstance(layer, Linear))


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called when the module, or one in it, computes."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )


def draws_nothing(module: nn.Module) -> bool:
    """Whether it is known that `module` draws no random numbers: it consists of the library's own modules and of
    torch's plain layers, without hooks."""
    kinds = {type(part) for part in module.modules()}
    return not has_hooks(module) and all(
        kind in DRAWS_NOTHING or kind.__module__.startswith("ddrl.learner.") for kind in kinds
    )


def launches_alike(module: nn.Module) -> bool:
    """Whether it is known that `module` launches the same operations in every pass: it consists of the library's and of
    torch's modules, without hooks."""
    libraries = ("torch.nn.modules.", "torch.nn.utils.", "ddrl.")
    return not has_hooks(module) and all(type(part).__module__.startswith(libraries) for part in module.modules())

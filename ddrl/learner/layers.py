"""Layers of an mlp as matrix products between buffers that stay in place: forward, and gradients backward.

`make_layers` gives the kernel's, which call the BLAS library of torch, or the same by torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from ddrl._kernel import LinearLayers

# -- layers ------------------------------------------------------------------------------------------------------------

relu_backward = torch.ops.aten.threshold_backward.grad_input  # one operation; a product with `below > 0` is three


class Layer(NamedTuple):
    """One product of a forward pass; all are views that stay in place."""

    bias: torch.Tensor | None
    below: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    relu: bool = False


class Step(NamedTuple):
    """One layer of the backward pass; all are views that stay in place."""

    slope: torch.Tensor  # by the layer's output; made by the step before
    below: torch.Tensor | None  # None: the head's fixed map, without gradients
    weight: torch.Tensor
    weight_gradient: torch.Tensor | None = None
    bias_gradient: torch.Tensor | None = None
    slope_below: torch.Tensor | None = None  # None: the first layer


class TorchLayers:
    """What `_kernel.LinearLayers` does, by torch: for devices, and where torch has no BLAS that the kernel can call."""

    def __init__(self, layers: Sequence[Layer], steps: Sequence[Step]) -> None:
        self._layers = layers
        self._steps = steps

    @torch.inference_mode()  # the cheapest
    def forward(self) -> None:
        """Every layer's `out`."""
        for bias, below, weight, out, relu in self._layers:
            if bias is None:
                torch.mm(below, weight.t(), out=out)
            else:
                torch.addmm(bias, below, weight.t(), out=out)
            if relu:
                out.relu_()

    @torch.inference_mode()
    def backward(self) -> None:
        """Gradients from the first step's slope."""
        for slope, below, weight, weight_gradient, bias_gradient, slope_below in self._steps:
            if below is not None:
                torch.mm(slope.t(), below, out=weight_gradient)
                torch.sum(slope, 0, out=bias_gradient)
            if slope_below is not None:
                torch.mm(slope, weight, out=slope_below)
                if below is not None:
                    relu_backward(slope_below, below, 0, grad_input=slope_below)


Layers = TorchLayers | LinearLayers


def make_layers(layers: Sequence[Layer], steps: Sequence[Step], gemm: int) -> Layers:
    """What computes these layers: the kernel with the sgemm at this address, or torch where it is 0."""
    if not gemm:
        return TorchLayers(layers, steps)
    return LinearLayers(gemm, *([tuple(map(_array, each)) for each in some] for some in (layers, steps)))


def gemm_of_torch() -> int:
    """The address of sgemm in the BLAS library that torch itself calls; 0 where it shows none."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).sgemm_, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


def _array(given: torch.Tensor | bool | None) -> Any:
    return given.detach().numpy() if isinstance(given, torch.Tensor) else given


# -- stacks ------------------------------------------------------------------------------------------------------------
# Mlps with relu, several of equal shape beside each other, as the C++ kernel computes them: one call forward and one
# backward, in memory that is allocated once, where torch takes a call, and fresh memory, for each layer and each slope.
#
# Autograd sees one operation. Whoever moves the parameters' memory makes the stack anew.


MAX_SIZES = 8  # of which programs are kept: a node's part may have another size in each update


@dataclass(frozen=True)
class Program:
    """The calls for one number of nets and rows, in buffers of their own."""

    x: torch.Tensor  # [rows, inputs]
    out: torch.Tensor  # [nets, rows, outputs]
    slope: torch.Tensor  # the loss's, by `out`
    slope_x: torch.Tensor  # [nets, rows, inputs], by `x` through each net
    gradients: list[torch.Tensor]  # as the parameters that learn, which they are of
    layers: LinearLayers

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs at x, in memory of their own."""
        self.x.copy_(x)
        self.layers.forward()
        return self.out.clone()


class Stack:
    """`layers` are (weight [nets, width, inputs], bias [nets, width]), perhaps without the axis of nets where it is
    one; gradients of them are asked for where they `learn`. `gemm` is the address of a BLAS library's sgemm."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], gemm: int, *, learn: bool) -> None:
        self._gemm = gemm
        self._parameters = [tensor for layer in layers for tensor in layer] if learn else []
        self._layers = [_by_net(weight.detach(), bias.detach()) for weight, bias in layers]
        self._free: dict[tuple[int, int], list[Program]] = {}

    def __call__(self, x: torch.Tensor, nets: int) -> torch.Tensor:
        """[nets, rows, outputs] of the first `nets` of them at x [rows, inputs], differentiable once."""
        assert nets == len(self._layers[0][0]) or not self._parameters, "all that learn are evaluated"
        if torch.is_grad_enabled():
            return cast("torch.Tensor", _Evaluation.apply(self, nets, x, *self._parameters))
        program = self.take(nets, len(x))
        out = program.run(x)
        self.give_back(program)
        return out

    def take(self, nets: int, rows: int) -> Program:
        """A program that nobody uses: two evaluations of one graph have one each."""
        size = nets, rows
        if size not in self._free and len(self._free) == MAX_SIZES:
            del self._free[next(iter(self._free))]
        free = self._free.setdefault(size, [])
        return free.pop() if free else self._compile(nets, rows)

    def give_back(self, program: Program) -> None:
        """What it holds is valid until it is taken again."""
        self._free.get((len(program.out), len(program.x)), []).append(program)

    def _compile(self, nets: int, rows: int) -> Program:
        first = self._layers[0][0]
        last = self._layers[-1][0]
        x = torch.empty(rows, first.shape[2])
        slope_x = torch.empty(nets, rows, first.shape[2])
        out = torch.empty(nets, rows, last.shape[1])
        slope = torch.empty(nets, rows, last.shape[1])
        gradients = [torch.empty_like(parameter) for parameter in self._parameters]
        of_layers = [_by_net(*pair) for pair in zip(gradients[::2], gradients[1::2], strict=True)]
        forward: list[tuple[Any, ...]] = []
        backward: list[tuple[Any, ...]] = []
        for net in range(nets):
            below = x
            end = len(forward)
            for place, (weight, bias) in enumerate(self._layers, 1):
                top = place == len(self._layers)
                to = out[net] if top else torch.empty(rows, weight.shape[1])
                forward.append((bias[net], below, weight[net], to, not top))
                below = to
            above = slope[net]
            for place in range(len(self._layers) - 1, -1, -1):
                _, below, weight, _, _ = forward[end + place]
                slope_below = torch.empty(rows, weight.shape[1]) if place else None
                of_layer = [every[net] for every in of_layers[place]] if gradients else [None, None]
                backward.append((above, below, weight, *of_layer, slope_below))
                if slope_below is None:  # what is below the first layer is no relu's output
                    backward.append((above, None, weight, None, None, slope_x[net]))
                else:
                    above = slope_below
        calls = LinearLayers(
            self._gemm, *([tuple(map(_pointer_array, each)) for each in some] for some in (forward, backward))
        )
        return Program(x, out, slope, slope_x, gradients, calls)


class _Evaluation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: Stack, nets: int, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.stack = stack
        ctx.program = stack.take(nets, len(x))
        return ctx.program.run(x)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        program: Program = ctx.program
        program.slope.copy_(slopes[0])
        program.layers.backward()
        ctx.stack.give_back(program)
        slope_x = program.slope_x.sum(0) if ctx.needs_input_grad[2] else None
        return None, None, slope_x, *program.gradients


def _by_net(weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[nets, width, inputs] and [nets, width], of the same memory."""
    weights = weight if weight.dim() == 3 else weight.unsqueeze(0)
    return weights, bias.view(weights.shape[:2])


def _pointer_array(given: Any) -> Any:
    return given.numpy() if isinstance(given, torch.Tensor) else given

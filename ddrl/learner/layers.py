"""Layers of an mlp as matrix products between buffers that stay in place: forward, and gradients backward.

`make_layers` gives the kernel's, which call the BLAS library of torch, or the same by torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ddrl._kernel import LinearLayers

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

"""The passes of one Q-learning update through its two networks: action values forward, gradients of the parameters
backward.

Read by `dqn`, which knows targets and losses but not how a network is differentiated. Two ways, chosen by
`make_passes`:
- `AutogradPasses` for any module;
- `MLPPasses` for the library's own mlp on the CPU, written out as matrix products into buffers that are allocated once.
  It computes the
  same numbers (to rounding) in two thirds of the time: at these sizes autograd's bookkeeping and fresh memory cost as
  much as a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ddrl.learner.flat import FlatParameters
from ddrl.learner.networks import MLP


class Values(NamedTuple):
    """Action values of one batch, [B, A] each; valid until the next forward pass."""

    q_tm1: torch.Tensor  # online network, at s_tm1
    q_t: torch.Tensor  # target network, at s_t
    q_t_selector: torch.Tensor  # online network at s_t where asked for, else q_t


class Passes(Protocol):
    """Forward and backward of one update."""

    def forward(self, s_tm1: torch.Tensor, s_t: torch.Tensor, *, select_online: bool) -> Values:
        """Action values of the states [B, *observation.shape] before and after."""
        ...

    def backward(self, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Gradients, contiguous, given that of the loss by q_tm1 [B, A]; valid until the next backward pass."""
        ...

    def learning(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat vector (uint8, in the online network's layout) that the gradients of `backward` belong
        to, in their order."""
        ...


def make_passes(online: FlatParameters, target: nn.Module) -> Passes:
    """The faster of the passes that can serve these networks."""
    network = online.module
    plain = type(network) is MLP and network.head.form != "policy" and not _has_hooks(network)
    if (
        plain
        and isinstance(target, MLP)
        and not online.vector.is_cuda
        and all(part.requires_grad for part in network.parameters())
    ):
        return MLPPasses(online, target)
    return AutogradPasses(online, target)


class AutogradPasses:
    """Passes through any two modules."""

    def __init__(self, online: FlatParameters, target: nn.Module) -> None:
        self._online, self._target, self._split = online.module, target, online.split
        learning = online.parameters()
        self._parameters = list(learning.values())
        self._places = [place for place, entry in enumerate(online.layout.entries) if entry.name in learning]

    def forward(self, s_tm1: torch.Tensor, s_t: torch.Tensor, *, select_online: bool) -> Values:
        """See `Passes`."""
        with torch.no_grad():  # before the pass that is differentiated: a network's buffers must not change behind it
            q_t = self._target(s_t)
            q_t_selector = self._online(s_t) if select_online else q_t
        self._q_tm1 = self._online(s_tm1)
        return Values(self._q_tm1.detach(), q_t, q_t_selector)

    def backward(self, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """See `Passes`."""
        # A scalar whose gradient by q_tm1 is `gradient`: handing autograd the gradient itself would import sympy (0.4
        # s).
        surrogate = torch.dot(self._q_tm1.reshape(-1), gradient.reshape(-1))
        del self._q_tm1
        gradients = torch.autograd.grad(surrogate, self._parameters, allow_unused=True)
        # Adam walks parameters and gradients as memory, so a gradient must lie as its parameter does: autograd may
        # return it transposed, expanded or with channels last, and None for a parameter that was not used.
        pairs = zip(self._parameters, gradients, strict=True)
        return [torch.zeros_like(parameter) if found is None else found.contiguous() for parameter, found in pairs]

    def learning(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """See `Passes`: one part a parameter."""
        views = self._split(vector)
        return [views[place] for place in self._places]


class _Buffers(NamedTuple):
    """Memory of one batch size: layer outputs of the online network (both states) and the target network, and gradients
    by layer outputs."""

    inputs: torch.Tensor
    online: list[torch.Tensor]
    target: list[torch.Tensor]
    slopes: list[torch.Tensor]


class MLPPasses:
    """Passes through two networks of class `MLP` with the same layers; `online` must learn all its parameters.
    Gradients form one flat vector.

    Layer l of a net: h_l = relu(h_{l-1} W_l^T + b_l), the last one without relu; then Q = h_L M^T with M the mean
    dueling form as a matrix (rows: actions; columns: V, then the advantages), or the identity for a single head."""

    def __init__(self, online: FlatParameters, target: MLP) -> None:
        network: MLP = online.module
        self._inputs = network.inputs
        self._online, self._target = _tensors(network), _tensors(target)
        gradient = torch.zeros_like(online.vector)
        views = dict(
            zip((id(parameter) for parameter in online.parameters().values()), online.split(gradient), strict=True)
        )
        self._gradient = self.learning(gradient)
        self._gradients = [(views[id(layer.weight)], views[id(layer.bias)]) for layer in network.layers()]
        actions = self._online[-1][0].shape[0] - (network.head.form == "mean")
        mean = torch.cat([torch.ones(actions, 1), torch.eye(actions) - 1.0 / actions], dim=1)
        self._mixing = mean if network.head.form == "mean" else torch.eye(actions)
        self._buffers: dict[int, _Buffers] = {}

    def forward(self, s_tm1: torch.Tensor, s_t: torch.Tensor, *, select_online: bool) -> Values:
        """See `Passes`. The online network takes both states as one batch of 2 B."""
        size = s_tm1.shape[0]
        buffers = self._buffers.get(size) or self._allocate(size)
        with torch.inference_mode():
            buffers.inputs[:size] = self._inputs(s_tm1)
            buffers.inputs[size:] = self._inputs(s_t)
            rows = 2 * size if select_online else size
            q = self._run(self._online, buffers.inputs[:rows], buffers.online)
            q_t = self._run(self._target, buffers.inputs[size:], buffers.target)
        self._size = size
        return Values(q[:size], q_t, q[size:] if select_online else q_t)

    def backward(self, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """See `Passes`."""
        size = self._size
        buffers = self._buffers[size]
        with torch.inference_mode():
            slope = gradient.mm(self._mixing)  # by the last layer's output
            for place in range(len(self._online) - 1, -1, -1):
                below = (buffers.online[place - 1] if place else buffers.inputs)[:size]
                weight_gradient, bias_gradient = self._gradients[place]
                torch.mm(slope.t(), below, out=weight_gradient)
                torch.sum(slope, 0, out=bias_gradient)
                if place:
                    slope = torch.mm(slope, self._online[place][0], out=buffers.slopes[place - 1])
                    slope.mul_(below > 0)  # relu's derivative
        return self._gradient

    def learning(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """See `Passes`: the whole vector, whose padding stays zero."""
        return [vector.view(torch.float32)]

    def _run(
        self, layers: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, outputs: list[torch.Tensor]
    ) -> torch.Tensor:
        rows, last = x.shape[0], len(layers) - 1
        for place, (weight, bias) in enumerate(layers):
            x = torch.addmm(bias, x, weight.t(), out=outputs[place][:rows])
            if place != last:
                x.relu_()
        return x.mm(self._mixing.t())

    def _allocate(self, size: int) -> _Buffers:
        with torch.inference_mode():
            widths = [weight.shape[0] for weight, _ in self._online]
            buffers = _Buffers(
                torch.empty(2 * size, self._online[0][0].shape[1]),
                [torch.empty(2 * size, width) for width in widths],
                [torch.empty(size, width) for width in widths],
                [torch.empty(size, width) for width in widths[:-1]],
            )
        self._buffers[size] = buffers
        return buffers


def _tensors(network: MLP) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.weight.detach(), layer.bias.detach()) for layer in network.layers()]


def _has_hooks(module: nn.Module) -> bool:
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )

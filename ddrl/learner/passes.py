"""The passes of one update through a part's networks: outputs forward, gradients of the part's parameters backward.

The learner gives the algorithm's evaluations and, for the scalar loss that comes of them, asks for gradients. Two ways,
chosen by `make_passes`:
- `AutogradPasses` for any modules;
- `MLPPasses` for the library's own mlp on the CPU, written out as matrix products into buffers that are allocated once;
  autograd differentiates the loss by the network's outputs only. All of an update's inputs are one batch, since each of
  the mlp's rows depends on its own input alone. It computes the same numbers (to rounding) in two thirds of the time:
  at these sizes autograd's bookkeeping and fresh memory cost as much as a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ddrl.core.errors import NetworkError
from ddrl.learner.algorithm import Evaluation
from ddrl.learner.networks import MLP
from ddrl.learner.part import Part


class Passes(Protocol):
    """Forward and backward of one part's update."""

    def forward(self, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        """The outputs by name; valid until the next forward pass."""
        ...

    def backward(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of the scalar loss, contiguous; valid until the next backward pass."""
        ...

    def learning(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a flat vector (uint8, in the part's layout) that the gradients belong to, in their order."""
        ...


def make_passes(part: Part, parts: Mapping[str, Part]) -> Passes:
    """The faster of the passes that can serve this part."""
    network = part.module
    if (
        type(network) is MLP
        and network.head.linear
        and not _has_hooks(network)
        and not part.online.vector.is_cuda
        and all(parameter.requires_grad for parameter in network.parameters())
    ):
        return MLPPasses(part, parts)
    return AutogradPasses(part, parts)


class AutogradPasses:
    """Passes through any modules. What is not differentiated is evaluated first: a network's buffers must not change
    behind a pass that is. Nothing is joined into one batch: a module's rows may depend on each other."""

    def __init__(self, part: Part, parts: Mapping[str, Part]) -> None:
        self._parts, self._split = parts, part.online.split
        learning = part.online.parameters()
        self._parameters = list(learning.values())
        self._places = [place for place, entry in enumerate(part.online.layout.entries) if entry.name in learning]

    def forward(self, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        """See `Passes`."""
        outputs: dict[str, Any] = {}
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.gradient):
            part = self._parts[evaluation.part]
            module = part.target_module if evaluation.target else part.module
            if module is None:
                raise NetworkError(f"{evaluation.name} asks for a target copy of {evaluation.part}, which has none")
            if not evaluation.target and module.training != evaluation.training:
                module.train(evaluation.training)
            inputs = [outputs[given] if isinstance(given, str) else given for given in evaluation.inputs]
            with torch.set_grad_enabled(evaluation.gradient):
                outputs[evaluation.name] = module(*inputs)
        return outputs

    def backward(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """See `Passes`."""
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        # Adam walks parameters and gradients as memory, so a gradient must lie as its parameter does: autograd may
        # return it transposed, expanded or with channels last, and None for a parameter that was not used.
        pairs = zip(self._parameters, gradients, strict=True)
        return [torch.zeros_like(parameter) if slope is None else slope.contiguous() for parameter, slope in pairs]

    def learning(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """See `Passes`: one piece a parameter."""
        views = self._split(vector)
        return [views[place] for place in self._places]


class _Plan(NamedTuple):
    """Where each evaluation's rows stand: the inputs in order, and by evaluation its copy and first input."""

    inputs: list[torch.Tensor]
    online: int  # inputs that the online network takes: the first ones
    target: tuple[int, int]  # inputs that the target copy takes: from, to
    places: list[tuple[Evaluation, int]]


class _Buffers(NamedTuple):
    """Memory of one size of a plan: inputs, layer outputs of both copies, and gradients by layer outputs."""

    inputs: torch.Tensor
    online: list[torch.Tensor]
    target: list[torch.Tensor]
    slopes: list[torch.Tensor]


class MLPPasses:
    """Passes through a network of class `MLP` that learns all its parameters, and its target copy. Gradients form one
    flat vector.

    Layer l of a net: h_l = relu(h_{l-1} W_l^T + b_l), the last one without relu; then Q = M h_L with M the mean
    dueling form as a matrix (rows: actions; columns: V, then the advantages), or the identity for a single head."""

    def __init__(self, part: Part, parts: Mapping[str, Part]) -> None:
        network: MLP = part.module  # type: ignore[assignment]
        online = part.online
        self._name, self._convert, self._atoms = part.name, network.inputs, network.head.atoms
        self._online = _tensors(network)
        self._target = [] if part.target_module is None else _tensors(part.target_module)  # type: ignore[arg-type]
        gradient = torch.zeros_like(online.vector)
        parameters = online.parameters().values()
        views = dict(zip(map(id, parameters), online.split(gradient), strict=True))
        self._gradient = self.learning(gradient)
        self._views = list(views.values())
        self._gradients = [(views[id(layer.weight)], views[id(layer.bias)]) for layer in network.layers()]
        self._mixing = network.head.mixing()
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self._autograd = AutogradPasses(part, parts)
        self._differentiated: torch.Tensor | None = None

    def forward(self, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        """See `Passes`. What does not fit into one batch goes through autograd."""
        plan = self._plan(evaluations)
        self._differentiated = None
        if plan is None:
            return self._autograd.forward(evaluations)
        size = plan.inputs[0].shape[0]
        buffers = self._buffers.get((size, len(plan.inputs))) or self._allocate(size, len(plan.inputs))
        first, last = plan.target
        with torch.inference_mode():  # the cheapest mode; its tensors must not leave this class
            for place, tensor in enumerate(plan.inputs):
                buffers.inputs[place * size : (place + 1) * size] = self._convert(tensor)
            x = self._run(self._online, buffers.inputs[: plan.online * size], buffers.online)
            if last:
                x_target = self._run(self._target, buffers.inputs[first * size : last * size], buffers.target)
        outputs: dict[str, Any] = {}
        with torch.no_grad():
            q, q_target = self._mix(x), self._mix(x_target) if last else x
            for evaluation, place in plan.places:
                at = (place - first if evaluation.target else place) * size
                outputs[evaluation.name] = (q_target if evaluation.target else q)[at : at + size]
        differentiated = plan.places[0][0].name
        self._differentiated = outputs[differentiated] = outputs[differentiated].detach().requires_grad_()
        self._size, self._slots = size, len(plan.inputs)
        return outputs

    def backward(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """See `Passes`."""
        if self._differentiated is None:
            for view, gradient in zip(self._views, self._autograd.backward(loss), strict=True):
                view.copy_(gradient)
            return self._gradient
        (gradient,) = torch.autograd.grad(loss, (self._differentiated,))
        size = self._size
        buffers = self._buffers[size, self._slots]
        with torch.inference_mode():
            if self._atoms == 1:
                slope = gradient.mm(self._mixing)  # by the last layer's output
            else:
                slope = torch.matmul(self._mixing.t(), gradient).flatten(1)
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

    def _plan(self, evaluations: Sequence[Evaluation]) -> _Plan | None:
        """One batch for all evaluations, the differentiated one first; None where there is no such batch."""
        ordered = sorted(evaluations, key=lambda evaluation: (evaluation.target, not evaluation.gradient))
        if sum(evaluation.gradient for evaluation in ordered) != 1 or ordered[0].target:
            return None
        inputs: list[torch.Tensor] = []
        places: list[tuple[Evaluation, int]] = []
        online = 0
        for evaluation in ordered:
            tensor = evaluation.inputs[0]
            if evaluation.part != self._name or len(evaluation.inputs) != 1 or not isinstance(tensor, torch.Tensor):
                return None
            if evaluation.target and not self._target:
                return None
            place = next((place for place, known in enumerate(inputs) if known is tensor), len(inputs))
            if place == len(inputs):
                if inputs and tensor.shape[0] != inputs[0].shape[0]:
                    return None
                inputs.append(tensor)
            places.append((evaluation, place))
            if not evaluation.target:
                online = len(inputs)
        of_target = [place for evaluation, place in places if evaluation.target]
        between = (min(of_target), max(of_target) + 1) if of_target else (0, 0)
        return _Plan(inputs, online, between, places)

    def _run(
        self, layers: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, outputs: list[torch.Tensor]
    ) -> torch.Tensor:
        rows, last = x.shape[0], len(layers) - 1
        for place, (weight, bias) in enumerate(layers):
            x = torch.addmm(bias, x, weight.t(), out=outputs[place][:rows])
            if place != last:
                x.relu_()
        return x

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        if self._atoms == 1:
            return x.mm(self._mixing.t())
        return torch.matmul(self._mixing, x.view(len(x), -1, self._atoms))

    def _allocate(self, size: int, slots: int) -> _Buffers:
        widths = [weight.shape[0] for weight, _ in self._online]
        with torch.inference_mode():
            buffers = _Buffers(
                torch.empty(slots * size, self._online[0][0].shape[1]),
                [torch.empty(slots * size, width) for width in widths],
                [torch.empty(slots * size, width) for width in widths],
                [torch.empty(size, width) for width in widths[:-1]],
            )
        self._buffers[size, slots] = buffers
        return buffers


def _tensors(network: MLP) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.weight.detach(), layer.bias.detach()) for layer in network.layers()]


def _has_hooks(module: nn.Module) -> bool:
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )

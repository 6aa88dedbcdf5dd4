"""The passes of one update through a part's networks: outputs forward, gradients of the part's parameters backward.

The learner gives the algorithm's evaluations and, for the scalar loss that comes of them, asks for gradients. Two ways,
chosen by `make_passes`:
- `AutogradPasses` for any modules;
- `MLPPasses` for the library's own mlp, written out as matrix products into buffers that are allocated once;
  autograd differentiates the loss by the network's outputs only. All of an update's inputs are one batch, since each of
  the mlp's rows depends on its own input alone. It computes the same numbers (to rounding) in two thirds of the time:
  at these sizes autograd's bookkeeping and fresh memory cost as much as a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from ddrl.core.errors import NetworkError
from ddrl.learner import devices
from ddrl.learner.actor_critic import Actor, Critics
from ddrl.learner.algorithm import Evaluation, Loss
from ddrl.learner.devices import rows_of
from ddrl.learner.layers import Layer, Layers, Stack, Step, gemm_of_torch, make_layers
from ddrl.learner.networks import MLP
from ddrl.learner.part import Part

MAX_PROGRAMS = 8  # sizes of which buffers are kept: a node's part may have another size in each update
PLAIN_LAYERS = (nn.Linear, nn.Conv2d, nn.ReLU, nn.Tanh, nn.Flatten, nn.Sequential, nn.ParameterList)  # draw nothing


class Passes(Protocol):
    """Forward and backward of one part's update."""

    def forward(self, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        """The outputs by name; valid until the next forward pass."""
        ...

    def backward(self, loss: Loss) -> list[torch.Tensor]:
        """Gradients of the loss of the last forward pass, contiguous; valid until the next backward pass."""
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
        and all(parameter.requires_grad for parameter in network.parameters())
    ):
        return MLPPasses(part, parts)
    return AutogradPasses(part, parts)


class AutogradPasses:
    """Passes through any modules. What is not differentiated is evaluated first: a network's buffers must not change
    behind a pass that is. Nothing is joined into one batch: a module's rows may depend on each other. The layers of the
    library's actors and critics are the kernel's (`stacks.Stack`)."""

    def __init__(self, part: Part, parts: Mapping[str, Part]) -> None:
        self._name = part.name
        self._parts = parts
        self._split = part.online.split
        self._gemm = gemm_of_torch() if devices.has_kernel(part.online.vector.device) else 0
        self._stacks: dict[tuple[str, bool], Stack | None] = {}
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
            stack = self._stack(module, evaluation)
            with torch.set_grad_enabled(evaluation.gradient):
                outputs[evaluation.name] = module(*inputs) if stack is None else module(*inputs, stack=stack)
        self._outputs = dict(outputs)
        return outputs

    def backward(self, loss: Loss) -> list[torch.Tensor]:
        """See `Passes`."""
        outputs = self._outputs
        self._outputs = {}
        if loss.slopes:
            # A scalar with these derivatives: giving autograd the derivatives themselves imports sympy (0.4 s).
            pairs = [(outputs[name], slope.reshape(-1)) for name, slope in loss.slopes.items()]
            firsts = [(given[0] if isinstance(given, tuple) else given, slope) for given, slope in pairs]
            products = [torch.dot(given.reshape(-1), slope) for given, slope in firsts]
            scalar = products[0] if len(products) == 1 else torch.stack(products).sum()
        else:
            scalar = loss.scalar()
        slopes = torch.autograd.grad(scalar, self._parameters, allow_unused=True)
        gradients = cast(Sequence[torch.Tensor | None], slopes)
        # Adam walks parameters and gradients as memory, so a gradient must lie as its parameter does: autograd may
        # return it transposed, expanded or with channels last, and None for a parameter that was not used.
        each = zip(self._parameters, gradients, strict=True)
        return [torch.zeros_like(parameter) if slope is None else slope.contiguous() for parameter, slope in each]

    def learning(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """See `Passes`: one piece a parameter."""
        views = self._split(vector)
        return [views[place] for place in self._places]

    def _stack(self, module: nn.Module, evaluation: Evaluation) -> Stack | None:
        """What computes the module's layers, where that is not the module itself."""
        key = evaluation.part, evaluation.target
        if key not in self._stacks:
            self._stacks[key] = None
            if self._gemm and isinstance(module, (Actor, Critics)) and not _has_hooks(module):
                learn = evaluation.part == self._name and not evaluation.target
                self._stacks[key] = Stack(module.layers(), self._gemm, learn=learn)
        return self._stacks[key]


class _Program(NamedTuple):
    """The operations of one arrangement of evaluations at one size, in buffers of their own."""

    inputs: list[torch.Tensor]  # by slot
    layers: Layers
    rows: torch.Tensor  # the heads' outputs
    values: torch.Tensor  # Q of all rows
    outputs: dict[str, torch.Tensor]
    differentiated: str
    slope: torch.Tensor  # where the loss's slope by the differentiated output goes
    slope_rows: torch.Tensor  # and that by its rows


class MLPPasses:
    """Passes through a network of class `MLP` that learns all its parameters, and its target copy. Gradients form one
    flat vector.

    Layer l of a net: h_l = relu(h_{l-1} W_l^T + b_l), the last one without relu; then Q = M h_L with M the mean
    dueling form as a matrix (rows: actions; columns: V, then the advantages), or the identity for a single head."""

    def __init__(self, part: Part, parts: Mapping[str, Part]) -> None:
        network: MLP = part.module  # type: ignore[assignment]
        online = part.online
        self._name = part.name
        self._convert = network.inputs
        self._atoms = network.head.atoms
        self._online = _tensors(network)
        self._target = [] if part.target_module is None else _tensors(part.target_module)  # type: ignore[arg-type]
        gradient = torch.zeros_like(online.vector) if part.gradient is None else part.gradient
        parameters = online.parameters().values()
        views = dict(zip(map(id, parameters), online.split(gradient), strict=True))
        self._gradient = self.learning(gradient)
        self._views = list(views.values())
        self._gradients = [(views[id(layer.weight)], views[id(layer.bias)]) for layer in network.layers()]
        self._device = online.vector.device
        self._mixing = network.head.mixing().to(self._device).contiguous()
        self._gemm = gemm_of_torch() if devices.has_kernel(self._device) else 0
        self._programs: dict[tuple[Any, ...], _Program] = {}
        self._program: _Program | None = None
        self._autograd = AutogradPasses(part, parts)

    def forward(self, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        """See `Passes`. What does not fit into one batch goes through autograd."""
        self._program = None
        inputs: list[Any] = []
        key: list[Any] = []
        for name, part, given, target, gradient, _ in evaluations:
            tensor = given[0]
            if part != self._name or len(given) != 1 or isinstance(tensor, str):
                return self._autograd.forward(evaluations)
            slot = next((slot for slot, known in enumerate(inputs) if known is tensor), len(inputs))
            if slot == len(inputs):
                inputs.append(tensor)
            key.append((name, slot, target, gradient))
        sizes = {rows_of(tensor) for tensor in inputs}
        whole = (*key, *sizes)
        program = self._programs.get(whole)
        if program is None:
            if len(sizes) != 1 or not self._fits(key):
                return self._autograd.forward(evaluations)
            if len(self._programs) == MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            program = self._programs[whole] = self._compile(key, *sizes)
        for slot, tensor in zip(program.inputs, inputs, strict=True):
            slot.copy_(self._convert(tensor))
        program.layers.forward()
        if self._atoms > 1:
            rows = program.rows.view(len(program.rows), -1, self._atoms)
            torch.matmul(self._mixing, rows, out=program.values)
        self._program = program
        return dict(program.outputs)

    def backward(self, loss: Loss) -> list[torch.Tensor]:
        """See `Passes`."""
        program = self._program
        if program is None:
            for view, gradient in zip(self._views, self._autograd.backward(loss), strict=True):
                view.copy_(gradient)
            return self._gradient
        gradient = loss.slopes.get(program.differentiated)
        if gradient is None:
            (gradient,) = torch.autograd.grad(loss.scalar(), (program.outputs[program.differentiated],))
        if self._atoms == 1:
            program.slope.copy_(gradient)
        else:
            rows = program.slope_rows
            torch.matmul(self._mixing.t(), gradient, out=rows.view(len(rows), -1, self._atoms))
        program.layers.backward()
        return self._gradient

    def learning(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """See `Passes`: the whole vector, whose padding stays zero."""
        return [vector.view(torch.float32)]

    def _fits(self, key: list[tuple[str, int, bool, bool]]) -> bool:
        """Whether one batch serves: one evaluation of the online network is differentiated."""
        differentiated = [target for _, _, target, gradient in key if gradient]
        return differentiated == [False] and (bool(self._target) or not any(target for _, _, target, _ in key))

    def _compile(self, key: list[tuple[str, int, bool, bool]], size: int) -> _Program:
        """The program for evaluations (name, slot of its input, target, gradient) of `size` rows. Inputs of the online
        network come first, those of the target copy last; some are both."""
        differentiated, first = next((name, slot) for name, slot, _, gradient in key if gradient)
        by_copy = [sorted({slot for _, slot, target, _ in key if target is copy}) for copy in (False, True)]
        order = [first, *(slot for slot in by_copy[0] if slot != first and slot not in by_copy[1])]
        order += [slot for slot in by_copy[0] if slot != first and slot in by_copy[1]]
        order += [slot for slot in by_copy[1] if slot not in order]
        place = {slot: index for index, slot in enumerate(order)}
        fresh = partial(torch.empty, device=self._device)
        inputs = fresh(len(order) * size, self._online[0][0].shape[1])
        spans = [(0, 0), (0, 0)]  # of both copies' inputs among the ordered ones
        for copy, slots in enumerate(by_copy):
            if slots:
                places = sorted(place[slot] for slot in slots)
                spans[copy] = (places[0], places[-1] + 1)
        total = sum(end - begin for begin, end in spans) * size
        width = len(self._online[-1][0])
        rows = fresh(total, width)
        actions = len(self._mixing)
        values = fresh((total, actions) if self._atoms == 1 else (total, actions, self._atoms))
        chains = list[list[Layer]]()
        outputs = dict[str, torch.Tensor]()
        row = 0
        for copy, tensors in ((False, self._online), (True, self._target)):
            begin, end = spans[copy]
            if begin == end:
                continue
            below = inputs[begin * size : end * size]
            chain = list[Layer]()
            for place_of_layer, (weight, bias) in enumerate(tensors, 1):
                last = place_of_layer == len(tensors)
                out = rows[row : row + len(below)] if last else fresh(len(below), len(weight))
                chain.append(Layer(bias, below, weight, out, relu=not last))
                below = out
            chains.append(chain)
            for name, slot, target, _ in key:
                if target is copy:
                    at = row + (place[slot] - begin) * size
                    outputs[name] = values[at : at + size].detach().requires_grad_(name == differentiated)
            row += len(below)
        layers = [layer for chain in chains for layer in chain]
        slope = fresh(size, actions)
        slope_rows = fresh(size, width)
        steps: list[Step] = []
        if self._atoms == 1:
            layers.append(Layer(None, rows, self._mixing, values))
            steps.append(Step(slope, None, self._mixing, slope_below=slope_rows))
        above = slope_rows
        for layer in range(len(self._online) - 1, -1, -1):
            below = chains[0][layer].below[:size]
            weight = self._online[layer][0]
            slope_below = fresh(size, weight.shape[1]) if layer else None
            steps.append(Step(above, below, weight, *self._gradients[layer], slope_below))
            above = above if slope_below is None else slope_below
        ordered = [inputs[place[slot] * size : (place[slot] + 1) * size] for slot in range(len(order))]
        passes = make_layers(layers, steps, self._gemm if size else 0)
        return _Program(ordered, passes, rows, values, outputs, differentiated, slope, slope_rows)


def draws_nothing(module: nn.Module) -> bool:
    """Whether it is known that `module` draws no random numbers: it consists of the library's own modules and of
    torch's plain layers, without hooks."""
    kinds = {type(part) for part in module.modules()}
    return not _has_hooks(module) and all(
        kind in PLAIN_LAYERS or kind.__module__.startswith("ddrl.learner.") for kind in kinds
    )


def _tensors(network: MLP) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.weight.detach(), layer.bias.detach()) for layer in network.layers()]


def _has_hooks(module: nn.Module) -> bool:
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )

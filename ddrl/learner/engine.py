"""The passes of one part's update: its evaluations forward, and the gradient of its loss by its parameters backward.

Evaluations form a graph: an input may name an earlier evaluation's output. The graph is walked backwards, from the
loss's derivatives by the outputs: an evaluation passes the derivative by its named inputs on (an actor learns through
its critic), where it is added to the loss's own. Only the learning part's parameters receive a gradient: one vector of
the layout of its parameters.

There are two ways through a network:
- Networks of plain layers (`Plain`: linear, layer norm, relu, tanh, a dueling head, an actor's bounds) are computed by
  the kernel on a processor. Evaluations of one network that do not depend on each other are one batch; all that need
  nothing else in between are one call forward and one call backward, in memory that stays (`Kernel`).
- All others go through autograd, one evaluation at a time (`_Autograd`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from ddrl import _kernel
from ddrl.core.errors import NetworkError
from ddrl.core.specs import Array, Floats
from ddrl.learner import devices
from ddrl.learner.algorithm import Evaluation, Loss, Regressions
from ddrl.learner.part import Part
from ddrl.learner.plain import (
    Activation,
    Bounds,
    Columns,
    Dueling,
    Layer,
    Linear,
    Norm,
    Plain,
    has_hooks,
    layers_of,
    leaves_of,
    linears,
)

# Of each update that `Kernel.regress` makes, in the order of the kernel's columns.
REGRESSION_FIGURES: tuple[str, ...] = ("loss", "grad_norm", "td_error", "q_mean")
MAX_ARRANGEMENTS = 8  # whose memory is kept; the oldest goes: a node's batch may differ in size at each update

# -- networks in the kernel --------------------------------------------------------------------------------------------


def plain_of(module: nn.Module, inputs: Sequence[Any]) -> Plain | None:
    """The module as a network of plain layers for these inputs of an evaluation (tensors, names or numbers); None where
    it is none."""
    if has_hooks(module):
        return None
    given = [each for each in inputs if not isinstance(each, int)]
    numbers = [each for each in inputs if isinstance(each, int)]
    if type(module) is nn.Sequential:
        return None if numbers else _plain_sequence(module, given)
    if not type(module).__module__.startswith("ddrl.learner.") or not hasattr(module, "plain"):
        return None  # a subclass may compute anything
    describe: Callable[..., Plain | None] = module.plain  # type: ignore[assignment]
    return describe(len(given), *numbers)


def _plain_sequence(module: nn.Sequential, given: Sequence[Any]) -> Plain | None:
    (x,) = given if len(given) == 1 else (None,)
    layers = layers_of(module)
    if not layers or not isinstance(layers[0], Linear) or isinstance(x, dict):
        return None
    flat = isinstance(leaves_of(module)[0], nn.Flatten)
    if isinstance(x, torch.Tensor) and (x.dtype != torch.float32 or not (x.dim() == 2 or (flat and x.dim() > 1))):
        return None
    (width,) = (len(layer.weight) for layer in [*linears(layers)][-1:])
    return Plain([Columns(layers[0].weight.shape[1])], [layers], (width,))


@dataclass
class Batch:
    """Evaluations of one network that are computed as one batch."""

    plain: Plain
    level: int  # longest chain of evaluations of the same kernel before it
    evaluations: list[tuple[int, Evaluation, int]] = field(default_factory=list)  # (index, evaluation, rows)


class _Input(NamedTuple):
    """What is copied into a kernel's memory."""

    evaluation: int  # index
    columns: Columns
    scaled: bool
    to: torch.Tensor  # [rows, width]
    memory: Array  # the same
    slope: torch.Tensor | None  # the derivative by it, where it is another evaluation's output


class Kernel:
    """Networks of plain layers, all in one call forward and one call backward, in memory that stays.

    differentiated: names of evaluations. slope_of: of a parameter, the memory of the gradient by it, or None where it
    does not learn. add: gradients are added to what is there."""

    def __init__(
        self,
        batches: Sequence[Batch],
        differentiated: set[str],
        slope_of: Callable[[torch.Tensor], torch.Tensor | None],
        *,
        add: bool = False,
    ) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.learned: set[int] = set()  # addresses of all gradients that are written
        self._differentiated = differentiated
        self._slope_of = slope_of
        self._slopes: list[tuple[torch.Tensor, Array]] = []  # (output, memory of the derivative by it)
        self._inputs: list[_Input] = []
        self._places: dict[str, RowsOf] = {}  # of each evaluation's output; of several nets, the first one's
        self._networks: Any = _kernel.PlainNetworks(devices.gemm_of_torch(), add)
        for batch in batches:
            self._add_batch(batch)

    def forward(self, evaluations: Sequence[Evaluation], outputs: dict[str, Any]) -> None:
        """Add the outputs of its evaluations to `outputs`."""
        for index, columns, scaled, to, memory, _ in self._inputs:
            given: Any = evaluations[index].inputs[columns.input]
            if isinstance(given, str):
                given = outputs[given].detach()
            if columns.array is not None:
                given = given[columns.array]
            _put(memory, given if given.dim() == 2 else given.reshape(len(given), -1))
            if scaled:
                offset, factor = columns.scale.on(to.device)
                if columns.scale.shifts:
                    to.sub_(offset)
                to.mul_(factor)
        self._networks.forward()
        outputs.update(self.outputs)

    def differentiable(self, evaluations: Sequence[Evaluation], outputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Its outputs that are differentiated."""
        return [output for output, _ in self._slopes]

    def backward(self, evaluations: Sequence[Evaluation], outputs: Mapping[str, Any], slopes: Slopes) -> None:
        """Write the gradient by its parameters, from the derivatives by its outputs; add those by its named inputs."""
        for output, slope in self._slopes:
            given = slopes.of(output)
            if given is None:
                slope.fill(0.0)
            else:
                _put(slope, given)
        self._networks.backward()
        for index, columns, _, _, _, slope in self._inputs:
            if slope is not None:
                of: torch.Tensor = outputs[cast(str, evaluations[index].inputs[columns.input])]
                slopes.add(of, (slope * columns.scale.on(slope.device).factor).view(of.shape))

    @property
    def can_regress(self) -> bool:
        """Whether it is one evaluation of action values, of one input as it is, that is differentiated."""
        outputs = [output for output, _ in self._slopes]
        inputs = [given.columns for given in self._inputs]
        plain = all(columns.array is None and columns.scale.identity for columns in inputs)
        one = len(inputs) == len(outputs) == len(self.outputs) == 1
        return one and plain and outputs[0].dim() == 2

    def regress(self, batch: Regressions, optimizer: Sequence[Any]) -> Floats:
        """Make a step for each of the batch's updates, in one call; their figures [updates, 4]. `optimizer` is what
        `Part.regress` gives."""
        ((output, slope),) = self._slopes
        (given,) = self._inputs
        steps = batch.steps
        states = np.ascontiguousarray(steps.state).reshape(len(steps.state), -1)
        figures = np.empty((len(batch.order), len(REGRESSION_FIGURES)))
        action = np.ascontiguousarray(steps.action, np.int64)
        order = np.stack(batch.order)
        x = _given((given.to, None))
        of = _kernel.Rows(_numpy(output), slope)
        self._networks.regress(x, of, states, action, steps.target, order, *optimizer, figures)
        return figures

    def _add_batch(self, batch: Batch) -> None:
        """The memory and the operations of a batch; differentiated rows come first."""
        plain = batch.plain
        differentiated = self._differentiated
        evaluations = sorted(batch.evaluations, key=lambda each: each[1].name not in differentiated)
        total = sum(rows for *_, rows in evaluations)
        back = sum(rows for _, evaluation, rows in evaluations if evaluation.name in differentiated)
        by_input = any(given in differentiated for _, evaluation, _ in evaluations for given in _names(evaluation))
        width = sum(columns.width for columns in plain.columns)
        x = _memory(total, width)
        x_slope = _memory(back, width) if by_input and back else None
        noise = _memory(total, len(cast(Bounds, plain.nets[0][-1]).low)) if plain.noise else None
        begin = 0
        for index, evaluation, rows in evaluations:
            end = begin + rows
            column = 0
            slope = x_slope[begin:end] if x_slope is not None and begin < back else None
            for columns in plain.columns:
                last = column + columns.width
                given = evaluation.inputs[columns.input]
                if isinstance(given, str) and given in self._places:
                    self._networks.columns(_given(self._places[given]), _given((x[begin:end], slope)), column)
                else:
                    named = isinstance(given, str) and given in differentiated
                    of = slope[:, column:last] if slope is not None and named else None
                    self._add_input(index, columns, x[begin:end, column:last], of)
                column = last
            if noise is not None:
                columns = Columns(noise.shape[1], len(evaluation.inputs) - 1)
                self._add_input(index, columns, noise[begin:end], None)
            begin = end
        value, slope = self._add_nets(plain, (x, x_slope), back, noise)
        begin = 0
        for _, evaluation, rows in evaluations:
            end = begin + rows
            output = _shaped(value[:, begin:end], plain).detach()
            of = None
            if evaluation.name in differentiated:
                of = cast(torch.Tensor, slope)[:, begin:end]
                output.requires_grad_()
                self._slopes.append((output, _shaped(of, plain).numpy()))
            self._places[evaluation.name] = (value[0, begin:end], None if of is None else of[0])
            self.outputs[evaluation.name] = output
            begin = end

    def _add_input(self, index: int, columns: Columns, to: torch.Tensor, slope: torch.Tensor | None) -> None:
        self._inputs.append(_Input(index, columns, not columns.scale.identity, to, to.numpy(), slope))

    def _add_nets(self, plain: Plain, x: RowsOf, back: int, noise: torch.Tensor | None) -> RowsOf:
        """The operations of each net; the memory of their outputs [nets, rows, width]."""

        def memory(*lead: int, width: int) -> RowsOf:
            return _memory(*lead, len(x[0]), width), _memory(*lead, back, width) if back else None

        value, slope = memory(len(plain.nets), width=math.prod(plain.shape))
        for net, layers in enumerate(plain.nets):
            below = x
            fused = _with_relu(layers)
            for layer, relu in fused[:-1]:
                out = memory(width=_width(layer, below[0].shape[1]))
                self._add_layer(layer, relu, below, out, noise)
                below = out
            self._add_layer(*fused[-1], below, (value[net], None if slope is None else slope[net]), noise)
        return value, slope

    def _add_layer(self, layer: Layer, relu: bool, below: RowsOf, out: RowsOf, noise: torch.Tensor | None) -> None:
        rows = (_given(below), _given(out))
        if isinstance(layer, Linear | Norm):
            parameters = (layer.weight, layer.bias)
            learn = out[1] is not None
            slopes = [self._slope_of(each) if learn and each is not None else None for each in parameters]
            self.learned.update(slope.data_ptr() for slope in slopes if slope is not None)
            arrays = map(_numpy, (*parameters, *slopes))
            if isinstance(layer, Linear):
                self._networks.linear(*rows, *arrays, relu)
            else:
                self._networks.layer_norm(*rows, *arrays, layer.epsilon, relu)
        elif isinstance(layer, Activation):
            self._networks.activation(*rows, layer.tanh)
        elif isinstance(layer, Dueling):
            self._networks.dueling(*rows, layer.atoms)
        else:
            self._networks.bounds(*rows, *map(_numpy, (layer.low, layer.high, noise)))


class Inference:
    """A network's outputs outside of an update: without a gradient, in evaluation mode."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._kernels: dict[Any, Kernel] = {}  # by what their memory depends on

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The output for inputs [B, ...] on the network's device; valid until the next call."""
        network = self._network
        plain = plain_of(network, (x,)) if devices.has_kernel(x) and devices.gemm_of_torch() and len(x) else None
        if plain is None:
            training = network.training
            network.eval()
            with torch.no_grad():
                output: torch.Tensor = network(x)
            network.train(training)
            return output
        evaluation = Evaluation("output", "", (x,))
        key = x.shape, *[parameter.data_ptr() for parameter in network.parameters()]
        if key not in self._kernels:
            self._kernels.clear()
            self._kernels[key] = Kernel([Batch(plain, 0, [(0, evaluation, len(x))])], set(), lambda _: None)
        outputs: dict[str, torch.Tensor] = {}
        self._kernels[key].forward([evaluation], outputs)
        return outputs["output"]


RowsOf = tuple[torch.Tensor, torch.Tensor | None]  # values [rows, width] and derivatives [back, width]


def _memory(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


def _given(rows: RowsOf) -> _kernel.Rows:
    """Rows as the kernel takes them."""
    return _kernel.Rows(*map(_numpy, rows))


def _numpy(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().numpy()


def _put(memory: Array, tensor: torch.Tensor) -> None:
    """Copy a tensor of any type into a kernel's memory, at these sizes in less time than torch's copy_ takes."""
    if tensor.dtype == torch.bfloat16:  # which numpy lacks
        tensor = tensor.float()
    np.copyto(memory, tensor.detach().numpy() if tensor.requires_grad else tensor.numpy())


def _with_relu(layers: Sequence[Layer]) -> list[tuple[Layer, bool]]:
    """The layers, each with whether a relu follows that the kernel computes with it."""
    fused: list[tuple[Layer, bool]] = []
    for layer in layers:
        relu = isinstance(layer, Activation) and not layer.tanh
        if relu and fused and isinstance(fused[-1][0], Linear | Norm) and not fused[-1][1]:
            fused[-1] = (fused[-1][0], True)
        else:
            fused.append((layer, False))
    return fused


def _width(layer: Layer, below: int) -> int:
    if isinstance(layer, Linear):
        return len(layer.weight)
    return below - layer.atoms if isinstance(layer, Dueling) else below


def _shaped(rows: torch.Tensor, plain: Plain) -> torch.Tensor:
    """[nets, rows, width] as an evaluation's output, of the same memory."""
    by_row = rows.transpose(0, 1) if plain.stacked else rows[0]
    return by_row.view(*by_row.shape[:-1], *plain.shape)


def _names(evaluation: Evaluation) -> list[str]:
    """The outputs that it takes as inputs."""
    return [given for given in evaluation.inputs if isinstance(given, str)]


# -- networks through autograd -----------------------------------------------------------------------------------------


class Slopes:
    """The loss's derivatives by outputs, by the identity of the tensors."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}

    def of(self, output: torch.Tensor) -> torch.Tensor | None:
        """That by `output`; None where the loss does not depend on it."""
        return self._of.get(id(output))

    def add(self, output: torch.Tensor, slope: torch.Tensor | None) -> None:
        """Add to that by `output`."""
        if slope is not None:
            before = self._of.get(id(output))
            self._of[id(output)] = slope if before is None else before + slope


class Autograd:
    """One evaluation of any module.

    parameters: those that learn through it; gradients: where the gradient by each goes. add: it is added to what is
    there."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        *,
        add: bool = False,
    ) -> None:
        self._index = index
        self._module = module
        self._parameters = list(parameters)
        self._gradients = list(gradients)
        self._add = add
        self._leaves: list[tuple[torch.Tensor, torch.Tensor]] = []  # (named output, what the module was given of it)

    def forward(self, evaluations: Sequence[Evaluation], outputs: dict[str, Any]) -> None:
        """Add its output to `outputs`."""
        evaluation = evaluations[self._index]
        module = self._module
        if not evaluation.target and module.training != evaluation.training:
            module.train(evaluation.training)
        self._leaves.clear()

        def leaf(output: torch.Tensor) -> torch.Tensor:
            cut = output.detach()
            if evaluation.gradient and output.requires_grad:
                self._leaves.append((output, cut.requires_grad_()))
            return cut

        named = (_map(leaf, outputs[given]) if isinstance(given, str) else given for given in evaluation.inputs)
        inputs = list(named)
        with torch.set_grad_enabled(evaluation.gradient):
            outputs[evaluation.name] = module(*inputs)

    def differentiable(self, evaluations: Sequence[Evaluation], outputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of its output that are differentiated."""
        found: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> None:
            if tensor.requires_grad:
                found.append(tensor)

        _map(collect, outputs[evaluations[self._index].name])
        return found

    def backward(self, evaluations: Sequence[Evaluation], outputs: Mapping[str, Any], slopes: Slopes) -> None:
        """Write the gradient by its parameters, from the derivatives by its outputs; add those by its named inputs."""
        # A scalar with these derivatives: giving autograd the derivatives themselves imports sympy (0.4 s).
        products = [
            torch.dot(output.reshape(-1), slope.reshape(-1))
            for output in self.differentiable(evaluations, outputs)
            if (slope := slopes.of(output)) is not None
        ]
        wanted = [*self._parameters, *(leaf for _, leaf in self._leaves)]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if products and wanted:
            scalar = products[0] if len(products) == 1 else torch.stack(products).sum()
            found = torch.autograd.grad(scalar, wanted, allow_unused=True)
        count = len(self._parameters)
        for (output, _), slope in zip(self._leaves, found[count:], strict=True):
            slopes.add(output, slope)
        self._leaves.clear()
        if self._parameters:
            pairs = zip(self._parameters, found[:count], strict=True)
            gradients = [torch.zeros_like(parameter) if slope is None else slope for parameter, slope in pairs]
            (torch._foreach_add_ if self._add else torch._foreach_copy_)(self._gradients, gradients)


def _map(f: Callable[[torch.Tensor], Any], output: Any) -> Any:
    """A module's output (a tensor, or a tuple, list or dict of tensors) with `f` of each tensor."""
    if isinstance(output, torch.Tensor):
        return f(output)
    if isinstance(output, dict):
        items = cast(dict[str, Any], output)
        return {name: _map(f, each) for name, each in items.items()}
    if isinstance(output, tuple | list):
        each_of = cast(Sequence[Any], output)
        return [_map(f, each) for each in each_of]
    return output


# -- the engine --------------------------------------------------------------------------------------------------------


class Engine:
    """The passes of updates of `part`. Networks of plain layers go through the kernel where there is one."""

    def __init__(self, part: Part, parts: Mapping[str, Part]) -> None:
        self._part = part
        self._parts = parts
        self._by_kernel = devices.has_kernel(part.online.vector) and devices.gemm_of_torch() != 0
        learning = part.online.parameters()
        self._parameters = list(learning.values())
        self._gradient = part.learned(part.gradient)  # what `backward` gives
        views = part.online.split(part.gradient)
        named = zip(part.online.layout.entries, views, strict=True)
        self._gradients = [view for entry, view in named if entry.name in learning]
        self._arrangements: dict[tuple[Any, ...], Arrangement] = {}

    def forward(self, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
        """The outputs by name; valid until the next forward pass."""
        arrangement = self._arrangement(evaluations)
        outputs: dict[str, Any] = {}
        for unit in arrangement.units:
            unit.forward(evaluations, outputs)
        self._last = arrangement, evaluations, outputs
        return dict(outputs)

    def regressor(self, evaluations: Sequence[Evaluation]) -> Kernel | None:
        """The kernel that computes the only evaluation and writes the whole gradient of its loss, if one does."""
        arrangement = self._arrangement(evaluations)
        unit = arrangement.units[0]
        one = len(arrangement.units) == 1 and not arrangement.clear
        return unit if one and isinstance(unit, Kernel) and unit.can_regress else None

    def _arrangement(self, evaluations: Sequence[Evaluation]) -> Arrangement:
        """How these are computed."""
        key = tuple(
            [
                (name, part, target, gradient, *[_signature(given) for given in inputs])
                for name, part, inputs, target, gradient, _ in evaluations
            ]
        )
        arrangement = self._arrangements.get(key)
        if arrangement is None:
            arrangement = self._arrange(evaluations)
            if len(self._arrangements) == MAX_ARRANGEMENTS:
                del self._arrangements[next(iter(self._arrangements))]
            self._arrangements[key] = arrangement
        return arrangement

    @property
    def used_kernel(self) -> bool:
        """Whether the kernel computed a network in the last forward pass."""
        return any(isinstance(unit, Kernel) for unit in self._last[0].units)

    def backward(self, loss: Loss) -> torch.Tensor:
        """The gradient of the loss of the last forward pass, a vector float32 in the layout of the part's parameters
        (`Part.gradient`); valid until the next backward pass."""
        arrangement, evaluations, outputs = self._last
        tensors = [tensor for unit in arrangement.units for tensor in unit.differentiable(evaluations, outputs)]
        slopes = Slopes()
        known = {id(tensor) for tensor in tensors}
        for output, slope in loss.derivatives:
            if id(output) in known:
                slopes.add(output, slope)
            else:  # made of outputs by torch
                self._add_slopes(torch.dot(output.reshape(-1), slope.reshape(-1)), tensors, slopes)
        if not callable(loss.loss) and (loss.loss.requires_grad or not loss.derivatives):
            self._add_slopes(loss.loss, tensors, slopes)
        if arrangement.clear:
            self._part.gradient.zero_()
        for unit in reversed(arrangement.units):
            unit.backward(evaluations, outputs, slopes)
        self._last = arrangement, (), {}  # autograd's graph goes: on CUDA the next pass may be on another stream
        return self._gradient

    @staticmethod
    def _add_slopes(scalar: torch.Tensor, tensors: list[torch.Tensor], slopes: Slopes) -> None:
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(scalar, tensors, allow_unused=True)
        for tensor, slope in zip(tensors, found, strict=True):
            slopes.add(tensor, slope)

    def _arrange(self, evaluations: Sequence[Evaluation]) -> Arrangement:
        """Which evaluations go through the kernel together, in an order in which each follows its named inputs.

        What is not differentiated is evaluated first, where it can be: a module's buffers must not change behind a pass
        that is differentiated."""
        differentiated: set[str] = set()
        early: set[str] = set()
        for evaluation in evaluations:
            learns = evaluation.part == self._part.name and not evaluation.target
            if evaluation.gradient and (learns or differentiated.intersection(_names(evaluation))):
                differentiated.add(evaluation.name)
            if not evaluation.gradient and early.issuperset(_names(evaluation)):
                early.add(evaluation.name)
        order = sorted(range(len(evaluations)), key=lambda index: evaluations[index].name not in early)
        groups: list[list[Batch] | int] = []  # batches of one kernel, or the index of an evaluation through autograd
        rows: dict[str, int] = {}
        for index in order:
            evaluation = evaluations[index]
            rows[evaluation.name] = _rows(evaluation, rows)
            plain = self._plain(evaluation, evaluation.name in differentiated)
            if plain is None or not rows[evaluation.name]:
                groups.append(index)
                continue
            batches = groups[-1] if groups and isinstance(groups[-1], list) else None
            if batches is None or not _can_join(evaluation, plain, batches):
                batches = []
                groups.append(batches)
            _join(index, evaluation, rows[evaluation.name], plain, batches)
        # Several units that learn add to one gradient; one kernel that learns all parameters just writes it.
        learning = [group for group in groups if self._learns(group, evaluations)]
        units = [self._unit(group, evaluations, differentiated, add=len(learning) > 1) for group in groups]
        kernels = [unit for unit in units if isinstance(unit, Kernel) and unit.learned]
        complete = len(learning) == 1 and (not kernels or self._learns_all(kernels[0]))
        return Arrangement(units, clear=not complete)

    def _unit(
        self, group: list[Batch] | int, evaluations: Sequence[Evaluation], differentiated: set[str], *, add: bool
    ) -> Kernel | Autograd:
        if not isinstance(group, int):
            return Kernel(group, differentiated, self._slope_of, add=add)
        learns = self._learns(group, evaluations)
        module = self._module(evaluations[group])
        if learns:
            return Autograd(group, module, self._parameters, self._gradients, add=add)
        return Autograd(group, module, (), ())

    def _learns(self, group: list[Batch] | int, evaluations: Sequence[Evaluation]) -> bool:
        """Whether the part's parameters receive a gradient through these evaluations."""
        indices = [group] if isinstance(group, int) else [index for batch in group for index, *_ in batch.evaluations]
        chosen = [evaluations[index] for index in indices]
        return any(each.gradient and each.part == self._part.name and not each.target for each in chosen)

    def _learns_all(self, kernel: Kernel) -> bool:
        return kernel.learned.issuperset(gradient.data_ptr() for gradient in self._gradients if gradient.numel())

    def _slope_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The memory of the gradient by a parameter, or by a part of one; None where it does not learn."""
        for learned, gradient in zip(self._parameters, self._gradients, strict=True):
            offset = parameter.data_ptr() - learned.data_ptr()
            if 0 <= offset < learned.nbytes:
                begin = offset // learned.element_size()
                return gradient.view(-1)[begin : begin + parameter.numel()].view(parameter.shape)
        return None

    def _plain(self, evaluation: Evaluation, differentiated: bool) -> Plain | None:
        """The evaluation's network as one that the kernel computes; None where autograd must."""
        if not self._by_kernel:
            return None
        plain = plain_of(self._module(evaluation), evaluation.inputs)
        return None if plain is not None and plain.noise and differentiated else plain

    def _module(self, evaluation: Evaluation) -> nn.Module:
        part = self._parts[evaluation.part]
        module = part.target_module if evaluation.target else part.module
        if module is None:
            raise NetworkError(
                f"{evaluation.name} asks for a target copy of {evaluation.part}, which has none: name it in targets"
            )
        return module


class Arrangement(NamedTuple):
    """How an update's evaluations are computed: units in order. clear: the gradient is set to zero before they write
    it."""

    units: list[Kernel | Autograd]
    clear: bool


def _signature(given: Any) -> Any:
    """What an arrangement depends on of an evaluation's input."""
    if isinstance(given, torch.Tensor):
        return given.shape, given.dtype
    if isinstance(given, dict):
        arrays = cast(dict[str, torch.Tensor], given)
        return tuple((name, array.shape) for name, array in arrays.items())
    return given


def _rows(evaluation: Evaluation, rows: Mapping[str, int]) -> int:
    given = evaluation.inputs[0]
    return rows[given] if isinstance(given, str) else devices.rows_of(given)


def _can_join(evaluation: Evaluation, plain: Plain, batches: Sequence[Batch]) -> bool:
    """Whether the kernel of these batches can compute it too: it takes their outputs as they are."""
    made = {other.name: (batch.plain, rows) for batch in batches for _, other, rows in batch.evaluations}
    for columns in plain.columns:
        given = evaluation.inputs[columns.input]
        if isinstance(given, str) and given in made:
            source, _ = made[given]
            if source.stacked or columns.array is not None or not columns.scale.identity:
                return False
            if columns.width != math.prod(source.shape):
                return False
    return True


def _join(index: int, evaluation: Evaluation, rows: int, plain: Plain, batches: list[Batch]) -> None:
    """Let it be one batch with those of the same network that do not depend on each other, else a new one."""
    level = 0
    for batch in batches:
        if {other.name for _, other, _ in batch.evaluations}.intersection(_names(evaluation)):
            level = max(level, batch.level + 1)
    for batch in batches:
        (_, first, _) = batch.evaluations[0]
        same = (first.part, first.target) == (evaluation.part, evaluation.target)
        numbers = [[each for each in one.inputs if isinstance(each, int)] for one in (first, evaluation)]
        if same and batch.level == level and numbers[0] == numbers[1] and len(first.inputs) == len(evaluation.inputs):
            batch.evaluations.append((index, evaluation, rows))
            return
    batches.append(Batch(plain, level, [(index, evaluation, rows)]))
    batches.sort(key=lambda batch: batch.level)

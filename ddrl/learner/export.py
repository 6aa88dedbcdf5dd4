"""What leaves a learner: the acting network as an ONNX graph whose parameters are inputs, and its state as a file.

The graph is written once by the trainer before training, read by rollouts, which run it with ONNX Runtime and feed
parameters by manifest name straight from a mailbox's slot. It holds no parameter's value, so it never grows stale and
weighs a few kilobytes. Every export is checked: ONNX Runtime must compute what torch computes.

The state is one safetensors file whose header carries JSON that says what it is, and a checksum of the tensors, because
safetensors itself notices a truncated file but not a flipped bit. No pickle is ever read."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import io
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save
from torch import nn
from torch.onnx import symbolic_helper

from ddrl.acting.policy_file import ActingModel
from ddrl.core.errors import MAX_WORDS, CheckpointError, NetworkError, first_line, is_of_user, user_error
from ddrl.core.files import DAMAGE, load_tensors, write_atomically
from ddrl.core.rows import ParameterLayout
from ddrl.core.specs import FORBIDDEN, ActingInput, Array, ArraySpec, Declaration, EnvSpec, Ints
from ddrl.learner.algorithm import Acting
from ddrl.learner.part import layout_of, named_tensors

OPSET = 17
CHECKED_BATCHES = (1, 5)  # rows; neither is the size that the graph was traced with
TRACED_BATCH = 2
OTHER_THE_SECOND_TIME = (
    "gives other outputs for the same observations the second time: its forward must keep no state in attributes "
    "(register_buffer keeps it for rollouts too), nor draw random numbers in evaluation mode"
)
FORMAT = "ddrl.learner/2"
SAME_NETWORK = "set learner and env as they were, or begin a new run"
EPSILON = torch.finfo(torch.float32).eps  # of nn.RMSNorm where none is given


def export_acting(network: nn.Module, spec: EnvSpec) -> ActingModel:
    """The acting model of a network of action values alone: output "q", actions epsilon-greedy by it."""
    return export_model(Acting("value", network, ("q",)), network, spec, Declaration("", "epsilon_greedy"))


def export_model(acting: Acting, owner: nn.Module, spec: EnvSpec, declaration: Declaration) -> ActingModel:
    """Export `acting.module` in evaluation mode; it is left as it was, on whatever device. `owner` is the module of its
    part: the vector's layout is that of `owner`'s tensors.

    Raises NetworkError where torch cannot export it, or where ONNX Runtime computes something else (a forward whose
    Python control flow depends on the values it is given)."""
    what = f"the network {type(owner).__name__}"
    layout = layout_of(owner)
    module, owner = _copied(acting, owner, spec)
    inputs = declaration.inputs
    names = (*spec.observation.arrays, *(declared.name for declared in inputs))
    if taken := sorted({entry.name for entry in layout.entries}.intersection((*names, *acting.outputs))):
        raise NetworkError(
            f"{what} has a parameter or buffer {taken[0]!r}, and an input or output of the acting network has that "
            "name: rename it"
        )
    _refuse_hidden_state(module, inputs, spec, what)
    outputs = _outputs(module, acting.outputs, inputs, spec, what)
    shorter = _shorter_lengths(module, inputs, spec)
    traced, branches = _trace(module, acting, inputs, spec, what, dynamic=bool(shorter))
    graph = _parameters_as_inputs(traced, module, owner, layout, names, spec.observation.arrays, what + branches)
    cases = _cases(inputs, spec, [{}, shorter] if shorter else [{}])
    _check(graph, module, owner, acting.outputs, inputs, spec, what + branches, cases)
    return ActingModel(graph, layout, spec, outputs, declaration.chooser, inputs, declaration.settings)


def check_acting(model: ActingModel, acting: Acting, owner: nn.Module, observed: list[Array]) -> None:
    """NetworkError unless the model computes what `acting.module` does for these arrays of observations [N, ...]."""
    module, owner = _copied(acting, owner, model.spec)
    further = random_inputs(model.spec, model.inputs, len(observed[0]), np.random.default_rng(0))[len(observed) :]
    what = f"the network {type(owner).__name__}, on observations of this run,"
    _check(model.onnx, module, owner, acting.outputs, model.inputs, model.spec, what, [[*observed, *further]])


def _copied(acting: Acting, owner: nn.Module, spec: EnvSpec) -> tuple[nn.Module, nn.Module]:
    """What acts, in evaluation mode and of arrays in a row, and the module of its part, both on the host."""
    on_host = {id(tensor): _on_host(tensor) for each in (owner, acting.module) for tensor in _tensors(each)}
    module, owner = copy.deepcopy((acting.module, owner), on_host)  # together: they share their tensors
    if spec.observation.fields or _has_keywords(module):
        module = _OfArrays(module, tuple(spec.observation.arrays), named=bool(spec.observation.fields))
    return module.eval(), owner


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    """Parameters, buffers, and what forward has kept in attributes, which torch does not copy."""
    attributes = (value for each in module.modules() for value in vars(each).values())
    kept = (value for value in attributes if isinstance(value, torch.Tensor))
    return itertools.chain(module.parameters(), module.buffers(), kept)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _refuse_hidden_state(module: nn.Module, inputs: Sequence[ActingInput], spec: EnvSpec, what: str) -> None:
    """NetworkError where forward keeps something that is no parameter or persistent buffer, and computes otherwise
    afterwards: rollouts would act with what it was at the export."""
    generator = np.random.default_rng(2)
    first, other = ([*map(torch.from_numpy, random_inputs(spec, inputs, CHECKED_BATCHES[1], generator))] for _ in "ab")
    module = copy.deepcopy(module).eval()
    known = copy.deepcopy(module.state_dict())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = _tensors_of(module(*(each.clone() for each in first)))
        with contextlib.suppress(Exception):  # what fails in training mode is named where it learns
            module.train()(*(each.clone() for each in other))
        module.load_state_dict(known)
        module.eval()(*(each.clone() for each in other))
        after = _tensors_of(module(*(each.clone() for each in first)))
    if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in zip(before, after, strict=True)):
        raise NetworkError(f"{what} {OTHER_THE_SECOND_TIME}")


def _tensors_of(given: Any) -> tuple[torch.Tensor, ...]:
    return (given,) if isinstance(given, torch.Tensor) else tuple(given)


class _OfArrays(nn.Module):
    """A module of a dict of named arrays as one of arrays in a row: what a graph's inputs are; of a single array where
    they have no names."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], *, named: bool) -> None:
        super().__init__()
        self.module = module
        self._names = names
        self._named = named

    def forward(self, *inputs: torch.Tensor) -> Any:
        """What the module gives for the dict and the further inputs."""
        if not self._named:
            return self.module(*inputs)
        count = len(self._names)
        return self.module(dict(zip(self._names, inputs[:count], strict=True)), *inputs[count:])


def _has_keywords(module: nn.Module) -> bool:
    """Whether forward has arguments by keyword alone, which torch's exporter gives by their places."""
    return any(each.kind is each.KEYWORD_ONLY for each in inspect.signature(module.forward).parameters.values())


def random_inputs(
    spec: EnvSpec,
    inputs: Sequence[ActingInput],
    count: int,
    generator: np.random.Generator,
    lengths: Mapping[str, int] = MappingProxyType({}),
) -> list[Array]:
    """`count` observations (each array of a record by itself) and declared inputs, in the order of the graph's inputs.
    `lengths`: of named axes, where they are not the longest."""
    arrays = spec.observation.arrays
    drawn = dict[str, Array]()
    axes = _named_axes(spec)
    for name, array in arrays.items():
        shape = list(array.shape)
        for place, axis in axes.get(name, {}).items():
            shape[place - 1] = lengths.get(axis, shape[place - 1])
        ranges = array.ranges[: math.prod(shape)]
        drawn[name] = random_observations(ArraySpec(tuple(shape), array.dtype, ranges=ranges), count, generator)
    for axis in {axis for named in axes.values() for axis in named.values()}:
        mask = drawn[f"{axis}_mask"]  # at least one entry: a mean over none is not a number
        mask[...] = np.arange(mask.shape[1]) < generator.integers(1, mask.shape[1] + 1, (count, 1))
    further: list[Array] = []
    for declared in inputs:
        draw = generator.random if declared.distribution == "uniform" else generator.standard_normal
        values = generator.standard_normal if declared.kind == "state" else draw
        further.append(values((count, *declared.shape)).astype(declared.dtype))
    return [*drawn.values(), *further]


def _named_axes(spec: EnvSpec) -> dict[str, dict[int, str]]:
    """By array: its axes of varying length, counted behind the batch's, with their names."""
    named: dict[str, dict[int, str]] = {}
    for name, array in spec.observation.fields:
        for place, axis in enumerate(array.axes, start=1):
            if axis:
                named.setdefault(name, {})[place] = axis
                named[f"{axis}_mask"] = {1: axis}
    return named


def _shorter_lengths(module: nn.Module, inputs: Sequence[ActingInput], spec: EnvSpec) -> dict[str, int]:
    """By named axis a length below the longest; empty where the module computes with the longest alone."""
    arrays = spec.observation.arrays
    lengths = dict[str, int]()
    for name, named in _named_axes(spec).items():
        lengths |= {axis: arrays[name].shape[place - 1] - 1 for place, axis in named.items()}
    lengths = {axis: length for axis, length in lengths.items() if length > 1}  # 1 broadcasts: it proves nothing
    if not lengths:
        return {}
    try:
        with torch.no_grad():
            module(*map(torch.from_numpy, random_inputs(spec, inputs, 2, np.random.default_rng(0), lengths)))
    except (RuntimeError, ValueError, IndexError):  # a network of one width, such as the mlp: always padded
        return {}
    return lengths


def _run(module: nn.Module, arrays: list[Array], names: tuple[str, ...], what: str) -> dict[str, Array]:
    """What torch computes, by name."""
    with torch.no_grad():
        given = module(*map(torch.from_numpy, arrays))
    tensors = _tensors_of(given)
    if len(tensors) != len(names):
        raise NetworkError(
            f"{what} gives {len(tensors)} outputs to act with: it must give those that are named, {', '.join(names)}"
        )
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}


def _outputs(
    module: nn.Module, names: tuple[str, ...], inputs: Sequence[ActingInput], spec: EnvSpec, what: str
) -> dict[str, ArraySpec]:
    arrays = random_inputs(spec, inputs, TRACED_BATCH, np.random.default_rng(0))
    given = _run(module, arrays, names, what)
    for name, array in given.items():
        if not array.ndim or array.shape[0] != TRACED_BATCH:
            raise NetworkError(
                f"{what} gives {name} {list(array.shape)} for {TRACED_BATCH} observations: it must give a row for each"
            )
    return {name: ArraySpec(array.shape[1:], array.dtype.name) for name, array in given.items()}


def random_observations(observation: ArraySpec, count: int, generator: np.random.Generator) -> Array:
    """`count` observations that exercise the whole range of integers, and the usual range of floats."""
    shape = (count, *observation.shape)
    dtype = np.dtype(observation.dtype)
    if dtype.kind == "f":
        drawn = generator.standard_normal(shape).astype(dtype)
    elif dtype == np.uint8 and not observation.ranges:
        drawn = generator.integers(0, 256, shape, np.uint8)
    else:
        drawn = generator.integers(0, 2, shape).astype(dtype)
    whole = _whole(observation)
    if whole is None:
        return drawn
    is_whole, low, high = whole
    return np.where(is_whole, generator.integers(low, high, shape, endpoint=True), drawn).astype(dtype)


def _whole(observation: ArraySpec) -> Ints | None:
    """[3, *shape]: which elements are whole numbers within bounds (which floats have none of), and these."""
    ranges = observation.ranges
    if all(bounds == (0.0, 1.0) for bounds in ranges):
        return None
    shape = observation.shape if len(ranges) > 1 else (1,) * len(observation.shape)
    low, high = np.array(ranges, np.int64).T.reshape(2, *shape)
    return np.stack([(low != 0) | (high != 1), low, high])


def variants(spec: EnvSpec, arrays: list[Array]) -> Iterator[list[Array]]:
    """Observations' arrays and further inputs as they are, and with numbers that are all zero, all large, all negative,
    and large and negative by turns: whole numbers as far as their bounds."""

    def bounded(given: list[Array]) -> list[Array]:
        specs = spec.observation.arrays.values()
        return [_bounded(array, own) for array, own in zip(given, specs, strict=False)] + given[len(specs) :]

    yield arrays
    yield bounded([array if array.dtype == np.bool_ else np.zeros_like(array) for array in arrays])
    turns = 100 * (1 - 2 * (np.arange(len(arrays[0])) % 2))
    for factor in (100, -100, turns):

        def large(array: Array, factor: Any = factor) -> Array:
            factors = np.broadcast_to(factor, len(array)).reshape(-1, *(1 for _ in array.shape[1:]))
            return np.abs(array) * factors.astype(array.dtype) if array.dtype.kind == "f" else array

        yield bounded([large(array) for array in arrays])


def _bounded(array: Array, observation: ArraySpec) -> Array:
    whole = _whole(replace(observation, ranges=observation.ranges[: math.prod(array.shape[1:])], shape=array.shape[1:]))
    if whole is None:
        return array
    is_whole, low, high = whole
    return np.where(is_whole, array.clip(low, high), array).astype(array.dtype)


def _trace(
    module: nn.Module, acting: Acting, inputs: Sequence[ActingInput], spec: EnvSpec, what: str, *, dynamic: bool
) -> tuple[bytes, str]:
    """The graph, and where forward takes a value or a number of rows into Python, as " (line 12 of net.py)"."""
    _add_operators()
    example = tuple(map(torch.from_numpy, random_inputs(spec, inputs, TRACED_BATCH, np.random.default_rng(0))))
    names = [*spec.observation.arrays, *(declared.name for declared in inputs)]
    named = _named_axes(spec) if dynamic else {}
    file: Any = io.BytesIO()  # torch writes to files too, though it does not say so
    with warnings.catch_warnings(record=True) as caught:
        # The TorchScript exporter is the one that keeps parameters as inputs by name and needs no further package.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=torch.jit.TracerWarning)  # what it warns of is what `_check` tests
        try:
            with torch.no_grad():
                torch.onnx.export(
                    module,
                    example,
                    file,
                    dynamo=False,
                    keep_initializers_as_inputs=True,
                    do_constant_folding=False,
                    opset_version=OPSET,
                    input_names=names,
                    output_names=list(acting.outputs),
                    dynamic_axes={name: {0: "batch", **named.get(name, {})} for name in (*names, *acting.outputs)},
                )
        except Exception as error:
            remedy = "use operations that torch.onnx exports"
            if "requires grad as a constant" in str(error):
                remedy = "layers and parameters that it uses must be its own (nn.ModuleList, nn.Parameter)"
            where = f"{what} cannot be exported to ONNX, for rollouts: "
            raise NetworkError(user_error(error, where, f"; {remedy}")) from error
    return file.getvalue(), branch_line(caught)


def branch_line(caught: Iterable[warnings.WarningMessage]) -> str:
    """The first line of the user's that torch's tracer warns of, as " (line 12 of net.py)"; "" for none."""
    for one in caught:
        if issubclass(one.category, torch.jit.TracerWarning) and is_of_user(Path(one.filename)):
            return f" (line {one.lineno} of {Path(one.filename).name})"
    return ""


@cache
def _add_operators() -> None:
    """Teach torch's exporter operators of modules that people use often (nn.RMSNorm, spectral normalization,
    nn.Bilinear), and not to print the whole graph where an operator is not known."""
    setattr(torch._C, "_jit_onnx_log", lambda *words: None)  # noqa: B010 (its type says that it cannot be set)

    def rms_norm(g: Any, x: Any, shape: Any, weight: Any, epsilon: Any) -> Any:
        extents: Any = symbolic_helper._maybe_get_const(shape, "is")
        axes = [-place - 1 for place in range(len(extents))]
        given = symbolic_helper._maybe_get_const(epsilon, "f")
        small = g.op("Constant", value_t=torch.tensor(given if isinstance(given, float) else EPSILON))
        mean = g.op("ReduceMean", g.op("Mul", x, x), axes_i=axes, keepdims_i=1)
        normal = g.op("Div", x, g.op("Sqrt", g.op("Add", mean, small)))
        return normal if symbolic_helper._is_none(weight) else g.op("Mul", normal, weight)

    def vdot(g: Any, x: Any, y: Any) -> Any:
        return g.op("ReduceSum", g.op("Mul", x, y), keepdims_i=0)

    def bilinear(g: Any, x: Any, y: Any, weight: Any, bias: Any) -> Any:
        product = g.op("Einsum", x, weight, y, equation_s="...i,oij,...j->...o")
        return product if symbolic_helper._is_none(bias) else g.op("Add", product, bias)

    def m_transpose(g: Any, x: Any) -> Any:
        axes = [*range(symbolic_helper._get_tensor_rank(x) or 0)]
        return g.op("Transpose", x, perm_i=[*axes[:-2], axes[-1], axes[-2]])

    torch.onnx.register_custom_op_symbolic("aten::mT", m_transpose, OPSET)
    for operator in (rms_norm, vdot, bilinear):
        torch.onnx.register_custom_op_symbolic(f"aten::{operator.__name__}", operator, OPSET)


def _parameters_as_inputs(
    graph: bytes,
    module: nn.Module,
    owner: nn.Module,
    layout: ParameterLayout,
    names_of_inputs: tuple[str, ...],
    observed: Iterable[str],
    what: str,
) -> bytes:
    """Drop the parameters' values from the graph, and give each of them the one name that it has in the layout,
    whatever the acting module and submodules that share it call it."""
    import onnx  # loads in 20 ms, and only the trainer's start needs it

    model = onnx.load_from_string(graph)
    names = {entry.name for entry in layout.entries}
    first_name: dict[int, str] = {}
    owned: dict[str, torch.Tensor] = owner.state_dict(keep_vars=True)
    for entry in layout.entries:
        first_name[id(owned[entry.name])] = entry.name
    state: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    foreign = [alias for alias, tensor in state.items() if id(tensor) not in first_name]
    if foreign:
        raise NetworkError(
            f"{what} acts with {foreign[0]}, which is not among its part's parameters and buffers: register it there"
        )
    renamed = {alias: first_name[id(tensor)] for alias, tensor in state.items() if first_name[id(tensor)] != alias}
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    kept_inputs = {value.name: value for value in reversed(model.graph.input)}
    for alias, name in renamed.items():
        value = kept_inputs.pop(alias, None)
        if value is not None:
            value.name = name
            kept_inputs[name] = value
    constants = [
        tensor for tensor in model.graph.initializer if tensor.name not in names and tensor.name not in renamed
    ]
    used = {name for node in model.graph.node for name in node.input}
    order = [*names_of_inputs, *(entry.name for entry in layout.entries)]
    ordered = [kept_inputs[name] for name in order if name in kept_inputs and name in used]
    if not used.intersection(observed):
        raise NetworkError(
            f"{what} does not use the observation it is given: its forward must compute from it by torch's operations "
            "alone"
        )
    del model.graph.input[:], model.graph.initializer[:]
    model.graph.input.extend(ordered)
    model.graph.initializer.extend(constants)
    return model.SerializeToString()


def _cases(inputs: Sequence[ActingInput], spec: EnvSpec, lengths: Sequence[Mapping[str, int]]) -> Iterator[list[Array]]:
    """Random inputs in several batch sizes and lengths."""
    generator = np.random.default_rng(1)
    for rows, chosen in itertools.product(CHECKED_BATCHES, lengths):
        yield from variants(spec, random_inputs(spec, inputs, rows, generator, chosen))


def _check(
    graph: bytes,
    module: nn.Module,
    owner: nn.Module,
    names: tuple[str, ...],
    inputs: Sequence[ActingInput],
    spec: EnvSpec,
    what: str,
    cases: Iterable[list[Array]],
) -> None:
    from ddrl.acting.graph import runtime

    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4  # what it says of an error is in the exception
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise NetworkError(
            f"{what} is exported as an ONNX graph that cannot be loaded: write its forward with other operations, in "
            f"float32 (no torch.autocast) ({first_line(error)[-MAX_WORDS:]})"
        ) from error
    try:
        views = {name: tensor.detach().numpy() for name, tensor in named_tensors(owner).items()}
        taken = [value.name for value in session.get_inputs()]
        order = (*spec.observation.arrays, *(declared.name for declared in inputs))
        for arrays in cases:
            feed = views | dict(zip(order, arrays, strict=True))
            given: Any = session.run(list(names), {name: feed[name] for name in taken})  # no output is a map
            for (name, expected), array in zip(_run(module, arrays, names, what).items(), given, strict=True):
                allowed = expected != FORBIDDEN
                scale = 1.0 + float(np.abs(expected[allowed]).max(initial=0.0))
                if array.shape != expected.shape or (
                    np.isfinite(scale) and not np.allclose(array, expected, rtol=1e-3, atol=1e-4 * scale)
                ):
                    raise NetworkError(
                        f"{what} computes something else after its export to ONNX ({name} for {len(arrays[0])} "
                        f"observations: {expected.ravel()[0]:.4g} by torch, {np.ravel(array)[0]:.4g} by ONNX Runtime): "
                        "its forward must not branch in Python on values or their number, nor draw in evaluation mode"
                    )
    except NetworkError:
        raise
    except Exception as error:
        raise NetworkError(
            f"{what} cannot act on other numbers of observations than {TRACED_BATCH}, as an ONNX graph: its forward "
            f"must use x.shape[0] in place of len(x), and no loop over rows ({first_line(error)[-MAX_WORDS:]})"
        ) from error


# -- the state ---------------------------------------------------------------------------------------------------------


def write_state(path: Path, state: Mapping[str, Array], about: Mapping[str, Any]) -> None:
    """Write `state` and `about` (JSON values) to `path`, whole or not at all."""
    header = {"ddrl": json.dumps({"format": FORMAT, **about, "checksum": _checksum(state)})}
    try:
        write_atomically(path, save(dict(state), metadata=header))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the learner's state to {path}: {error}") from None


def read_state(path: Path, *, algorithm: str) -> dict[str, Array]:
    """The state in `path`. CheckpointError where it is missing, truncated, altered, foreign, or of another
    algorithm."""
    try:
        state, header = load_tensors(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no learner's state at {path}: name a checkpoint of ddrl") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}): it is corrupt or was not written by ddrl; use an older "
            "checkpoint"
        ) from None
    try:
        about = json.loads(header["ddrl"])
        written = (about["format"], about["algorithm"], about["checksum"])
    except (KeyError, TypeError, *DAMAGE):
        raise CheckpointError(
            f"{path} is a safetensors file that ddrl's learner did not write: name a checkpoint of ddrl"
        ) from None
    if written[0] != FORMAT or written[1] != algorithm:
        raise CheckpointError(
            f"{path} holds {written[1]} as {written[0]}, but this learner reads {algorithm} as {FORMAT}: name one of "
            "the same algorithm, or use the ddrl that wrote it"
        )
    if written[2] != _checksum(state):
        raise CheckpointError(f"{path} is corrupt: its checksum does not match; use an older checkpoint")
    return state


def check_fits(
    state: Mapping[str, Array], wanted: Mapping[str, Array], *, optional: tuple[str, ...], source: str
) -> None:
    """Raise CheckpointError unless `state` has exactly the arrays of `wanted` (names, shapes, dtypes), `optional` ones
    aside."""
    for name, array in wanted.items():
        if name in optional:
            continue
        if name not in state:
            raise CheckpointError(f"{source} was written for another network (it lacks {name}): {SAME_NETWORK}")
        found = np.asarray(state[name])
        if found.shape != array.shape or found.dtype != array.dtype:
            raise CheckpointError(
                f"{source} was written for another network ({name} is {found.dtype} {list(found.shape)} there and "
                f"{array.dtype} {list(array.shape)} here): {SAME_NETWORK}"
            )
    unknown = sorted(set(state) - set(wanted) - set(optional))
    if unknown:
        raise CheckpointError(
            f"{source} was written for another network (it has {unknown[0]}, which this one lacks): {SAME_NETWORK}"
        )


def _checksum(state: Mapping[str, Array]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        array = np.ascontiguousarray(state[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()

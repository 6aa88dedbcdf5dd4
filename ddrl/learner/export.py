"""The acting network for rollouts: a torch module becomes an ONNX graph whose parameters are inputs.

Written once by the trainer before training, read by rollouts, which run it with ONNX Runtime and feed parameters by
manifest name straight from a mailbox's slot. The graph holds no parameter's value, so it never grows stale and weighs a
few kilobytes. Every export is checked: ONNX Runtime must compute what torch computes."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddrl.core.errors import MissingExtraError, NetworkError
from ddrl.core.layouts import ParameterLayout
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner.flat import FlatParameters, layout_of

OPSET = 17
CHECKED_BATCHES = (1, 5)  # rows; neither is the size that the graph was traced with
TRACED_BATCH = 2


class ActingModel(NamedTuple):
    """What a rollout needs to act: inputs "observation" [B, *observation.shape] and parameters by their names in
    `layout`; output "q".

    A parameter that acting does not use is in `layout` but not among the graph's inputs.
    """

    onnx: bytes
    layout: ParameterLayout


def export_acting(module: nn.Module, spec: EnvSpec, *, check: bool = True) -> ActingModel:
    """Export `module` in evaluation mode; it is left as it was, on whatever device.

    Raises NetworkError where torch cannot export it, or where ONNX Runtime computes something else (a forward whose
    Python control flow depends on the values it is given)."""
    what = f"the network {type(module).__name__}"
    layout = layout_of(module)
    acting = copy.deepcopy(module).to("cpu").eval()
    graph = _parameters_as_inputs(_trace(acting, spec, what), acting, layout, what)
    if check:
        _check(graph, acting, layout, spec, what)
    return ActingModel(graph, layout)


def random_observations(observation: ArraySpec, count: int, generator: np.random.Generator) -> NDArray[Any]:
    """`count` observations that exercise the whole range of bytes, and the usual range of floats."""
    shape, dtype = (count, *observation.shape), np.dtype(observation.dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    if dtype == np.uint8:
        return generator.integers(0, 256, shape, np.uint8)
    return generator.integers(0, 2, shape).astype(dtype)


def _trace(acting: nn.Module, spec: EnvSpec, what: str) -> bytes:
    example = torch.from_numpy(random_observations(spec.observation, TRACED_BATCH, np.random.default_rng(0)))
    file = io.BytesIO()
    with warnings.catch_warnings():
        # The TorchScript exporter is the one that keeps parameters as inputs by name and needs no further package.
        warnings.filterwarnings("ignore", "You are using the legacy TorchScript-based ONNX export", DeprecationWarning)
        warnings.filterwarnings("ignore", "The feature will be removed", DeprecationWarning)
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # what it warns of is what `_check` tests
        try:
            with torch.no_grad():
                torch.onnx.export(
                    acting,
                    (example,),
                    file,
                    dynamo=False,
                    keep_initializers_as_inputs=True,
                    do_constant_folding=False,
                    opset_version=OPSET,
                    input_names=["observation"],
                    output_names=["q"],
                    dynamic_axes={"observation": {0: "batch"}, "q": {0: "batch"}},
                )
        except torch.onnx.OnnxExporterError as error:
            raise _export_error(what, error) from error
        except ModuleNotFoundError as error:
            if error.name == "onnx":
                raise MissingExtraError("onnx", "train", "exporting the acting network") from None
            raise _export_error(what, error) from error
        except Exception as error:
            raise _export_error(what, error) from error
    return file.getvalue()


def _export_error(what: str, error: BaseException) -> NetworkError:
    first = next(iter(str(error).strip().splitlines()), "no message")
    return NetworkError(
        f"{what} cannot be exported to ONNX, which rollouts act with: {type(error).__name__}: {first}; write its "
        "forward with operations that torch.onnx exports"
    )


def _parameters_as_inputs(graph: bytes, acting: nn.Module, layout: ParameterLayout, what: str) -> bytes:
    """Drop the parameters' values from the graph, and give tensors that submodules share the one name they have in the
    layout."""
    import onnx  # loads in 20 ms, and only the trainer's start needs it

    model = onnx.load_from_string(graph)
    names = {entry.name for entry in layout.entries}
    first_name: dict[int, str] = {}
    state: dict[str, torch.Tensor] = acting.state_dict(keep_vars=True)
    for entry in layout.entries:
        first_name[id(state[entry.name])] = entry.name
    renamed = {alias: first_name[id(tensor)] for alias, tensor in state.items() if alias not in names}
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
    order = ["observation", *(entry.name for entry in layout.entries)]
    inputs = [kept_inputs[name] for name in order if name in kept_inputs and name in used]
    if "observation" not in used:
        raise NetworkError(f"{what} does not use the observation it is given")
    del model.graph.input[:], model.graph.initializer[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(constants)
    return model.SerializeToString()


def _check(graph: bytes, acting: nn.Module, layout: ParameterLayout, spec: EnvSpec, what: str) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        views = layout.views(FlatParameters(acting).vector.numpy())
        generator = np.random.default_rng(1)
        for rows in CHECKED_BATCHES:
            observation = random_observations(spec.observation, rows, generator)
            feed = {value.name: views[value.name] for value in session.get_inputs() if value.name != "observation"}
            q = np.asarray(session.run(["q"], feed | {"observation": observation})[0])
            with torch.no_grad():
                expected = acting(torch.from_numpy(observation)).numpy()
            scale = 1.0 + float(np.abs(expected).max())
            if q.shape != expected.shape or not np.allclose(q, expected, rtol=1e-3, atol=1e-4 * scale):
                raise NetworkError(
                    f"{what} computes something else after its export to ONNX (for {rows} observations torch gives "
                    f"{expected.ravel()[:3]}, ONNX Runtime {q.ravel()[:3]}): its forward must not branch in Python on "
                    "the values or the number of observations, nor draw random numbers in evaluation mode"
                )
    except NetworkError:
        raise
    except Exception as error:
        raise NetworkError(
            f"{what} was exported to ONNX, but ONNX Runtime cannot run it: "
            f"{next(iter(str(error).strip().splitlines()), type(error).__name__)}"
        ) from error

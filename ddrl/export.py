"""`python -m ddrl.export RUN [--onnx FILE]`: a run's saved policy as one ONNX file that needs no ddrl to act.

The file holds the parameters that RUN/policy.onnx takes as inputs, and has a further output `action`, the best one in
the environment's units, where the chooser takes the highest of action values or the mean. It is checked before it is
kept: ONNX Runtime must compute from it what it does from RUN/policy.onnx."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddrl.acting.choosers import Gaussian, chooser_class
from ddrl.acting.graph import Graph
from ddrl.acting.policy_file import SavedPolicy, load_trusted_policy
from ddrl.core.errors import CheckpointError, DdrlError, MissingExtraError
from ddrl.core.files import write_atomically
from ddrl.core.forks import checked_output, keep_streams

CHECKED_BATCHES = (1, 3)
ACTION = "action"


def standalone(saved: SavedPolicy) -> bytes:
    """The graph with the policy's parameters inside. CheckpointError where it does not compute what the policy does."""
    try:
        import onnx as onnx_module
    except ModuleNotFoundError:
        raise MissingExtraError("onnx", "train", "python -m ddrl.export") from None
    onnx: Any = onnx_module  # protocol buffers have no types
    helper = onnx.helper
    from_array = onnx.numpy_helper.from_array
    model = saved.model
    Graph(model.onnx)  # says what is wrong with it
    graph = onnx.load_from_string(model.onnx)
    parameters = model.layout.views(saved.vector)
    inputs = [value for value in graph.graph.input if value.name not in parameters]
    used = [value.name for value in graph.graph.input if value.name in parameters]
    del graph.graph.input[:]
    graph.graph.input.extend(inputs)
    graph.graph.initializer.extend(from_array(parameters[name].copy(), name) for name in used)
    chooser = chooser_class(model.chooser)
    values = next((name for name in ("q", "logits") if name in chooser.reads and name in model.outputs), "")
    known = {*model.outputs, *(value.name for value in inputs)}
    free = ACTION not in known and not model.spec.masked  # masked values are compared by whoever knows the mask
    if free and values and model.spec.discrete and model.outputs[values].shape == (model.spec.num_actions,):
        graph.graph.node.append(helper.make_node("ArgMax", [values], [ACTION], axis=1, keepdims=0))
        graph.graph.output.append(helper.make_tensor_value_info(ACTION, onnx.TensorProto.INT64, ["batch"]))
    elif free and issubclass(chooser, Gaussian) and model.spec.action_low:
        mean = model.outputs["mean"]
        for name, bound in (("low", model.spec.action_low), ("high", model.spec.action_high)):
            array = np.reshape(np.array(bound, mean.dtype), mean.shape)
            graph.graph.initializer.append(from_array(array, f"action_{name}"))
        graph.graph.node.append(helper.make_node("Max", ["mean", "action_low"], ["action_not_below"]))
        graph.graph.node.append(helper.make_node("Min", ["action_not_below", "action_high"], [ACTION]))
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(mean.dtype))
        graph.graph.output.append(helper.make_tensor_value_info(ACTION, kind, ["batch", *mean.shape]))
    made = graph.SerializeToString()
    _check(made, saved)
    return made


def _check(made: bytes, saved: SavedPolicy) -> None:
    """Both graphs, with the parameters inside and beside, on the same random numbers."""
    model = saved.model
    whole = Graph(made)
    bare = Graph(model.onnx)
    greedy = chooser_class(model.chooser)(model.spec, 1, 0, model.settings).greedy
    generator = np.random.default_rng(0)
    feed: dict[str, Any] = dict(model.layout.views(saved.vector))
    arrays = {**model.spec.observation.arrays, **{declared.name: declared for declared in model.inputs}}
    names = whole.outputs
    for count in CHECKED_BATCHES:
        for name, array in arrays.items():
            drawn = generator.standard_normal((count, *array.shape))
            feed[name] = (np.abs(drawn) * (1 if np.dtype(array.dtype).kind == "b" else 9)).astype(array.dtype)
        computed = whole.compute(names, feed)
        expected = dict(zip(model.outputs, bare.compute(list(model.outputs), feed), strict=True))
        if ACTION in names and ACTION not in expected:
            expected[ACTION] = greedy(expected)
        for name, array in zip(names, computed, strict=True):
            rounding = 1e-6 * (1.0 + np.abs(expected[name]).max(initial=0.0))  # sums of numbers of any size
            if not np.allclose(np.asarray(array), expected[name], rtol=1e-5, atol=rounding, equal_nan=True):
                raise CheckpointError(f"the exported policy gives another {name} than the run's: nothing was written")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.export",
        description="Write a run's saved policy as one ONNX file that needs no ddrl: parameters inside, inputs and "
        "outputs by name.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--onnx", type=Path, nargs="?", const=Path(), default=Path(), metavar="FILE", help="(RUN/agent.onnx)"
    )
    parser.add_argument(
        "--trust", action="store_true", help="read the policy, though it names code and was not trained here"
    )
    options = parser.parse_args(arguments)
    path = options.run / "agent.onnx" if options.onnx == Path() else options.onnx
    try:
        saved = load_trusted_policy(options.run, trust=options.trust)
        made = standalone(saved)
        write_atomically(path, made)
    except DdrlError as error:
        print(f"ddrl.export: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ddrl.export: cannot write {path}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(_words(path, made))
    return 0


def _words(path: Path, made: bytes) -> str:
    import onnx

    graph: Any = onnx.load_from_string(made).graph
    taken = ", ".join(
        f"{value.name} [{', '.join(one.dim_param or str(one.dim_value) for one in value.type.tensor_type.shape.dim)}]"
        for value in graph.input
    )
    return f"{path}: takes {taken}; gives {', '.join(value.name for value in graph.output)}"


if __name__ == "__main__":
    keep_streams(patience=None)
    sys.exit(checked_output(main()))

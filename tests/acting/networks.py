"""Small acting networks for tests: ONNX graphs whose parameters are inputs, as the learner exports them, made without
torch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto, helper

from ddrl.acting.policy_file import ActingModel
from ddrl.core.rows import ParameterLayout
from ddrl.core.specs import ArraySpec, EnvSpec


def make_mlp(spec: EnvSpec, hidden: tuple[int, ...] = (16,)) -> ActingModel:
    """A multilayer perceptron with ReLU that gives action values."""
    widths = (spec.observation.size, *hidden, spec.num_actions)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    nodes = [
        helper.make_node("Flatten", ["observation"], ["flat"], axis=1),
        helper.make_node("Cast", ["flat"], ["x0"], to=TensorProto.FLOAT),
    ]
    for place, (before, after) in enumerate(pairwise(widths)):
        shapes[f"{place}.weight"], shapes[f"{place}.bias"] = ((after, before), "float32"), ((after,), "float32")
        last = place == len(widths) - 2
        nodes.append(
            helper.make_node(
                "Gemm", [f"x{place}", f"{place}.weight", f"{place}.bias"], ["q" if last else f"h{place}"], transB=1
            )
        )
        if not last:
            nodes.append(helper.make_node("Relu", [f"h{place}"], [f"x{place + 1}"]))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.observation.dtype))
    inputs = [
        helper.make_tensor_value_info("observation", kind, ["batch", *spec.observation.shape]),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, (shape, _) in shapes.items()),
    ]
    outputs = [helper.make_tensor_value_info("q", TensorProto.FLOAT, ["batch", spec.num_actions])]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    outputs = {"q": ArraySpec((spec.num_actions,), "float32")}
    return ActingModel(model.SerializeToString(), ParameterLayout.of(shapes), spec, outputs, "epsilon_greedy")


def random_vector(layout: ParameterLayout, seed: int) -> np.ndarray:
    """Parameters drawn at random [layout.nbytes]."""
    generator = np.random.default_rng(seed)
    vector = np.zeros(layout.nbytes, np.uint8)
    for view in layout.views(vector).values():
        view[...] = generator.standard_normal(view.shape)
    return vector


def mlp_values(layout: ParameterLayout, vector: np.ndarray, observation: np.ndarray) -> np.ndarray:
    """What the network computes, in numpy."""
    tensors = list(layout.views(vector).values())
    x = observation.reshape(len(observation), -1).astype(np.float32)
    for place in range(0, len(tensors), 2):
        x = x @ tensors[place].T + tensors[place + 1]
        if place < len(tensors) - 2:
            x = np.maximum(x, 0)
    return x

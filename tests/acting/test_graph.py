"""Graphs of strangers: how large one may be is known before the runtime loads it, which may take any time."""

from __future__ import annotations

import subprocess
import sys

import pytest
from onnx import TensorProto, helper

from ddrl.acting.graph import MAX_NODES, Graph, refuse_large
from ddrl.core.errors import NetworkError
from tests.sources import environment
from tests.waiting import PATIENCE

VALUE = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
RESULT = helper.make_tensor_value_info("q", TensorProto.FLOAT, [1])
SWITCH = helper.make_tensor_value_info("switch", TensorProto.BOOL, [1])


def nodes(count: int) -> list[object]:
    names = ["x", *(f"a{number}" for number in range(count - 1)), "q"]
    return [helper.make_node("Abs", [names[number]], [names[number + 1]]) for number in range(count)]


def plain(count: int) -> bytes:
    return helper.make_model(helper.make_graph(nodes(count), "g", [VALUE], [RESULT])).SerializeToString()


def inside(count: int) -> bytes:
    """The nodes are in the two branches of one."""
    branches = {name: helper.make_graph(nodes(count // 2), name, [], [RESULT]) for name in ("then", "else")}
    node = helper.make_node("If", ["switch"], ["q"], then_branch=branches["then"], else_branch=branches["else"])
    return helper.make_model(helper.make_graph([node], "g", [VALUE, SWITCH], [RESULT])).SerializeToString()


def functions(count: int) -> bytes:
    """A node that calls a function, which a runtime copies to it; functions may call others."""
    opsets = [helper.make_opsetid("", 17)]
    made = helper.make_function("own", "f", ["x"], ["q"], [helper.make_node("Abs", ["x"], ["q"])], opsets)
    graph = helper.make_graph([helper.make_node("f", ["x"], ["q"], domain="own")], "g", [VALUE], [RESULT])
    return helper.make_model(graph, functions=[made]).SerializeToString()


@pytest.mark.parametrize("made", [plain, inside, functions])
def test_a_graph_larger_than_any_network_is_refused_before_it_is_loaded(made, monkeypatch):
    monkeypatch.setattr("ddrl.acting.graph.onnxruntime.InferenceSession", None)
    with pytest.raises(NetworkError, match=f"more than {MAX_NODES} nodes"):
        Graph(made(MAX_NODES + 2))


def test_what_is_no_message_is_refused():
    whole = plain(3)
    for damaged in (whole[:-1], b"\xff" * 40, b"\x0b\x0c", b"\x3a\xff\xff\xff\xff\x7f"):
        with pytest.raises(NetworkError, match="damaged, or no ONNX graph"):
            refuse_large(damaged)


def test_graphs_up_to_the_limit_are_not_refused():
    for made in (plain, inside):
        refuse_large(made(MAX_NODES - 20))


def test_a_runtime_that_cannot_be_loaded_is_said_where_it_is_needed(tmp_path):
    code = """
import sys
sys.modules["onnxruntime"] = None
import ddrl.evaluate
from ddrl.run.__main__ import main
sys.exit(main(["--serial", "cartpole", "--set", "run.dir=run"]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ddrl: ONNX Runtime, by which policies act, cannot be loaded (")

"""Acting on views of a parameter vector, without torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from msgspec.structs import replace
from onnx import TensorProto, helper, numpy_helper

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import ActingModel
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.forks import forbid_torch
from ddrl.core.rows import ParameterLayout
from ddrl.core.specs import ActingInput, ArraySpec, EnvSpec
from tests.acting.networks import make_mlp, mlp_values, random_vector

SPEC = EnvSpec("test", ArraySpec((3,), "float32"), 4)
IMAGES = EnvSpec("test", ArraySpec((2, 5, 5), "uint8"), 3, frame_stack=2)


def observations(spec: EnvSpec, count: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if spec.observation.dtype == "uint8":
        return generator.integers(0, 255, (count, *spec.observation.shape), np.uint8)
    return generator.standard_normal((count, *spec.observation.shape)).astype(np.float32)


@pytest.mark.parametrize("spec", [SPEC, IMAGES])
def test_values_are_what_the_network_computes_for_any_number_of_observations(spec: EnvSpec) -> None:
    model = make_mlp(spec, (16, 8))
    policy, vector = ActingPolicy(model), random_vector(model.layout, 1)
    for count in (1, 8, 3, 8):
        observation = observations(spec, count, count)
        expected = mlp_values(model.layout, vector, observation)
        np.testing.assert_allclose(policy.act(observation, vector)["q"], expected, rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(policy.greedy(observation, vector), expected.argmax(axis=1))


def test_a_new_version_in_another_slot_and_in_the_same_slot_is_used_at_once() -> None:
    model = make_mlp(SPEC)
    policy, observation = ActingPolicy(model), observations(SPEC, 8)
    slots = np.zeros((20, model.layout.nbytes), np.uint8)
    for version in range(60):
        vector = slots[version % len(slots)]
        vector[:] = random_vector(model.layout, version)
        np.testing.assert_allclose(
            policy.act(observation, vector)["q"], mlp_values(model.layout, vector, observation), rtol=1e-4, atol=1e-4
        )
    vector[:] = random_vector(model.layout, 99)  # in place, as a mailbox's writer does
    np.testing.assert_allclose(
        policy.act(observation, vector)["q"], mlp_values(model.layout, vector, observation), rtol=1e-4, atol=1e-4
    )


def test_parameters_are_read_where_they_lie_even_if_they_may_not_be_written() -> None:
    model = make_mlp(SPEC)
    vector = random_vector(model.layout, 1)
    expected = mlp_values(model.layout, vector, observations(SPEC, 2))
    vector.flags.writeable = False
    np.testing.assert_allclose(
        ActingPolicy(model).act(observations(SPEC, 2), vector)["q"], expected, rtol=1e-4, atol=1e-4
    )


def test_of_equal_values_the_first_action_is_taken() -> None:
    model = make_mlp(SPEC)
    assert (
        ActingPolicy(model).greedy(observations(SPEC, 5), np.zeros(model.layout.nbytes, np.uint8)).tolist() == [0] * 5
    )


def test_what_is_not_an_acting_network_is_refused() -> None:
    model = make_mlp(SPEC)
    with pytest.raises(NetworkError, match="cannot be loaded"):
        ActingPolicy(replace(model, onnx=b"not a graph"))
    with pytest.raises(NetworkError, match=r"takes observation, 0\.weight.* must take 'observation', declared inputs"):
        ActingPolicy(replace(model, layout=ParameterLayout.of({"0.weight": ((16, 3), "float32")})))
    with pytest.raises(NetworkError, match="'logits' is needed by the chooser categorical"):
        ActingPolicy(replace(model, chooser="categorical"))
    with pytest.raises(ConfigError, match="continuous actions"):
        ActingPolicy(replace(model, spec=EnvSpec("Pendulum-v1", SPEC.observation, 0, ArraySpec((1,), "float32"))))


def test_values_for_another_number_of_actions_are_refused() -> None:
    model = make_mlp(SPEC)
    fewer = replace(model, outputs={"q": ArraySpec((3,), "float32")})
    with pytest.raises(NetworkError, match=r"does not give q \(2, 3\)"):
        ActingPolicy(fewer).act(observations(SPEC, 2), random_vector(model.layout, 1))


def test_parameters_of_another_network_are_refused() -> None:
    with pytest.raises(NetworkError, match="do not fit"):
        ActingPolicy(make_mlp(SPEC)).act(observations(SPEC, 2), np.zeros(64, np.uint8))


def test_a_process_that_acts_loads_no_torch_and_one_that_did_is_refused() -> None:
    code = """
import sys
import ddrl.envs, ddrl.evaluate, ddrl.rollout.worker
from ddrl.core.config import EnvConfig
from ddrl.core.errors import NetworkError
from ddrl.core.forks import forbid_torch
ddrl.envs.make_vector_env(EnvConfig(), 2).reset(0)
ddrl.envs.make_vector_env(EnvConfig(id="ALE/Pong-v5"), 1).reset(0)
heavy = [name for name in sys.modules if name.split(".")[0] in ("torch", "onnx", "mpi4py")]
assert not heavy, "something heavy was loaded"
forbid_torch()
sys.modules["torch"] = sys
try:
    forbid_torch()
except NetworkError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch is loaded in a process that acts" in done.stdout


def test_the_tripwire_is_quiet_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    forbid_torch()


def showing_model(declared: ActingInput) -> ActingModel:
    """A model that shows a further input [1] as the value of action 1; one of a state counts it up: state + 1."""
    state = declared.kind == "state"
    nodes = [
        *([helper.make_node("Add", ["given", "one"], ["given_next"])] if state else []),
        helper.make_node("Flatten", ["observation"], ["flat"], axis=1),
        helper.make_node("ReduceSum", ["flat", "axes"], ["sum"]),
        helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
        helper.make_node("Concat", ["nothing", "given"], ["q"], axis=1),
    ]
    values = [numpy_helper.from_array(np.array(1, np.int64).reshape(1), "axes")]
    values += [
        numpy_helper.from_array(np.float32(number).reshape(1), name) for name, number in (("zero", 0), ("one", 1))
    ]
    place = helper.make_tensor_value_info
    inputs = [place("observation", TensorProto.FLOAT, ["batch", 3]), place("given", TensorProto.FLOAT, ["batch", 1])]
    widths = {"q": 2} | ({"given_next": 1} if state else {})
    outputs = [place(name, TensorProto.FLOAT, ["batch", width]) for name, width in widths.items()]
    graph = helper.make_graph(nodes, "showing", inputs, outputs, values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    spec = EnvSpec("test", ArraySpec((3,), "float32"), 2)
    shapes = {name: ArraySpec((width,), "float32") for name, width in widths.items()}
    return ActingModel(model.SerializeToString(), ParameterLayout.of({}), spec, shapes, "epsilon_greedy", (declared,))


def counting_model() -> ActingModel:
    return showing_model(ActingInput("given", "state", (1,), initial=5.0, output="given_next"))


@pytest.mark.parametrize("per", ["step", "episode"])
def test_noise_is_drawn_anew_with_each_commit_or_where_an_episode_ended(per: str) -> None:
    policy = ActingPolicy(showing_model(ActingInput("given", "noise", (1,), per=per)))
    vector = np.zeros(0, np.uint8)
    seen = np.zeros((3, 3), np.float32)

    def shown() -> list[float]:
        return policy.act(seen, vector)["q"][:, 1].tolist()

    policy.reset(count=3)
    first = shown()
    assert len(set(first)) == 3
    assert shown() == first, "nothing was committed"
    policy.commit()
    second = shown()
    kept = [one == other for one, other in zip(first, second, strict=True)]
    assert kept == [per == "episode"] * 3
    policy.commit()
    policy.reset(np.array([False, True, False]))
    kept = [one == other for one, other in zip(second, shown(), strict=True)]
    assert kept == ([True, False, True] if per == "episode" else [False] * 3)


def test_a_state_advances_with_each_commit_and_begins_anew_where_an_episode_ended() -> None:
    policy, vector = ActingPolicy(counting_model()), np.zeros(0, np.uint8)
    seen = np.zeros((3, 3), np.float32)

    def step() -> list[float]:
        values = policy.act(seen, vector)["q"][:, 1].tolist()
        policy.commit()
        return values

    assert [step(), step()] == [[5.0] * 3, [6.0] * 3]
    policy.act(seen, vector)  # not committed: nothing advances
    assert step() == [7.0] * 3
    policy.reset(np.array([False, True, False]))
    assert [step(), step()] == [[8.0, 5.0, 8.0], [9.0, 6.0, 9.0]]
    policy.reset()
    assert step() == [5.0] * 3

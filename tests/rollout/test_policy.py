"""Acting on views of a parameter vector, without torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ddrl.core.errors import NetworkError
from ddrl.core.layouts import ParameterLayout
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.rollout.policy import ActingPolicy, forbid_torch
from tests.rollout.networks import make_mlp, mlp_values, random_vector

SPEC = EnvSpec("test", ArraySpec((3,), "float32"), 4)
IMAGES = EnvSpec("test", ArraySpec((2, 5, 5), "uint8"), 3, frame_stack=2)


def observations(spec: EnvSpec, count: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if spec.observation.dtype == "uint8":
        return generator.integers(0, 255, (count, *spec.observation.shape), np.uint8)
    return generator.standard_normal((count, *spec.observation.shape)).astype(np.float32)


@pytest.mark.parametrize("spec", [SPEC, IMAGES])
def test_values_are_what_the_network_computes_for_any_number_of_observations(spec: EnvSpec) -> None:
    onnx, layout = make_mlp(spec, (16, 8))
    policy, vector = ActingPolicy(onnx, layout, spec), random_vector(layout, 1)
    for count in (1, 8, 3, 8):
        observation = observations(spec, count, count)
        expected = mlp_values(layout, vector, observation)
        np.testing.assert_allclose(policy.values(observation, vector), expected, rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(policy.greedy(observation, vector), expected.argmax(axis=1))


def test_a_new_version_in_another_slot_and_in_the_same_slot_is_used_at_once() -> None:
    onnx, layout = make_mlp(SPEC)
    policy, observation = ActingPolicy(onnx, layout, SPEC), observations(SPEC, 8)
    slots = np.zeros((20, layout.nbytes), np.uint8)
    for version in range(60):
        vector = slots[version % len(slots)]
        vector[:] = random_vector(layout, version)
        np.testing.assert_allclose(
            policy.values(observation, vector), mlp_values(layout, vector, observation), rtol=1e-4, atol=1e-4
        )
    vector[:] = random_vector(layout, 99)  # in place, as a mailbox's writer does
    np.testing.assert_allclose(
        policy.values(observation, vector), mlp_values(layout, vector, observation), rtol=1e-4, atol=1e-4
    )


def test_parameters_are_read_where_they_lie_even_if_they_may_not_be_written() -> None:
    onnx, layout = make_mlp(SPEC)
    vector = random_vector(layout, 1)
    expected = mlp_values(layout, vector, observations(SPEC, 2))
    vector.flags.writeable = False
    np.testing.assert_allclose(
        ActingPolicy(onnx, layout, SPEC).values(observations(SPEC, 2), vector), expected, rtol=1e-4, atol=1e-4
    )


def test_values_belong_to_the_caller() -> None:
    onnx, layout = make_mlp(SPEC)
    policy, vector = ActingPolicy(onnx, layout, SPEC), random_vector(layout, 1)
    first = policy.values(observations(SPEC, 2, 1), vector)
    before = first.copy()
    policy.values(observations(SPEC, 2, 2), vector)
    np.testing.assert_array_equal(first, before)


def test_of_equal_values_the_first_action_is_taken() -> None:
    onnx, layout = make_mlp(SPEC)
    assert (
        ActingPolicy(onnx, layout, SPEC).greedy(observations(SPEC, 5), np.zeros(layout.nbytes, np.uint8)).tolist()
        == [0] * 5
    )


def test_what_is_not_an_acting_network_is_refused() -> None:
    onnx, layout = make_mlp(SPEC)
    with pytest.raises(NetworkError, match="cannot be loaded"):
        ActingPolicy(b"not a graph", layout, SPEC)
    with pytest.raises(
        NetworkError, match=r"takes observation, 0\.weight.* must take 'observation' and parameters of its manifest"
    ):
        ActingPolicy(onnx, ParameterLayout.of({"0.weight": ((16, 3), "float32")}), SPEC)
    with pytest.raises(NetworkError, match="continuous actions"):
        ActingPolicy(onnx, layout, EnvSpec("Pendulum-v1", SPEC.observation, 0, ArraySpec((1,), "float32")))


def test_values_for_another_number_of_actions_are_refused() -> None:
    onnx, layout = make_mlp(SPEC)
    fewer = EnvSpec("test", SPEC.observation, 3)
    with pytest.raises(NetworkError, match=r"does not give \(2, 3\) action values"):
        ActingPolicy(onnx, layout, fewer).values(observations(SPEC, 2), random_vector(layout, 1))


def test_parameters_of_another_network_are_refused() -> None:
    onnx, layout = make_mlp(SPEC)
    with pytest.raises(NetworkError, match="do not fit"):
        ActingPolicy(onnx, layout, SPEC).values(observations(SPEC, 2), np.zeros(64, np.uint8))


def test_a_process_that_acts_loads_no_torch_and_one_that_did_is_refused() -> None:
    code = """
import sys
import ddrl.envs, ddrl.evaluate, ddrl.rollout.worker
from ddrl.core.config import EnvConfig
from ddrl.core.errors import NetworkError
from ddrl.rollout.policy import forbid_torch
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

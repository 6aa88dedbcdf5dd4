"""Records of named arrays from batches to acting: the mlp, a user's network over a queue, the export, the policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import LearnerConfig
from ddrl.core.errors import NetworkError
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner
from ddrl.learner.export import random_inputs
from tests.learner.learner_cases import Transitions, learner_of

MIXED = EnvSpec(
    "Mixed-v0", ArraySpec.record({"picture": ArraySpec((2, 3), "uint8"), "speed": ArraySpec((2,), "float32")}), 3
)
QUEUE = EnvSpec(
    "Queue-v0",
    ArraySpec.record({"cash": ArraySpec((1,), "float32"), "queue": ArraySpec((4, 2), "float32", axes=("queue", ""))}),
    4,
)
SCORES = "tests.run.networks:Scores"


def observations(spec: EnvSpec, count: int, seed: int = 0) -> NDArray[Any]:
    """Structured observations [count]."""
    values = np.zeros(count, spec.observation.numpy)
    arrays = random_inputs(spec, (), count, np.random.default_rng(seed))
    for name, array in zip(spec.observation.arrays, arrays, strict=True):
        values[name] = array
    return values


def batch_of(spec: EnvSpec, size: int, seed: int) -> Transitions:
    """Transitions as replay gives them: states are dicts."""
    generator = np.random.default_rng(seed)
    states = [observations(spec, size, seed + place) for place in range(2)]
    s_tm1, s_t = ({name: np.ascontiguousarray(s[name]) for name in spec.observation.arrays} for s in states)
    return Transitions(
        s_tm1,  # type: ignore[arg-type]
        generator.integers(0, spec.num_actions, size),
        generator.random(size, np.float32),
        np.full(size, 0.9, np.float32),
        s_t,  # type: ignore[arg-type]
        np.ones(size, np.float32),
    )


def acts_as_it_learns(learner: Learner, spec: EnvSpec) -> None:
    policy = ActingPolicy(learner.acting_model())
    for count in (3, 1):
        states = observations(spec, count, 7)
        acted = policy.act(states, learner.parameters.numpy())["q"]
        np.testing.assert_allclose(acted, learner.inspect(states)["q"], rtol=1e-4, atol=1e-5)


def test_the_mlp_learns_from_named_arrays_and_acts_on_them() -> None:
    learner = learner_of(LearnerConfig(network="auto", hidden=[16], lr=0.01), MIXED)
    batch = batch_of(MIXED, 8, 0)
    losses = [learner.update(batch).figures["loss"] for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    acts_as_it_learns(learner, MIXED)
    names = [value.name for value in onnxruntime.InferenceSession(learner.acting_model().onnx).get_inputs()]
    assert names[:2] == ["picture", "speed"]


def test_the_mlp_reads_each_array_in_its_own_scale() -> None:
    """Bytes count as 255ths: without that the picture would drown the speed."""
    network = learner_of(LearnerConfig(hidden=[4]), MIXED).parts["value"].module
    states = observations(MIXED, 2)
    import torch

    flat = network.inputs({name: torch.from_numpy(states[name].copy()) for name in MIXED.observation.arrays})
    expected = np.concatenate([states["picture"].reshape(2, -1) / 255.0, states["speed"]], axis=1)
    np.testing.assert_allclose(flat.numpy(), expected, rtol=1e-6)


def test_both_ways_of_differentiating_agree_on_named_arrays() -> None:
    written, reference = (learner_of(LearnerConfig(hidden=[8]), MIXED) for _ in range(2))
    reference.use_autograd("value")
    for turn in range(5):
        batch = batch_of(MIXED, 8, turn)
        assert written.update(batch).figures["loss"] == pytest.approx(reference.update(batch).figures["loss"], rel=1e-4)


def test_permuting_a_queue_permutes_its_scores_in_learner_and_policy() -> None:
    learner = learner_of(LearnerConfig(network=SCORES), QUEUE)
    for turn in range(3):
        learner.update(batch_of(QUEUE, 8, turn))
    acts_as_it_learns(learner, QUEUE)
    states = observations(QUEUE, 6, 3)
    order = np.random.default_rng(0).permutation(4)
    permuted = states.copy()
    permuted["queue"], permuted["queue_mask"] = states["queue"][:, order], states["queue_mask"][:, order]
    policy, vector = ActingPolicy(learner.acting_model()), learner.parameters.numpy()
    plain = policy.act(states, vector)["q"].copy()
    assert plain.std() > 0
    np.testing.assert_allclose(policy.act(permuted, vector)["q"], plain[:, order], rtol=1e-4, atol=1e-5)


def test_a_graph_over_a_queue_takes_queues_of_other_lengths() -> None:
    learner = learner_of(LearnerConfig(network=SCORES), QUEUE)
    model = learner.acting_model()
    session = onnxruntime.InferenceSession(model.onnx)
    states = observations(QUEUE, 2, 5)
    states["queue_mask"] = np.arange(4) < 3
    feed = model.layout.views(learner.parameters.numpy()) | {
        name: states[name].copy() for name in QUEUE.observation.arrays
    }
    whole = session.run(["q"], feed)[0]
    feed |= {"queue": states["queue"][:, :3].copy(), "queue_mask": states["queue_mask"][:, :3].copy()}
    np.testing.assert_allclose(session.run(["q"], feed)[0], whole[:, :3], rtol=1e-4, atol=1e-5)


def test_an_array_and_a_parameter_of_one_name_are_refused() -> None:
    import torch

    class Clash(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.speed = torch.nn.Parameter(torch.ones(2, 3))

        def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
            return observation["speed"] @ self.speed

    learner = learner_of(LearnerConfig(), MIXED, module=Clash())
    with pytest.raises(NetworkError, match="'speed'"):
        learner.acting_model()

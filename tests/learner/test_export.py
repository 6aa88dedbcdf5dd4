"""The acting model: ONNX Runtime computes what torch computes, from parameters it is handed."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from ddrl.acting.policy_file import ActingModel
from ddrl.core.config import LearnerConfig
from ddrl.core.errors import NetworkError
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import FlatParameters, export_acting, make_network
from tests.learner.learner_cases import IMAGE, VECTOR, learner_of, random_batch, values
from tests.learner.learner_user_networks import Branches, Normalized, NotExportable, Plain, Tied


def act(model: ActingModel, vector: np.ndarray, observation: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.onnx, providers=["CPUExecutionProvider"])
    views = model.layout.views(vector)
    feed = {value.name: views[value.name] for value in session.get_inputs() if value.name != "observation"}
    return session.run(["q"], {**feed, "observation": observation})[0]


@pytest.mark.parametrize("form", ["mean", "policy", "none"])
@pytest.mark.parametrize(
    "spec",
    [
        VECTOR,
        IMAGE,
        EnvSpec("Bytes-v0", ArraySpec((3, 5), "uint8"), 2),
        EnvSpec("Wide-v0", ArraySpec((6,), "float64"), 2),
        EnvSpec("Pixels-v0", ArraySpec((40, 40, 3), "uint8"), 2),
    ],
)
def test_rollouts_act_on_new_parameters_as_the_learner_would(spec: EnvSpec, form: str) -> None:
    learner = learner_of(LearnerConfig(dueling=form, lr=0.01), spec)
    model = learner.acting_model()
    assert learner.parameters.layout == model.layout
    for turn in range(2):
        learner.update(random_batch(spec, 8, turn))
    observation = random_batch(spec, 7, 9).s_t
    np.testing.assert_allclose(
        act(model, learner.parameters.numpy(), observation), values(learner, observation), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("kind", [Plain, Normalized, Tied])
def test_user_modules_with_buffers_or_shared_weights_act_from_the_vector(kind: type[nn.Module]) -> None:
    network = kind(VECTOR)
    model = export_acting(network, VECTOR)
    flat = FlatParameters(network)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.dtype == torch.float32:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    observation = random_batch(VECTOR, 5, 0).s_t
    with torch.no_grad():
        expected = network.eval()(torch.from_numpy(observation)).numpy()
    np.testing.assert_allclose(act(model, flat.numpy(), observation), expected, rtol=1e-4, atol=1e-5)


def test_the_graph_holds_no_parameter_s_value() -> None:
    network = make_network(LearnerConfig(), IMAGE)
    model = export_acting(network, IMAGE)
    assert model.layout.nbytes > 13_000_000
    assert len(model.onnx) < 10_000


def test_exporting_leaves_the_network_and_torch_s_generator_as_they_were() -> None:
    network = Normalized(VECTOR).train()
    state, drawn = {name: tensor.clone() for name, tensor in network.state_dict().items()}, torch.get_rng_state()
    export_acting(network, VECTOR)
    assert network.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_equal_networks_export_to_equal_bytes() -> None:
    one, other = (export_acting(make_network(LearnerConfig(), VECTOR, seed=seed), VECTOR) for seed in (1, 2))
    assert one == other


def test_a_network_that_onnx_computes_differently_is_refused() -> None:
    with pytest.raises(NetworkError, match="computes something else after its export"):
        export_acting(Branches(VECTOR), VECTOR)


def test_a_network_that_cannot_be_exported_is_refused_in_one_line() -> None:
    with pytest.raises(NetworkError, match="NotExportable cannot be exported to ONNX") as caught:
        export_acting(NotExportable(VECTOR), VECTOR)
    assert "\n" not in str(caught.value)

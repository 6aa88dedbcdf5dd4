"""The flat vector: every parameter and buffer lives in it, and nowhere else."""

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.core.config import LearnerConfig
from ddrl.core.errors import CheckpointError, NetworkError
from ddrl.core.specs import EnvSpec
from ddrl.learner import FlatParameters, make_network
from tests.learner.learner_cases import IMAGE, VECTOR
from tests.learner.learner_user_networks import Doubles, Normalized, NothingToLearn, Plain, Tied


@pytest.mark.parametrize(
    ("kind", "spec"), [(Plain, VECTOR), (Normalized, VECTOR), (Tied, VECTOR), (None, VECTOR), (None, IMAGE)]
)
def test_the_vector_holds_the_state_dict_and_the_module_computes_as_before(kind: type | None, spec: EnvSpec) -> None:
    network = (kind(spec) if kind else make_network(LearnerConfig(), spec)).eval()
    observation = torch.ones((3, *spec.observation.shape), dtype=getattr(torch, spec.observation.dtype))
    before, state = network(observation), {name: tensor.clone() for name, tensor in network.state_dict().items()}
    flat = FlatParameters(network)
    flat.check()
    assert torch.equal(network(observation), before)
    views = flat.layout.views(flat.numpy())
    assert all(np.array_equal(view, state[name].numpy()) for name, view in views.items())
    assert {id(tensor) for tensor in network.parameters()} == {
        id(network.get_parameter(name)) for name in flat.parameters()
    } | {id(tensor) for tensor in network.parameters() if not tensor.requires_grad}


def test_writing_the_vector_changes_the_network_and_training_changes_the_vector() -> None:
    network = Normalized(VECTOR)
    flat = FlatParameters(network)
    vector = np.zeros_like(flat.numpy())
    flat.layout.views(vector)["norm.running_var"][:] = 4.0
    flat.vector.copy_(torch.from_numpy(vector))
    assert torch.equal(network.norm.running_var, torch.full((4,), 4.0))
    network.train()(torch.randn(16, 4))
    after = flat.layout.views(flat.numpy())
    assert after["norm.num_batches_tracked"] == 1
    assert not np.any(after["norm.running_var"] == 4.0)
    flat.check()


def test_shared_tensors_stand_in_the_vector_once_and_stay_shared() -> None:
    network = Tied(VECTOR)
    flat = FlatParameters(network)
    assert [entry.name for entry in flat.layout.entries].count("first.weight") == 1
    assert "second.weight" not in {entry.name for entry in flat.layout.entries}
    assert network.first.weight is network.second.weight


def test_every_tensor_stands_at_a_cache_line() -> None:
    flat = FlatParameters(Normalized(VECTOR))
    assert flat.vector.data_ptr() % 64 == 0
    assert all(entry.offset % 64 == 0 for entry in flat.layout.entries)


def test_the_check_notices_a_parameter_that_left_the_vector() -> None:
    network = Plain(VECTOR)
    flat = FlatParameters(network)
    network.layers[0].weight.data = network.layers[0].weight.data.clone()
    with pytest.raises(AssertionError, match="has left the flat vector"):
        flat.check()


def test_a_vector_of_another_network_is_refused() -> None:
    flat = FlatParameters(Plain(VECTOR))
    with pytest.raises(CheckpointError, match="another network"):
        flat.copy_to(np.zeros(flat.layout.nbytes // 4, np.float32))


@pytest.mark.parametrize(
    ("kind", "words"), [(Doubles, "is float64: parameters must be float32"), (NothingToLearn, "no parameters to learn")]
)
def test_networks_that_cannot_be_flattened_are_refused(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(NetworkError, match=words):
        FlatParameters(kind(VECTOR))

"""Parts of a batch and their sum: what data-parallel nodes compute is the gradient of the whole."""

import itertools
import uuid

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.balance.exchange import Exchange, weighted_mean
from ddrl.balance.messages import (
    NODES,
    Compute,
    Rows,
    SharedMemory,
    arrays_of,
    count_rows,
    join_rows,
    take_rows,
)
from ddrl.channels.segment import Segment
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.errors import NetworkError
from ddrl.learner import Learner
from tests.learner import continuous_cases, learner_cases
from tests.learner.sequence_cases import CUE, SHORT, sequences

SIZES = (1, 11, 4)
DISCRETE, CONTINUOUS = ("dqn", "c51", "qrdqn", "iqn"), ("td3", "d4pg")


def case(algorithm: str, **options):
    """A learner and a batch of sum(SIZES) rows for it."""
    size = sum(SIZES)
    if algorithm in CONTINUOUS:
        learner = continuous_cases.learner_of(algorithm, **options)
        return learner, continuous_cases.random_batch(continuous_cases.BOX, size, 3)
    if algorithm == "r2d2":
        config = Config(run=RunConfig(seed=5), learner=LearnerConfig(algorithm="r2d2"), tables={"learner.r2d2": SHORT})
        return Learner.of(config, CUE), sequences(size)
    table = {"learner.c51": {"sigma": 0.5}} if algorithm == "noisy" else {}
    settings = LearnerConfig(algorithm="c51" if algorithm == "noisy" else algorithm, hidden=[16, 16], **options)
    learner = Learner.of(Config(run=RunConfig(seed=1), learner=settings, tables=table), learner_cases.VECTOR)
    return learner, learner_cases.random_batch(learner_cases.VECTOR, size, 3)


def parts_of(batch, sizes=SIZES):
    """The batch as nodes get it: cut, sent, and read again."""
    edges = np.cumsum([0, *sizes])
    for start, stop in itertools.pairwise(edges):
        rows = arrays_of(take_rows(batch, start, stop))
        request = NODES.decode(NODES.encode(Compute("", (), 0, False, False, rows=rows)))
        assert isinstance(request, Compute)
        yield Rows(request.rows, (int(start), len(batch.weight)))


@pytest.mark.parametrize("algorithm", [*DISCRETE, *CONTINUOUS, "r2d2", "noisy"])
def test_the_weighted_mean_of_the_parts_is_the_gradient_of_the_whole(algorithm):
    learner, batch = case(algorithm)
    exchange = Exchange(learner)
    for part in learner.parts:
        learner.seed(7)
        whole = learner.gradient(batch, part)
        assert whole is not None
        expected = whole.vector.clone()
        priority = None if whole.priority is None else whole.priority.clone()
        vectors, priorities = [], []
        for rows in parts_of(batch):
            learner.seed(7)
            gradient = learner.gradient(rows, part)
            vectors.append(exchange.flat(gradient, exchange.buffer(part)).copy())
            priorities.append(gradient.priority)
        weights = [size / sum(SIZES) for size in SIZES]
        total = exchange.sum(part, vectors, weights, sum(SIZES), None, {})
        found = total.vector
        assert torch.linalg.norm(found - expected) <= 1e-6 * torch.linalg.norm(expected)
        if priority is not None:
            assert torch.allclose(torch.cat(priorities), priority, rtol=1e-4, atol=1e-5)


def test_in_float64_the_sum_is_the_whole_to_twelve_digits():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    inputs, wanted, weight = torch.randn(64, 5).double(), torch.randn(64, 1).double(), torch.rand(64, 1).double()

    def gradient(rows: slice) -> torch.Tensor:
        loss = (weight[rows] * (network(inputs[rows]) - wanted[rows]).square()).mean()
        pieces = torch.autograd.grad(loss, list(network.parameters()))
        return torch.cat([piece.flatten() for piece in pieces])

    whole = gradient(slice(None))
    total = weighted_mean(
        [gradient(slice(0, 3)), gradient(slice(3, 50)), gradient(slice(50, 64))], [3 / 64, 47 / 64, 14 / 64]
    )
    assert torch.linalg.norm(total - whole) <= 1e-12 * torch.linalg.norm(whole)


def test_a_batch_that_is_cut_and_joined_is_the_batch():
    batch = sequences(16)
    again = join_rows([take_rows(batch, 0, 5), take_rows(batch, 5, 6), take_rows(batch, 6, 16)])
    assert count_rows(again) == 16
    for name, array in arrays_of(batch).items():
        np.testing.assert_array_equal(arrays_of(again)[name], array)


def test_vectors_of_one_learner_make_another_equal():
    learner, batch = case("td3", target_period=2)
    other = continuous_cases.learner_of("td3", target_period=2)
    here, there = Exchange(learner), Exchange(other)
    before = there.versions()
    for _ in range(5):
        learner.update(batch)
    assert all(version > before[name] for name, version in here.versions().items())
    for name in here.versions():
        there.set_vector(name, here.vector(name).copy())
    there.set_updates([part.updates for part in learner.parts.values()])
    assert there.versions() == here.versions()
    for one in (learner, other):
        one.seed(1)
    first, second = learner.gradient(batch, "critic"), other.gradient(batch, "critic")
    assert torch.equal(first.vector, second.vector)


@pytest.mark.parametrize("algorithm", ["dqn", "td3", "r2d2"])
def test_learning_in_given_memory_gives_the_same_bits_there(algorithm):
    (here, batch), (there, _) = case(algorithm, target_period=2), case(algorithm, target_period=2)
    made = []

    def make(kind, nbytes):
        made.append(Segment.create(f"ddrl-{uuid.uuid4().hex[:8]}-h0-{kind}-0", kind, nbytes))
        return made[0]

    here.update(batch), there.update(batch)
    shared = SharedMemory.create(make, Exchange(there), 3, has_vectors=True)
    reader = Exchange(case(algorithm)[0])
    node = SharedMemory.attach(shared.name, reader, 3, 1, has_vectors=True)
    node.read(node.vectors)
    made[0].unlink()
    for _ in range(3):
        here.update(batch), there.update(batch)
    exchange = Exchange(here)
    for name, vector in node.vectors.items():
        np.testing.assert_array_equal(vector, exchange.vector(name))
        assert reader.vector(name).ctypes.data == vector.ctypes.data  # nothing is copied for the node
    memory = {f"{part}.online": np.zeros_like(shared.vectors[f"{part}.online"]) for part in there.parts}
    Exchange(there).move_into(memory)  # as vectors of a device do, they lie elsewhere
    there.update(batch)
    shared.publish(Exchange(there).versions())
    for name, vector in memory.items():
        np.testing.assert_array_equal(shared.vectors[name], vector)


def test_gradients_stand_in_the_memory_that_a_node_maps_and_their_sum_is_the_mean_with_its_cosines():
    learner, batch = case("dqn")
    exchange = Exchange(learner)
    memory = exchange.buffer("value")
    exchange.move_into({"value.gradient": memory})
    gradients = []
    for rows in parts_of(batch):
        gradient = learner.gradient(rows, "value")
        assert exchange.flat(gradient, exchange.buffer("value")).ctypes.data == memory.ctypes.data
        gradients.append(memory.copy())
    flat = np.stack([gradient.view(np.float32) for gradient in gradients])
    weights = np.array(SIZES) / sum(SIZES)
    mean, norms = weights @ flat, np.linalg.norm(flat, axis=1)
    total = exchange.sum("value", gradients, weights.tolist(), sum(SIZES), None, {})
    cosines, size = exchange.cosines(total, gradients, weights.tolist(), norms.tolist())
    np.testing.assert_allclose(cosines, flat @ mean / norms / np.linalg.norm(mean), rtol=1e-4)
    assert size == pytest.approx(np.linalg.norm(mean), rel=1e-5)


def test_a_norm_over_the_batch_is_refused_by_name():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

        def forward(self, observation):
            return self.layers(observation)

    with pytest.raises(NetworkError, match=r"layers\.1 \(BatchNorm1d\) normalises over the batch"):
        Exchange(learner_cases.learner_of(LearnerConfig(), module=Normed()))


def test_a_network_that_changes_its_buffers_is_refused():
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.layer = nn.Linear(4, 3)

        def forward(self, observation):
            if self.training:
                self.mean.lerp_(observation.detach().mean(0), 0.1)
            return self.layer(observation - self.mean)

    learner = learner_cases.learner_of(LearnerConfig(), module=Centered())
    (rows,) = parts_of(learner_cases.random_batch(learner_cases.VECTOR, 8, 3), (8,))
    with pytest.raises(NetworkError, match="the network of part value changes its buffers"):
        Exchange(learner).gradient(rows, "value", False)


def test_a_part_of_a_batch_keeps_fields_that_are_made_of_several_arrays():
    near, far, reward = (np.full((2, 1), value) for value in (1.0, 2.0, 3.0))
    rows = Rows({"s_t/near": near, "s_t/far": far, "r_t": reward}, (0, 2))
    assert list(arrays_of(rows)) == ["s_t/near", "s_t/far", "r_t"]
    assert rows.s_t["near"] is near
    assert rows.s_t["far"] is far
    assert rows.r_t is reward

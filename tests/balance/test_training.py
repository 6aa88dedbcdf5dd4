"""Pre-training of the DDQN sizer. Needs torch, as benchmarks do."""

import itertools

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [train]")

import torch

from benchmarks.microbatch import train as training
from benchmarks.microbatch.simulator import Simulation, make_scenario
from ddrl.balance.ddqn import ACTION_COUNT, CONTEXT_FEATURES, NODE_FEATURES, NodeState, ValueNetwork
from ddrl.balance.sizes import FilterSettings, fractions_at, water_level


def test_the_torch_network_and_the_numpy_one_give_the_same_values():
    agent, rng = training.Agent(3), np.random.default_rng(1)
    with torch.no_grad():
        for parameter in agent.online.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tensors = {name: tensor.detach().numpy() for name, tensor in agent.online.tensors().items()}
    features = rng.normal(size=(4, 9, len(NODE_FEATURES))).astype(np.float32)
    context = rng.normal(size=(4, len(CONTEXT_FEATURES))).astype(np.float32)
    mine, theirs = ValueNetwork(tensors)(features, context), agent.values(features, context)
    np.testing.assert_allclose(mine.nodes, theirs[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mine.first, theirs[1], rtol=1e-4, atol=1e-4)


def warm() -> tuple[Simulation, NodeState]:
    scenario = make_scenario("bursty", 3, 5, 40, 8)
    simulation, state = Simulation(scenario), NodeState(scenario.cluster, FilterSettings())
    observation = simulation.blank()
    for _ in range(30):
        state.update(observation)
        _, observation = simulation.step(training.apply_actions(state, np.zeros((3, 5), int)))
    state.update(observation)
    return simulation, state


def test_a_difference_reward_is_what_one_nodes_action_changes_and_keeping_changes_nothing():
    simulation, state = warm()
    rng = np.random.default_rng(2)
    taken, tried = rng.integers(0, ACTION_COUNT, (3, 5)), rng.integers(0, ACTION_COUNT, (3, 5, 2))
    all_nodes = np.full(3, 5)
    assert (training.gains(simulation, state, taken, np.zeros_like(tried), all_nodes) == 0).all()
    found = training.gains(simulation, state, taken, tried, all_nodes)

    def reward(actions):
        cluster = state.cluster
        slowness = state.slowness(actions)
        inputs = state.filter.overhead * slowness, state.filter.speed / slowness
        level = water_level(cluster.total, *inputs, cluster.min_size, cluster.max_size)
        return simulation.reward(fractions_at(level, *inputs, cluster.min_size, cluster.max_size), all_nodes)

    for node, turn in itertools.product(range(5), range(2)):
        alone, kept = taken.copy(), taken.copy()
        alone[:, node], kept[:, node] = tried[:, node, turn], 0
        np.testing.assert_allclose(found[:, node, turn], reward(alone) - reward(kept), atol=1e-12)


def test_the_double_q_target_takes_the_online_choice_and_the_target_value():
    agent = training.Agent(0)
    rows = {
        "features": torch.zeros(2, 3, len(NODE_FEATURES)),
        "next_features": torch.ones(2, 3, len(NODE_FEATURES)),
        "context": torch.zeros(2, len(CONTEXT_FEATURES)),
        "next_context": (torch.arange(len(CONTEXT_FEATURES)) == len(CONTEXT_FEATURES) - 4).float().expand(2, -1),
        "actions": torch.zeros(2, 3, 2, dtype=torch.int64),
        "rewards": torch.full((2, 3, 2, 4), 0.5),
        "first": torch.zeros(2, 1, dtype=torch.int64),
        "first_rewards": torch.zeros(2, 1, 4),
    }
    with torch.no_grad():  # the online network prefers action 2, the target values it at 7 where its own best is 100
        agent.online.get_parameter("values_bias").view(-1, 4)[2, 0] = 5.0
        agent.target.get_parameter("values_bias").view(-1, 4)[2, 0] = 7.0
        agent.target.get_parameter("values_bias").view(-1, 4)[3, 0] = 100.0
        for network in (agent.online, agent.target):
            network.get_parameter("values_weight").zero_()
            network.get_parameter("first2_weight").zero_()
    loss = agent.update(rows, 0.0)
    wanted = (0.5 + 0.1 * 7.0) ** 2 + 3 * 0.5**2
    assert loss == pytest.approx(wanted, rel=1e-5)


def test_training_writes_a_file_that_acts_and_the_same_seed_writes_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "ITERATIONS", 12)
    monkeypatch.setattr(training, "NODES_AT_ONCE", 20)
    for name in "ab":
        training.train(4, 15, tmp_path / name, "none")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    ValueNetwork.load(tmp_path / "a")
    training.train(5, 15, tmp_path / "c", "none")
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()

"""Problems whose answers are known: tabular MDPs by value iteration, and the MDP on which single Q-learning deceives
itself."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from ddrl.core.config import LearnerConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from tests.learner.learner_cases import Transitions, learner_of, values

DISCOUNT = 0.9


class Table(nn.Module):
    """Q as a table: one-hot states times a matrix."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.zeros(spec.observation.size, spec.num_actions))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation @ self.q


def one_hot(states: NDArray[np.int64], count: int) -> NDArray[np.float32]:
    return np.eye(count, dtype=np.float32)[states]


def random_mdp(
    states: int, actions: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """P [S, A, S], R [S, A, S] and which states are terminal [S]; the last one is."""
    generator = np.random.default_rng(seed)
    transition = generator.dirichlet(np.full(states, 0.3), (states, actions))
    return transition, generator.normal(size=(states, actions, states)), np.arange(states) == states - 1


def value_iteration(
    transition: NDArray[np.float64], reward: NDArray[np.float64], terminal: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Q* [S, A]: the fixed point of Q(s, a) = sum_s' P (R + gamma max_a' Q(s', a')), nothing after terminal states."""
    q = np.zeros(transition.shape[:2])
    for _ in range(1000):
        q = (transition * (reward + DISCOUNT * np.where(terminal, 0, q.max(1)))).sum(2)
    return q


def all_transitions(
    transition: NDArray[np.float64], reward: NDArray[np.float64], terminal: NDArray[np.bool_]
) -> Transitions:
    """Every (s, a, s') once, weighted by its probability: the batch whose gradient is the expectation."""
    count = len(terminal)
    s, a, s_next = (index.ravel() for index in np.indices(transition.shape))
    live = ~terminal[s]
    s, a, s_next = s[live], a[live], s_next[live]
    discount = np.where(terminal[s_next], 0, DISCOUNT).astype(np.float32)
    return Transitions(
        one_hot(s, count),
        a,
        reward[s, a, s_next].astype(np.float32),
        discount,
        one_hot(s_next, count),
        transition[s, a, s_next].astype(np.float32),
    )


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_table_converges_to_the_optimal_values_of_a_random_mdp(double: bool, seed: int) -> None:
    transition, reward, terminal = random_mdp(6, 3, seed)
    spec = EnvSpec("Random-MDP", ArraySpec((6,), "float32"), 3)
    config = LearnerConfig(lr=0.05, loss="mse", double=double, target_period=20, max_grad_norm=1e9, lr_end_fraction=0.0)
    learner = learner_of(config, spec, module=Table(spec))
    batch = all_transitions(transition, reward, terminal)
    for turn in range(3000):
        learner.anneal(turn / 3000)
        learner.update(batch, statistics=False)
    q = values(learner, np.eye(6, dtype=np.float32))
    np.testing.assert_allclose(q[~terminal], value_iteration(transition, reward, terminal)[~terminal], atol=2e-3)


@pytest.mark.parametrize("dueling", ["mean", "policy", "none"])
def test_a_network_converges_to_the_optimal_values_and_policy(dueling: str) -> None:
    transition, reward, terminal = random_mdp(5, 3, 7)
    spec = EnvSpec("Random-MDP", ArraySpec((5,), "float32"), 3)
    config = LearnerConfig(hidden=[32, 32], dueling=dueling, lr=3e-3, loss="mse", target_period=50, lr_end_fraction=0.0)
    learner = learner_of(config, spec, seed=0)
    batch = all_transitions(transition, reward, terminal)
    for turn in range(3000):
        learner.anneal(turn / 3000)
        learner.update(batch, statistics=False)
    q, best = (
        values(learner, np.eye(5, dtype=np.float32))[~terminal],
        value_iteration(transition, reward, terminal)[~terminal],
    )
    np.testing.assert_allclose(q, best, atol=0.02)
    assert np.array_equal(q.argmax(1), best.argmax(1))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_n_step_windows_lead_to_the_same_values_as_one_step(n: int) -> None:
    """A corridor of 6 states with reward s + 1 a step: V(s) = sum_k gamma^k (s + k + 1), however long the windows."""
    length = 6
    rewards = np.arange(1, length + 1, dtype=np.float64)
    ends = np.minimum(np.arange(length) + n, length)
    r_t = np.array([(rewards[s:end] * DISCOUNT ** np.arange(end - s)).sum() for s, end in enumerate(ends)], np.float32)
    discount_t = np.where(ends == length, 0, DISCOUNT**n).astype(np.float32)
    states = np.eye(length + 1, dtype=np.float32)
    batch = Transitions(
        states[:length], np.zeros(length, np.int64), r_t, discount_t, states[ends], np.ones(length, np.float32)
    )
    spec = EnvSpec("Corridor", ArraySpec((length + 1,), "float32"), 1)
    learner = learner_of(
        LearnerConfig(lr=0.3, loss="mse", target_period=10, max_grad_norm=1e9, lr_end_fraction=0.0),
        spec,
        module=Table(spec),
    )
    for turn in range(1000):
        learner.anneal(turn / 1000)
        learner.update(batch, statistics=False)
    expected = [(rewards[s:] * DISCOUNT ** np.arange(length - s)).sum() for s in range(length)]
    np.testing.assert_allclose(values(learner, states[:length])[:, 0], expected, atol=5e-3)


def share_of_left(double: bool) -> float:
    """Sutton & Barto (2018), example 6.7, 80 times side by side in one table: how often the agents still go left at
    the end.

    From A, even actions go left to B, odd ones right to the end, both for 0; from B every action ends the episode for
    N(-0.1, 1). Left costs 0.1 in expectation. Actions are greedy but for a tenth, so the best agent goes left 5 % of
    the time."""
    runs, actions, steps = 80, 20, 1800
    generator = np.random.default_rng(0)
    spec = EnvSpec("Maximization-bias", ArraySpec((2 * runs,), "float32"), actions)
    learner = learner_of(
        LearnerConfig(lr=0.1, loss="mse", double=double, target_period=300, max_grad_norm=1e9), spec, module=Table(spec)
    )
    run, in_b = np.arange(runs), np.zeros(runs, bool)
    identity = np.eye(2 * runs, dtype=np.float32)
    left: list[float] = []
    for step in range(steps):
        q = values(learner, identity[2 * run + in_b])
        greedy = np.where(q == q.max(1, keepdims=True), generator.random(q.shape), -1).argmax(1)
        action = np.where(generator.random(runs) < 0.1, generator.integers(0, actions, runs), greedy)
        goes_left = ~in_b & (action % 2 == 0)
        if step >= steps - 900:
            left.append(goes_left.sum() / (~in_b).sum())
        reward = np.where(in_b, generator.normal(-0.1, 1, runs), 0).astype(np.float32)
        discount = np.where(goes_left, 1, 0).astype(np.float32)
        learner.update(
            Transitions(
                identity[2 * run + in_b],
                action,
                reward,
                discount,
                identity[2 * run + 1],
                np.full(runs, runs, np.float32),
            ),
            statistics=False,
        )
        in_b = goes_left
    return float(np.mean(left))


def test_double_learning_resists_the_maximization_bias_that_deceives_single_learning() -> None:
    double, single = share_of_left(double=True), share_of_left(double=False)
    assert double < 0.13
    assert single > 0.3
    assert single > 3 * double

"""How often actions are random, and which."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.core.config import RolloutConfig
from ddrl.rollout.exploration import BLOCK, EpsilonGreedy, epsilon_at, epsilon_of

CONFIG = RolloutConfig(epsilon_start=0.9, epsilon_end=0.1, epsilon_decay_steps=1000, epsilon_spread=7)


def test_epsilon_falls_linearly_and_then_stays() -> None:
    assert [epsilon_at(CONFIG, steps) for steps in (0, 500, 1000, 10**9)] == pytest.approx([0.9, 0.5, 0.1, 0.1])


def test_rollouts_spread_between_epsilon_and_its_power() -> None:
    spread = [epsilon_of(CONFIG, 0.4, index, 5) for index in range(5)]
    assert spread == pytest.approx([0.4 ** (1 + 7 * index / 4) for index in range(5)])
    assert epsilon_of(CONFIG, 0.4, 0, 1) == 0.4
    assert epsilon_of(RolloutConfig(), 0.4, 3, 5) == 0.4
    assert epsilon_of(CONFIG, 0.0, 2, 5) == 0.0


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5, 1.0])
def test_the_share_of_random_actions_is_epsilon(epsilon: float) -> None:
    explore = EpsilonGreedy(1000, 8, seed=1)
    chosen = np.array([explore.choose(np.full(8, -1), epsilon) for _ in range(3 * BLOCK)])
    share = np.mean(chosen != -1)
    deviation = np.sqrt(epsilon * (1 - epsilon) / chosen.size)
    assert abs(share - epsilon) <= 4 * deviation


def test_random_actions_are_uniform_and_independent_of_which_are_random() -> None:
    explore = EpsilonGreedy(4, 8, seed=2)
    chosen = np.array([explore.choose(np.full(8, -1), 0.3) for _ in range(8 * BLOCK)])
    counts = np.bincount(chosen[chosen >= 0], minlength=4)
    expected = counts.sum() / 4
    assert ((counts - expected) ** 2 / expected).sum() < 21  # chi-square with 3 degrees of freedom, p = 1e-4


def test_the_same_seed_gives_the_same_choices_and_they_belong_to_the_caller() -> None:
    first, second = EpsilonGreedy(5, 3, seed=9), EpsilonGreedy(5, 3, seed=9)
    for turn in range(2 * BLOCK + 3):
        if turn % 3:
            one, two = first.choose(np.zeros(3, np.int64), 0.5), second.choose(np.zeros(3, np.int64), 0.5)
        else:
            one, two = first.random(), second.random()
            one_again = one.copy()
            np.testing.assert_array_equal(one_again, two)
        np.testing.assert_array_equal(one, two)
        one += 7  # must not reach the numbers drawn ahead

"""How often actions are random."""

from __future__ import annotations

import pytest

from ddrl.acting.choosers import chooser_settings, epsilon_at, epsilon_of
from ddrl.core.config import RolloutConfig

CONFIG = RolloutConfig(epsilon_start=0.9, epsilon_end=0.1, epsilon_decay_steps=1000, epsilon_spread=7)


def test_epsilon_falls_linearly_and_then_stays() -> None:
    assert [epsilon_at(CONFIG, steps) for steps in (0, 500, 1000, 10**9)] == pytest.approx([0.9, 0.5, 0.1, 0.1])


def test_rollouts_spread_between_epsilon_and_its_power() -> None:
    spread = [epsilon_of(CONFIG, 0.4, index, 5) for index in range(5)]
    assert spread == pytest.approx([0.4 ** (1 + 7 * index / 4) for index in range(5)])
    assert epsilon_of(CONFIG, 0.4, 0, 1) == 0.4
    assert epsilon_of(RolloutConfig(), 0.4, 3, 5) == 0.4
    assert epsilon_of(CONFIG, 0.0, 2, 5) == 0.0


def test_a_family_of_policies_is_dealt_by_the_rollouts_index() -> None:
    family = RolloutConfig(epsilon_spread=1, by_rollout=[{"exploration": 0.5}, {"temperature": 2.0}])
    assert [epsilon_of(family, 0.4, index, 3) for index in range(3)] == pytest.approx([0.2, 0.4**1.5, 0.5 * 0.4**2])
    assert [chooser_settings(family, index) for index in range(3)] == [{}, {"temperature": 2.0}, {}]

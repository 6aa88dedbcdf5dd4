"""A prior that follows delivery is adaptive pacing: the same duals in the environment as in the baseline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddrl.admix import AdmixVectorEnv, Market, PlayConfig
from ddrl.admix.baselines import Case, load
from ddrl.admix.contracts import Pacing
from ddrl.core.errors import ConfigError
from tests.admix.days import SMALL, contracts, market_env

UNCERTAIN = replace(SMALL, billed=0.8, billed_spread=0.5, billed_drift=0.3, drift=0.4)


def test_a_policy_that_plays_its_prior_is_the_baseline_adaptive_pacing() -> None:
    """The same bonuses at each decision, and the same V."""
    market, rule, every = Market(UNCERTAIN), load("adaptive_pacing"), 10
    day = market.day(7)
    case = Case.of([day], [market.day(7, 0)], UNCERTAIN.click_value)
    delay = 100 / day.inventory.requests  # whole blocks
    play = PlayConfig(mode="bonuses", repeat=every, prior="yesterday", pace_step=2.0, delay=delay)
    env = AdmixVectorEnv(lambda seed, episode: day, 1, play, UNCERTAIN.click_value, UNCERTAIN.max_bids)
    state, value, over = env.reset(0), 0.0, False
    case.outlook.yesterday_alpha[0] = day.yesterday_alpha  # the same solution of the day before
    outcome = case.play(rule, rule.Settings(step=2.0), delay, True, every, with_trace=True)
    player, moved = rule(case.outlook, rule.Settings(step=2.0)), 0.0
    for feedback in outcome.trace:
        assert not over
        bonus = 1000 * player.decide(feedback).bonus[0]
        np.testing.assert_allclose(state["prior"][0], bonus * state["queue_mask"][0], rtol=1e-5, atol=1e-6)
        moved = max(moved, float(np.abs(bonus - 1000 * player._pacing.state[0, 0]).max()))
        step = env.step(state["prior"])
        state, value, over = step.observation, value + float(step.raw_reward[0]), bool(step.terminated[0])
    assert over
    assert moved > 0.1
    assert value == pytest.approx(outcome.value[0], rel=1e-4)


def test_an_episode_that_begins_midway_keeps_the_duals_for_its_first_decision() -> None:
    env = market_env(2, mode="bonuses", repeat=10, prior="yesterday", pace_step=2.0, first_window=4)
    still = market_env(2, mode="bonuses", repeat=10, prior="yesterday", first_window=4)
    state, same = env.reset(1), still.reset(1)
    np.testing.assert_allclose(state["prior"], same["prior"], rtol=1e-5)
    following = env.step(state["prior"]).observation["prior"]
    assert not np.allclose(following, state["prior"], rtol=1e-3)


def test_a_step_goes_towards_what_the_remaining_demand_needs() -> None:
    """By hand: of a demand of 100, 40 were due and 20 delivered; then 70 are due and 30 delivered."""
    pacing = Pacing(contracts([100.0], penalty=0.01, billed_rate=0.5), 2.0, 1)
    pacing.begin(0, np.array([0.004]))
    pacing.state[1:, 0, 0] = 0.4, 0.2
    needed = 0.8 * 0.3 / 0.6
    bonus = pacing.decide(np.array([[70.0]]), np.array([[30.0]]), np.array([[0.5]]))
    assert bonus[0, 0] == pytest.approx(0.5 * (0.004 + 2.0 * 0.01 * (needed - 0.1)))
    pacing.decide(np.array([[100.0]]), np.array([[30.0]]), np.array([[0.5]]))
    assert pacing.state[0, 0, 0] == 0.01  # never above the penalty


def test_pacing_without_a_prior_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"play\.prior is off"):
        PlayConfig(pace_step=1.0)

"""What past days tell, and the rules that follow it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.admix.past import DaysAlike, PastCurve, at_times, likeness
from ddrl.admix import Market, MarketConfig
from ddrl.admix.baselines import AdaptivePacing, Case, Hindsight, NoSettings, Past, load
from ddrl.core.errors import EnvError
from tests.admix.test_baselines import feedback, outlook

MATCH = MarketConfig(
    requests=2000, windows=20, contracts=6, bids=4, extra_bids=2, regions=4, ages=3, breadth=1.0, drift=0, noise=0
)
MATCH = replace(MATCH, demand_low=0.05, demand_high=0.25, penalty=3.0, law="match")


def case(seeds, config=MATCH) -> Case:
    market = Market(config)
    return Case.of([market.day(s) for s in seeds], [market.day(s, 0) for s in seeds], config.click_value)


def two_days() -> Past:
    """One contract of demand 100: an early day, whose bids are dear, and a late one."""
    early = [0.0, 80.0, 100.0]
    late = [0.0, 20.0, 100.0]
    requests = np.array([[0.0, 50.0, 100.0], [0.0, 50.0, 100.0]])
    bids = np.array([[0.004, 0.004, 0.004], [0.002, 0.002, 0.002]])
    return Past(requests, bids, np.array([early, late])[:, :, None])


def test_the_past_counts_requests_bids_and_what_optima_delivered_by_window():
    days = case(range(3))
    past = days.past()
    outcome = days.play(Hindsight, NoSettings())
    np.testing.assert_allclose(past.requests[:, -1], days.days.length)
    np.testing.assert_allclose(past.delivered[:, -1], outcome.billed)
    assert (np.diff(past.delivered, axis=1) >= 0).all()
    first = days.days.time[0] < 10 / 20
    assert past.requests[0, 10] == first.sum()
    assert past.best_bid[0, 10] == pytest.approx(days.days.requests["ecpm"][0, first, 0].mean(), rel=1e-5)


def test_values_of_windows_are_joined_by_straight_lines():
    values = np.array([[0.0, 1.0, 3.0]])
    np.testing.assert_allclose(at_times(values, np.array([0.0, 0.25, 0.75, 1.0])), [[0.0, 0.5, 2.0, 3.0]])


def test_pacing_along_the_past_steps_as_a_hand_computes():
    player = PastCurve(replace(outlook(), past=two_days()), AdaptivePacing.Settings(step=2.0))
    # by half of the day the two optima had delivered half on average, though the supply's curve says .3
    bonus = player.decide(feedback(0.3, 0.1, 0.5)).bonus[0, 0]
    assert bonus == pytest.approx(min(0.005 + 2 * 0.01 * (0.5 - 0.1), 0.01))


@pytest.mark.parametrize(("bid", "due"), [(0.004, 0.8), (0.002, 0.2)])
def test_days_like_today_count_and_others_hardly(bid, due):
    player = DaysAlike(replace(outlook(alpha=0.0), past=two_days()), DaysAlike.Settings(step=0.5))
    seen = replace(feedback(0.3, 0.0, 0.5), requests=50, best_bid=np.array([bid]))
    assert player.decide(seen).bonus[0, 0] == pytest.approx(0.5 * 0.01 * due, rel=1e-2)


def test_a_day_one_width_away_counts_as_much_as_one_a_standard_deviation_from_a_gaussians_middle():
    days = np.array([[[0.0], [2.0]], [[0.0], [0.0]]])  # two standard deviations apart in one of two logarithms
    weights = likeness(days, np.zeros((2, 1)), 2.0)
    np.testing.assert_allclose(weights, [[1.0, np.exp(-0.5)]])


def test_without_past_days_the_rules_say_what_they_need():
    with pytest.raises(EnvError, match="past days"):
        PastCurve(outlook(), AdaptivePacing.Settings())


def test_on_days_of_a_match_days_like_today_beat_pacing_by_the_forecast():
    config = replace(MATCH, requests=4000, windows=48, contracts=12, bids=20, extra_bids=4, drift=0.3, noise=0.05)
    matches = [seed for seed in range(40) if Market(config).day(seed).law[0, -1] < 1][:4]
    past = case(range(2000, 2014), config).past()
    days = case(matches, config)
    days = replace(days, outlook=replace(days.outlook, past=past))
    alike = days.normalised(days.play(DaysAlike, DaysAlike.Settings(step=2.0, width=0.5), 0.05, period=20))
    pacing = days.normalised(days.play(load("adaptive_pacing"), AdaptivePacing.Settings(step=2.0), 0.05, period=20))
    assert (alike - pacing).mean() > 0.02

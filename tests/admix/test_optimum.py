"""The optimum: the dual agrees with HiGHS, certifies itself, and says what a hand would."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.admix import Market, MarketConfig, Problem, solve_dual, solve_lp
from ddrl.admix.optimum import Optimum, descend, dual_value
from ddrl.core.errors import EnvError, MissingExtraError
from tests.admix.days import CLICK_VALUE, SMALL, contracts, requests


def problem(config: MarketConfig, seed: int = 1) -> Problem:
    market = Market(config)
    day = market.day(seed)
    return Problem.of(day.requests(), market.contracts, config.click_value, day.billed_rate)


def test_the_optimum_of_a_hand_computed_day():
    # e = 4, 3, 2, 1 thousandths; click worth 1 thousandth; two impressions due at a penalty of 5 thousandths each:
    # both are worth serving (1 + 5 > 1, 2), at the two cheapest requests. V = 4 + 3 + 1 + 1.
    booked = contracts([2], penalty=0.005)
    day = requests([[4.0], [3.0], [2.0], [1.0]], np.full((4, 1), 0.01))
    best = solve_lp(Problem.of(day, booked, CLICK_VALUE, np.ones((2, 1))))
    assert best.lower == pytest.approx(0.009)
    assert best.upper == pytest.approx(0.009)
    assert best.bid_only == pytest.approx(0.010 - 0.010)
    assert 0.001 - 1e-9 <= best.alpha[0] <= 0.002 + 1e-9  # between the second and the third cheapest, less the click
    assert best.normalised(0.0) == pytest.approx(0)


def test_a_penalty_that_is_not_worth_it_leaves_the_bids():
    booked = contracts([2], penalty=0.001)
    day = requests([[4.0], [3.0]], np.full((2, 1), 0.0))
    best = solve_dual(Problem.of(day, booked, CLICK_VALUE, np.ones((2, 1))))
    assert best.upper == pytest.approx(0.007 - 0.002)
    assert best.upper == pytest.approx(best.bid_only)


def test_billed_rates_count_in_the_optimum():
    # half of the impressions count: two billed need four shown
    booked = contracts([2], penalty=0.1)
    day = requests([[1.0]] * 5, np.zeros((5, 1)))
    best = solve_lp(Problem.of(day, booked, CLICK_VALUE, np.full((2, 1), 0.5)))
    assert best.lower == pytest.approx(0.001)  # one bid is left


def test_a_pair_has_the_billed_rate_of_its_requests_window_and_contract():
    day = requests([[1.0]] * 4, np.zeros((4, 2)), eligible=[[1, 1], [0, 1], [1, 0], [1, 1]])  # two in each window
    by_window = Problem.of(day, contracts([1, 1]), CLICK_VALUE, np.array([[1.0, 0.8], [0.5, 0.2]]))
    assert list(zip(by_window.row, by_window.column, strict=True)) == [(0, 0), (0, 1), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert by_window.rate.tolist() == [1.0, 0.8, 0.8, 0.5, 0.5, 0.2]
    whole = Problem.of(day, contracts([1, 1]), CLICK_VALUE, np.array([0.9, 0.7]))
    assert whole.rate.tolist() == [0.9, 0.7, 0.7, 0.9, 0.9, 0.7]


def test_the_gap_and_the_score_are_shares_of_what_contracts_add_to_bids_alone():
    best = Optimum(lower=9.0, upper=11.0, alpha=np.zeros(1), beta=np.zeros(1), bid_only=5.0)
    assert best.gap == pytest.approx(2.0 / 4.0)
    assert [best.normalised(value) for value in (5.0, 8.0, 11.0)] == pytest.approx([0.0, 0.5, 1.0])
    assert replace(best, lower=5.0).gap == 0  # contracts add nothing


def test_no_contract_exceeds_its_cap_in_the_optimum():
    # clicks are worth 10 thousandths, bids 1: all four would go to the contract but for the cap of 2
    booked = contracts([1], penalty=0.001, cap=2)
    day = requests([[1.0]] * 4, np.full((4, 1), 0.1))
    for solve in (solve_lp, solve_dual):
        best = solve(Problem.of(day, booked, CLICK_VALUE, np.ones((2, 1))))
        assert best.lower == pytest.approx(0.022)
        assert best.upper == pytest.approx(0.022)
        assert best.beta[0] == pytest.approx(0.009)


@pytest.mark.parametrize("billed", [1.0, 0.7])
@pytest.mark.parametrize("load", [0.3, 1.0, 2.0])
def test_the_dual_agrees_with_highs(billed, load):
    spread = 0.3 if billed < 1 else 0.0
    config = replace(SMALL, billed=billed, billed_spread=spread, billed_drift=spread, cap=1.2)
    whole = problem(config)
    whole = replace(whole, demand=whole.demand * load, cap=np.ceil(whole.cap * load))
    exact, ours = solve_lp(whole), solve_dual(whole, 1e-6)
    assert exact.gap < 1e-6
    assert ours.gap < 1e-6
    assert ours.upper == pytest.approx(exact.lower, abs=1e-6 * (exact.lower - exact.bid_only))


def test_coordinate_descent_alone_comes_within_a_thousandth():
    whole = problem(SMALL)
    exact = solve_lp(whole)
    alpha = descend(whole, np.zeros(6), 20)
    gain = exact.lower - exact.bid_only
    assert 0 <= dual_value(whole, alpha, np.zeros(6)) - exact.lower + 1e-9 < 1e-3 * gain


def test_a_gap_that_is_not_reached_is_an_error():
    with pytest.raises(EnvError, match="is at a gap of"):
        solve_dual(problem(SMALL), -1.0, sweeps=1, rounds=1)


def test_further_rounds_close_what_the_first_leaves():
    whole = problem(replace(SMALL, requests=8000))
    gain = solve_dual(whole).lower - whole.bid_only
    with pytest.raises(EnvError, match="is at a gap of"):
        solve_dual(whole, 1e-9, sweeps=1, rounds=1)
    best = solve_dual(whole, 1e-9, sweeps=1, rounds=8)
    assert best.gap <= 1e-9
    assert best.lower == pytest.approx(solve_lp(whole).lower, abs=1e-6 * gain)


def test_days_without_bids_contracts_or_pairs_have_an_optimum():
    booked = contracts([3], penalty=0.01)
    nothing = requests(np.zeros((2, 1)), np.zeros((2, 1)), eligible=np.zeros((2, 1)))
    best = solve_dual(Problem.of(nothing, booked, CLICK_VALUE, np.ones((2, 1))))
    assert best.lower == pytest.approx(-0.03)
    assert best.gap == 0


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 30), width=st.integers(1, 4))
def test_any_duals_bound_the_value_of_any_plan(seed, count, width):
    rng = np.random.default_rng(seed)
    booked = replace(
        contracts(rng.integers(0, 10, width)), penalty=rng.uniform(0, 0.01, width), cap=rng.integers(0, 12, width)
    )
    day = requests(
        rng.uniform(0, 8, (count, 2)), rng.uniform(0, 0.1, (count, width)), eligible=rng.random((count, width)) < 0.6
    )
    rate = rng.uniform(0.3, 1, width)
    whole = Problem.of(day, booked, CLICK_VALUE, rate)
    exact = solve_lp(whole)
    dual = dual_value(whole, rng.uniform(0, 1, width) * booked.penalty, rng.uniform(0, 0.01, width))
    assert dual >= exact.lower - 1e-9
    ours = solve_dual(whole)
    assert ours.lower <= exact.upper + 1e-9
    assert ours.upper >= exact.lower - 1e-9
    assert ours.gap <= 1e-4


def test_a_missing_scipy_is_said_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'scipy'.*pip install 'ddrl\[admix\]'"):
        solve_lp(problem(SMALL))

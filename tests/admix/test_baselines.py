"""Baselines play by the environment's rules, see what the policy sees, and stand in the order that theory says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from ddrl.admix import Inventory, Market, MarketConfig
from ddrl.admix.baselines import (
    PACKAGE,
    SAMPLE,
    Case,
    Decision,
    Feedback,
    Outlook,
    Pid,
    ResolvingLp,
    candidates,
    forecast_sample,
    load,
    tune,
)
from ddrl.core import plugins
from ddrl.core.errors import ConfigError, EnvError
from tests.admix.days import SMALL, HandDay, contracts, hand_env, market_env, requests

UNCERTAIN = replace(SMALL, billed=0.8, billed_spread=0.5, billed_drift=0.3, cap=1.0, drift=0.4)


def case(config: MarketConfig = SMALL, seeds=(0, 1, 2)) -> Case:
    market = Market(config)
    return Case.of([market.day(s) for s in seeds], [market.day(s, 0) for s in seeds], config.click_value)


@pytest.fixture(scope="module")
def small() -> Case:
    return case()


@pytest.fixture(scope="module")
def one_uncertain() -> Case:
    return case(UNCERTAIN, (0,))


def test_every_file_of_the_package_is_a_baseline():
    names = plugins.names(PACKAGE)
    assert {"bid_only", "contract_first", "inventory_split", "pid", "yesterday_duals", "dual_descent"} <= set(names)
    assert {"adaptive_pacing", "resolving_lp", "oracle_imitation", "hindsight"} <= set(names)
    for name in names:
        assert load(name).name == name
        assert list(candidates(load(name)))
    with pytest.raises(ConfigError, match=r"baseline .'pdi'.: did you mean 'pid'"):
        load("pdi")


@pytest.mark.parametrize("period", [1, 7, 40])
def test_billing_is_known_with_the_first_block_that_begins_the_delay_later_and_not_before(one_uncertain, period):
    delay = 100.3 / np.mean([inventory.requests for inventory in one_uncertain.outlook.inventories])
    late = 100  # requests, rounded
    trace = one_uncertain.play(Pid, Pid.Settings(), delay, period=period, with_trace=True).trace
    begins = {round(float(feedback.due.sum()), 12): feedback.requests for feedback in trace}
    for feedback in trace:
        known = begins[round(float(feedback.seen_due.sum()), 12)]
        if feedback.requests >= late + period:
            assert late <= feedback.requests - known < late + period
        else:
            assert known == 0 or feedback.requests - known >= late
    first = next(feedback.requests for feedback in trace if feedback.seen_billed.any())
    assert first > late


@pytest.mark.parametrize("period", [1, 7])
@pytest.mark.parametrize(("delay", "own_counts"), [(0.0, True), (0.1, True), (0.1, False)])
def test_a_replay_and_the_environment_come_to_the_same_day(one_uncertain, period, delay, own_counts):
    """The bonuses of a replay, given as scores to the step-by-step environment, show and earn the same."""
    one, market = one_uncertain, Market(UNCERTAIN)
    outcome = one.play(Pid, Pid.Settings(), delay, own_counts, period, with_trace=True)
    player = Pid(one.outlook, Pid.Settings())
    env = market_env(1, UNCERTAIN)
    env._days = lambda seed, episode: market.day(0)
    env.reset(0)
    value = 0.0
    for row in range(int(one.days.length[0])):
        if row % period == 0:
            bonus = player.decide(outcome.trace[row // period]).bonus
        step = env.step(1000 * (env.click_value * env._feed.present("ctr") + bonus))
        value += step.raw_reward[0]
        shown = step.columns["chosen"][0]
        assert outcome.slots[0, row] == (shown if shown < 6 else -1)
    assert step.terminated[0]
    assert np.array_equal(outcome.billed[0], env.delivery.billed[0])
    assert outcome.value[0] == pytest.approx(value, rel=1e-5)
    assert (outcome.shown <= one.contracts.cap).all()
    assert (outcome.shown[0] == one.contracts.cap).any()


class Fixed:
    """The same decision in every block."""

    name, grid = "fixed", {}

    def __init__(self, outlook, settings):
        self._decision = settings

    def decide(self, feedback):
        return self._decision


def test_the_cap_is_reached_at_its_request_within_a_block():
    day = HandDay(contracts([9, 9], cap=3), requests([[1.0]] * 10, [[0.2, 0.1]] * 10))
    outcome = Case.of([day], [day], 0.1).play(Fixed, Decision(np.ones((1, 2))), period=10)
    assert outcome.slots[0].tolist() == [0, 0, 0, 1, 1, 1, -1, -1, -1, -1]


def test_theta_of_a_decision_is_a_frequency():
    day = HandDay(contracts([1e6, 1e6], cap=1e7), requests([[1.0]] * 4000, [[0.2, 0.1]] * 4000))
    decision = Decision(np.ones((1, 2)), np.array([[0.3, 0.5]]))
    shown = Case.of([day], [day], 0.1).play(Fixed, decision, period=16).shown[0] / 4000
    assert np.abs(shown - [0.3, 0.7 * 0.5]).max() < 4 * np.sqrt(0.25 / 4000)  # the second where the first does not play


def test_feedback_is_what_the_environment_knows():
    booked = contracts([10], cap=100, billed_rate=0.5)
    billing = np.where(np.arange(10) % 2, 0.9, 0.1)
    day = HandDay(booked, requests([[1.0]] * 10, np.full((10, 1), 0.1), billing=billing), billed_rate=0.5)
    whole = Case.of([day], [day], 0.1)
    for own_counts in (True, False):
        outcome = whole.play(
            load("contract_first"), load("contract_first").Settings(), 0.3, own_counts, with_trace=True
        )
        env = hand_env(day, delay=0.3, own_counts=own_counts)
        env.reset(0)
        for row, feedback in enumerate(outcome.trace):
            assert feedback.requests == row
            assert feedback.seen_billed[0, 0] == env.delivery.seen_billed[0, 0]
            assert feedback.estimate[0, 0] == pytest.approx(env.delivery.estimate[0, 0])
            assert feedback.due[0, 0] * 10 == pytest.approx(env.delivery.due[0, 0])
            env.step(np.full((1, 1), 1e3))


@pytest.mark.parametrize(("period", "lag"), [(1, 3), (2, 4), (3, 3), (4, 4), (5, 5)])
def test_news_of_billing_is_never_earlier_than_the_delay_where_a_block_is_longer(period, lag):
    """Twelve requests, all of which are shown the contract; a delay of a quarter of the day is three of them."""
    day = HandDay(contracts([12], cap=100), requests([[1.0]] * 12, np.full((12, 1), 0.1)))
    rule = load("contract_first")
    outcome = Case.of([day], [day], 0.1).play(rule, rule.Settings(), 0.25, False, period, with_trace=True)
    begins = range(0, 12, period)
    assert [feedback.requests for feedback in outcome.trace] == list(begins)
    assert [feedback.seen_billed[0, 0] for feedback in outcome.trace] == [max(begin - lag, 0) for begin in begins]
    dues = [feedback.due[0, 0] for feedback in outcome.trace]
    assert [feedback.seen_due[0, 0] for feedback in outcome.trace] == [
        dues[max(begin - lag, 0) // period] for begin in begins
    ]


def test_scores_run_from_bids_alone_to_hindsight(small):
    def score(name, **settings):
        baseline = load(name)
        return small.normalised(small.play(baseline, baseline.Settings(**settings))).mean()

    assert score("bid_only") == pytest.approx(0, abs=1e-6)
    assert 0.99 < score("hindsight") <= 1 + 1e-6
    first, split, pid, pacing = (
        score("contract_first"),
        score("inventory_split"),
        score("pid"),
        score("adaptive_pacing"),
    )
    assert 0.2 < first < pid
    assert 0.2 < split < pid
    assert min(pid, pacing, score("dual_descent"), score("resolving_lp")) > 0.9


def test_only_hindsight_is_given_the_days_own_duals(small):
    seen = {}

    class Spy:
        name = "spy"
        Settings = load("bid_only").Settings

        def __init__(self, outlook, settings):
            seen["alpha"] = outlook.hindsight_alpha
            self._bonus = np.zeros_like(outlook.yesterday_alpha)

        def decide(self, feedback):
            return Decision(self._bonus)

    small.play(Spy, None)
    assert seen["alpha"] is None
    with pytest.raises(EnvError, match="needs the duals of the day itself"):
        load("hindsight")(replace(small.outlook, hindsight_alpha=None), None)


def test_delay_hurts_pacing_where_own_counts_are_hidden_and_billing_only_where_it_is_uncertain(small):
    pid = load("pid")
    at = {
        (delay, own): small.normalised(small.play(pid, pid.Settings(kp=5.0), delay, own)).mean()
        for delay in (0.0, 0.2)
        for own in (True, False)
    }
    assert at[0.0, True] == at[0.0, False]
    # billing is certain: counting what one shows suffices
    assert at[0.2, True] == pytest.approx(at[0.0, True], abs=1e-9)
    assert at[0.2, False] < at[0.0, False] - 0.01


def feedback(due, delivered, time, demand=100.0, own_counts=True, seen_due=None) -> Feedback:
    shown = np.array([[delivered * demand]])
    return Feedback(
        requests=0,
        time=np.array([time]),
        due=np.array([[due]]),
        seen_due=np.array([[due if seen_due is None else seen_due]]),
        shown=shown,
        estimate=shown,
        seen_billed=shown,
        rate=np.ones((1, 1)),
        own_counts=own_counts,
    )


def outlook(alpha=0.005, demand=100.0) -> Outlook:
    booked = contracts([demand], penalty=0.01)
    return Outlook(booked, 0.1, [Inventory(booked, np.full((2, 2), 50.0))], np.array([[alpha]]), [])


def test_pid_steps_as_a_hand_computes():
    player = Pid(outlook(), Pid.Settings(kp=2.0, ki=4.0, kd=0.0))
    # error .1 after a tenth of a day: .5 + 2 * .1 + 4 * (integral of steps before = 0) = .7 of the penalty
    assert player.decide(feedback(0.1, 0.0, 0.1)).bonus[0, 0] == pytest.approx(0.01 * 0.7)
    # then error .05: the integral has .1 * .1 from the first step
    assert player.decide(feedback(0.2, 0.15, 0.2)).bonus[0, 0] == pytest.approx(0.01 * (0.5 + 0.1 + 0.04))
    assert player.decide(feedback(0.9, 0.0, 0.3)).bonus[0, 0] == pytest.approx(0.01)  # never above the penalty


def test_the_integral_of_pid_does_not_wind_up_and_its_derivative_is_smoothed():
    player = Pid(outlook(), Pid.Settings(kp=2.0, ki=4.0, kd=0.0))
    for step in range(1, 9):
        player.decide(feedback(0.1 * step + 0.4, 0.0, 0.1 * step))  # far behind: alpha is at the penalty all the while
    assert player.decide(feedback(0.9, 0.9, 0.9)).bonus[0, 0] == pytest.approx(0.01 * 0.5)
    player = Pid(outlook(), Pid.Settings(kp=0.0, ki=0.0, kd=0.3))
    # the error rises by .1 in a tenth of a day: a slope of 1, of which 1 - exp(-5) is taken over
    assert player.decide(feedback(0.1, 0.0, 0.1)).bonus[0, 0] == pytest.approx(0.01 * (0.5 + 0.3 * (1 - np.exp(-5))))


@pytest.mark.parametrize(("behind", "bonus"), [(0.4, 0.01), (-0.4, 0.0)])
def test_the_integral_of_pid_does_not_wind_up_at_either_bound(behind, bonus):
    player = Pid(outlook(), Pid.Settings(kp=2.0, ki=4.0, kd=0.0))
    for time in np.arange(1, 6) / 10:
        assert player.decide(feedback(0.4 + behind / 2, 0.4 - behind / 2, time)).bonus[0, 0] == bonus
    assert player.decide(feedback(0.4, 0.4, 0.6)).bonus[0, 0] == pytest.approx(0.01 * 0.5)


def test_dual_descent_and_adaptive_pacing_step_as_a_hand_computes():
    descent = load("dual_descent")(outlook(), load("dual_descent").Settings(step=2.0))
    assert descent.decide(feedback(0.1, 0.05, 0.1)).bonus[0, 0] == pytest.approx(0.005 + 2 * 0.01 * 0.05)
    assert descent.decide(feedback(0.2, 0.2, 0.2)).bonus[0, 0] == pytest.approx(0.005 + 2 * 0.01 * 0.0)
    pacing = load("adaptive_pacing")(outlook(), load("adaptive_pacing").Settings(step=2.0))
    assert pacing.decide(feedback(0.1, 0.05, 0.1)).bonus[0, 0] == pytest.approx(0.005 + 2 * 0.01 * (0.1 - 0.05))
    # .95 of the demand remain for .9 of the curve: the next tenth needs .95 / 9; it brought .15
    expected = 0.006 + 2 * 0.01 * (0.95 / 9 - 0.15)
    assert pacing.decide(feedback(0.2, 0.2, 0.2)).bonus[0, 0] == pytest.approx(expected)


def test_counts_are_extrapolated_only_where_own_counts_are_hidden():
    assert feedback(0.4, 0.1, 0.4, own_counts=False, seen_due=0.2).extrapolated[0, 0] == pytest.approx(20)
    assert feedback(0.4, 0.1, 0.4, own_counts=True, seen_due=0.2).extrapolated[0, 0] == pytest.approx(10)


def test_re_solving_raises_the_duals_of_who_is_late(small):
    demand, count = small.contracts.demand, small.contracts.count
    half = small.days.curve[:, small.days.curve.shape[1] // 2]

    def alpha(delivered):
        state = Feedback(
            10_000, np.full(3, 0.5), half, half, delivered, delivered, delivered, np.ones((3, count)), True
        )
        return ResolvingLp(small.outlook, ResolvingLp.Settings()).decide(state).bonus

    late, early = alpha(0.2 * demand * np.ones((3, 1))), alpha(0.9 * demand * np.ones((3, 1)))
    assert (late >= early - 1e-12).all()
    assert late.mean() > early.mean() + 0.1 * small.contracts.penalty.mean()


def test_the_sample_of_the_forecast_has_its_mix_of_cells_and_its_size():
    market = Market(replace(SMALL, requests=20_000, forecast_error=0.5))
    past, inventory = market.day(3, 0).requests(), market.day(3).inventory
    sample = forecast_sample(past, inventory, 0)
    assert len(sample) == SAMPLE
    assert (np.diff(sample.time) >= 0).all()
    share = np.bincount(sample.cell, minlength=market.cells) / SAMPLE
    expected = inventory.supply.sum(0) / inventory.requests
    mix = np.bincount(past.cell, minlength=market.cells) / len(past)
    assert np.abs(share - expected).sum() < 0.5 * np.abs(mix - expected).sum()


def test_tuning_takes_the_best_of_the_grid_and_imitation_beats_what_it_starts_from():
    days = case(replace(SMALL, drift=0.6), range(20, 26))
    other = case(replace(SMALL, drift=0.6), range(6))
    descent = load("dual_descent")
    best = tune(descent, days, 0.0, period=4)
    scores = {each.step: days.normalised(days.play(descent, each, period=4)).mean() for each in candidates(descent)}
    assert scores[best.step] == max(scores.values())
    assert len(set(scores.values())) > 1
    imitation = load("oracle_imitation")
    learned = other.normalised(other.play(imitation, tune(imitation, days, 0.0, period=4), period=4)).mean()
    fixed = other.normalised(other.play(load("yesterday_duals"), load("yesterday_duals").Settings(), period=4)).mean()
    assert other.normalised(other.play(imitation, imitation.Settings(), period=4)).mean() == pytest.approx(fixed)
    assert learned > fixed


class Outside:
    """A baseline of one's own."""

    name: ClassVar[str] = "outside"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"level": (0.0, 0.5)}

    @dataclass(frozen=True)
    class Settings:
        level: float = 0.0

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        self._bonus = np.tile(settings.level * outlook.contracts.penalty, (len(outlook.yesterday_alpha), 1))

    def decide(self, feedback: Feedback) -> Decision:
        return Decision(self._bonus)


def test_a_baseline_from_outside_is_loaded_by_name(small):
    assert load(f"{__name__}:Outside").name == "outside"
    assert (small.normalised(small.play(Outside, Outside.Settings(0.5))) > 0.3).all()

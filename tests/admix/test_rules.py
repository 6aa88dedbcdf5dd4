"""The rules of ad mixing stand once, in the kernel: environment, baselines and server play by them as a plain reference
does, request by request and number by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ddrl.admix import Market, MarketConfig, Mixer, PlayConfig
from ddrl.admix.baselines import Case, load
from ddrl.admix.environment import AdmixVectorEnv, make_book
from ddrl.admix.journal import requests_of
from tests.admix.days import SMALL, HandDay, contracts, requests
from tests.admix.material import env_config, linear_policy

CONFIG = replace(SMALL, billed=0.7, cap=1.0, demand_high=0.3)


class Reference:
    """One day in numpy, one request at a time: contracts below their cap and bids above 0 compete, the first of the
    highest scores is shown, an impression is billed where its uniform number is below the contract's rate."""

    def __init__(self, day: Any, click_value: float) -> None:
        self.day = day
        self.requests = day.requests()
        self.value = np.float32(1000 * click_value) * self.requests.ctr
        self.shown = np.zeros(day.contracts.count)
        self.billed = np.zeros(day.contracts.count)

    def play(self, row: int, scores: np.ndarray) -> tuple[int, np.float32, np.float32]:
        """Slot, score and worth [currency] of request `row`; `scores` of contracts [C] float32, bids at their eCPM."""
        requests, contracts = self.requests, self.day.contracts
        usable = requests.eligible[row] & (self.shown < contracts.cap)
        bids = np.where(requests.ecpm[row] > 0, requests.ecpm[row], -np.inf)
        every = np.concatenate([np.where(usable, scores, -np.inf), bids]).astype(np.float32)
        slot = int(every.argmax())
        if every[slot] == -np.inf:
            return -1, np.float32(0), np.float32(0)
        if slot < contracts.count:
            self.shown[slot] += 1
            self.billed[slot] += requests.billing[row] < self.day.billed_rate[requests.window[row], slot]
        worth = np.concatenate([self.value[row], requests.ecpm[row]])[slot] / np.float32(1000)
        return slot, every[slot], worth


@pytest.mark.parametrize("repeat", [1, 7, 300])
def test_the_environment_plays_as_the_reference_to_the_last_bit(repeat: int) -> None:
    market = Market(CONFIG)
    day = market.day(3, 1)
    play = PlayConfig(mode="bonuses", repeat=repeat, delay=0.05)
    env = AdmixVectorEnv(lambda seed, episode: day, 1, play, CONFIG.click_value, CONFIG.max_bids)
    reference = Reference(day, CONFIG.click_value)
    env.reset(0)
    rng = np.random.default_rng(0)
    row, over = 0, False
    while not over:
        bonus = rng.uniform(0, 8, CONFIG.contracts).astype(np.float32)
        step = env.step(bonus[None])
        revenue = 0.0
        for _ in range(min(repeat, len(reference.requests) - row)):
            slot, score, worth = reference.play(row, reference.value[row] + bonus)
            revenue += worth.astype(np.float64)
            row += 1
        assert step.columns["chosen"][0] == slot
        assert step.columns["score"][0] == score
        assert step.columns["revenue"][0] == np.float32(1000 * revenue)
        np.testing.assert_array_equal(env.delivery.shown[0], reference.shown)
        np.testing.assert_array_equal(env.delivery.billed[0], reference.billed)
        over = bool(step.terminated[0])
    assert row == len(reference.requests)
    assert (reference.shown == day.contracts.cap).any()


@pytest.mark.parametrize("period", [1, 20])
def test_a_baseline_plays_as_the_reference_to_the_last_bit(period: int) -> None:
    """Its scores are in currency: the rules ask only which is highest."""
    market = Market(CONFIG)
    case = Case.of([market.day(3, 1)], [market.day(3, 0)], CONFIG.click_value)
    rule = load("pid")
    outcome = case.play(rule, rule.Settings(), 0.05, True, period, with_trace=True)
    player = rule(case.outlook, rule.Settings())
    day = market.day(3, 1)
    reference = Reference(day, CONFIG.click_value)
    reference.value = np.float32(CONFIG.click_value) * reference.requests.ctr
    best = reference.requests.best_bid.astype(np.float32)[:, None]
    reference.requests = replace(reference.requests, ecpm=best)
    for row in range(len(best)):
        if row % period == 0:
            bonus = player.decide(outcome.trace[row // period]).bonus[0].astype(np.float32)
        slot, _, worth = reference.play(row, reference.value[row] + bonus)
        assert outcome.slots[0, row] == (slot if slot < CONFIG.contracts else -1)
        assert outcome.worth[0, row] == pytest.approx(float(worth) * (1000 if slot >= 0 else 1), rel=1e-6)
    np.testing.assert_array_equal(outcome.shown[0], reference.shown)
    np.testing.assert_array_equal(outcome.billed[0], reference.billed)


def test_the_server_plays_as_the_reference_to_the_last_bit() -> None:
    """A log scored offline goes the same way, request by request."""
    kwargs = {"mode": "contracts", "contracts": 6, "cap": 1.0, "demand_high": 0.3}
    book = make_book(env_config(**kwargs))
    policy = linear_policy(book, value=1.0, penalty=0.5)
    mixer = Mixer(book, policy)
    market = {name: value for name, value in env_config(**kwargs).kwargs.items() if name != "mode"}
    day = Market(MarketConfig(**market)).day(0)
    reference = Reference(day, book.click_value)
    row = 0
    for part in day:
        for request in requests_of(part, day.contracts):
            decision = mixer.choose(request)
            scores = reference.value[row] + np.float32(0.5) * (1000 * day.contracts.penalty).astype(np.float32)
            slot, score, worth = reference.play(row, scores)
            assert (decision.ad is None) == (slot < 0)
            if slot >= 0:
                assert decision.kind == (slot >= day.contracts.count)
                assert decision.score == pytest.approx(float(score), rel=1e-6)
                assert decision.worth == pytest.approx(1000 * float(worth), rel=1e-6)
            row += 1
    np.testing.assert_array_equal(mixer.shown, reference.shown)


def test_a_baseline_is_billed_as_the_log_says_where_it_shows_the_logs_ad() -> None:
    logged = np.array([0, 0, 1])
    made = requests([[1.0]] * 3, np.full((3, 1), 0.1), logged=logged, logged_billed=np.array([0, 1, 1]))
    day = HandDay(contracts([10]), made)  # whose past rate bills every impression
    case = Case.of([day], [day], 0.1)
    rule = load("contract_first")
    outcome = case.play(rule, rule.Settings())
    assert outcome.slots[0].tolist() == [0, 0, 0]
    assert outcome.counted[0].tolist() == [False, True, True]

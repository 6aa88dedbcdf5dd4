"""Mode "bonuses": one action for many requests, on top of the value of a click; relative rewards; the prior."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddrl.admix import Market, PlayConfig, Problem, generated, solve_dual
from ddrl.core.errors import ConfigError
from tests.admix.days import CLICK_VALUE, SMALL, HandDay, contracts, hand_env, market_env, requests


def day(env, actions) -> list:
    state, taken = env.reset(3), []
    while not taken or not taken[-1].terminated.all():
        taken.append(env.step(actions(state)))
        state = taken[-1].observation
    return taken


def test_one_action_for_many_requests_is_the_same_score_at_each_of_them() -> None:
    """A fixed bonus through `repeat` is worth what the scores value + bonus are, request by request."""
    bonus, (value,) = np.linspace(0, 8, SMALL.contracts), np.where(np.array(PlayConfig().ad_fields) == "value")
    field = value[0] - 2  # ad_id and slot_id are arrays of their own

    def by_request(state):
        return (state["ad"][:, : SMALL.contracts, field] + bonus).astype(np.float32)

    alone = day(market_env(1, delay=0.05), by_request)
    settings = {"mode": "bonuses", "repeat": 7, "delay": 0.05}
    together = day(market_env(1, **settings), lambda state: np.tile(bonus, (1, 1)).astype(np.float32))
    assert len(together) == -(-len(alone) // 7)
    for name in ("raw_reward", "reward"):
        assert sum(float(getattr(one, name)[0]) for one in together) == pytest.approx(
            sum(float(getattr(one, name)[0]) for one in alone), rel=1e-4
        )
    revenue = sum(float(one.columns["revenue"][0]) for one in together)
    assert revenue == pytest.approx(sum(float(one.columns["revenue"][0]) for one in alone), rel=1e-4)


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.2])
@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_requests_played_at_once_are_played_as_one_after_the_other(delay: float, cap: float) -> None:
    """A support policy takes requests one by one, and changes nothing where rate and theta are 1. Some contracts reach
    their cap within an action; the delay is shorter than an action, and longer."""
    config = replace(SMALL, billed=0.7, demand_high=0.3, cap=cap)
    fields = ("impressions", "pace", "cap", "late", "need", "rate")
    settings = {"mode": "bonuses", "repeat": 50, "delay": delay, "relative": True, "reward_by": "contract"}
    at_once, one_by_one = (
        market_env(3, config, support=support, ad_fields=fields, **settings) for support in ("off", "late")
    )
    state, again, over = at_once.reset(1), one_by_one.reset(1), 0
    rng = np.random.default_rng(0)
    while over < 5:
        for name in state.dtype.names:
            np.testing.assert_allclose(state[name], again[name], rtol=1e-6, err_msg=name)
        action = rng.uniform(0, 12, (3, config.contracts)).astype(np.float32)
        one, other = at_once.step(action), one_by_one.step(action)
        np.testing.assert_allclose(one.reward, other.reward, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(one.raw_reward, other.raw_reward, rtol=1e-4, atol=1e-6)
        for name in one.columns:
            np.testing.assert_allclose(one.columns[name], other.columns[name], rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(one.terminated, other.terminated)
        state, again, over = one.observation, other.observation, over + int(one.terminated.sum())
    assert at_once.events == one_by_one.events
    assert (at_once.delivery.shown == at_once.contracts.cap).any()


def test_what_is_late_and_needed_by_hand() -> None:
    """Four requests of bid 2; 1 of demand 2 shown at the first two, half of the curve gone."""
    hand = HandDay(contracts([2, 1]), requests([[2.0]] * 4, [[0.01, 0.01]] * 4))
    env = hand_env(hand, mode="bonuses", repeat=1, ad_fields=("late", "need", "rate"))
    env.reset(0)
    env.step(np.array([[5.0, 0.0]], np.float32))
    state = env.step(np.zeros((1, 2), np.float32)).observation
    due = env.delivery.curve[0, 1]  # at the third request, which is 5/8 of the day
    share = due + (1 - due) / 4
    np.testing.assert_allclose(state["ad"][0, :, 0], 100 * (share - [0.5, 0.0]), rtol=1e-5)
    np.testing.assert_allclose(state["ad"][0, :, 1], (1 - np.array([0.5, 0.0])) / (1 - share), rtol=1e-5)
    np.testing.assert_allclose(state["ad"][0, :, 2], 1.0)


@pytest.mark.parametrize("by", ["total", "contract"])
def test_relative_rewards_add_up_to_what_contracts_add_to_bids(by: str) -> None:
    config = SMALL
    env = market_env(1, config, mode="bonuses", repeat=5, relative=True, reward_by=by, reward_scale=1.0)
    taken = day(env, lambda state: np.full((1, config.contracts), 6.0, np.float32))
    raw = sum(float(one.raw_reward[0]) for one in taken)
    plain = market_env(1, config, mode="bonuses", repeat=5)
    whole = sum(float(one.raw_reward[0]) for one in day(plain, lambda s: np.full((1, config.contracts), 6.0)))
    seed = int(np.random.SeedSequence(3).generate_state(2, np.uint32)[0])
    bids = Market(config).day(seed).requests().best_bid.sum()
    assert raw == pytest.approx(whole - bids, abs=1e-4)
    learned = np.sum([one.reward[0] for one in taken], 0)
    if by == "contract":  # each pays what it keeps from the others, too
        assert learned.shape == (config.contracts,)
        penalty = env.contracts.penalty * env.contracts.demand
        assert float((learned * penalty).sum()) < raw
    else:
        assert float(learned) == pytest.approx(raw, abs=1e-4)


def test_the_reward_of_a_contract_is_its_own_by_hand() -> None:
    """Two requests of bid 2, clicks worth 3 and 1; demand 2 and 1, penalty 10 (all per 1000)."""
    made = requests([[2.0], [2.0]], [[0.03, 0.01], [0.03, 0.01]])
    hand = HandDay(contracts([2, 1], penalty=0.01), made)
    env = hand_env(hand, mode="bonuses", repeat=2, relative=True, reward_by="contract", reward_scale=1000.0)
    env.reset(0)
    step = env.step(np.array([[5.0, 0.0]], np.float32))  # both go to the first
    assert CLICK_VALUE == 0.1
    np.testing.assert_allclose(step.reward[0], [2 * (3.0 - 2.0) / 0.02, -10.0 / 0.01], rtol=1e-5)
    env.reset(0)
    step = env.step(np.array([[5.0, 4.0]], np.float32))  # the second would have had them at 1 + 4
    np.testing.assert_allclose(step.reward[0], [2 * (3.0 - 5.0) / 0.02, -10.0 / 0.01], rtol=1e-5)
    assert step.raw_reward[0] == pytest.approx((2 * 1.0 - 10.0) / 1000, rel=1e-5)


def test_the_prior_is_the_dual_of_the_day_before() -> None:
    market = Market(SMALL)
    env = market_env(2, mode="bonuses", prior="yesterday")
    state = env.reset(3)
    for index in range(2):
        seed = int(np.random.SeedSequence(3).generate_state(3, np.uint32)[index])
        past = market.day(seed, 0)
        exact = solve_dual(Problem.of(past.requests(), market.contracts, SMALL.click_value, past.billed_rate)).alpha
        np.testing.assert_allclose(state["prior"][index], 1000 * exact, rtol=0.05, atol=0.1)
    demand = market_env(1, mode="contracts", prior="demand").reset(3)["prior"][0]
    assert (demand[SMALL.contracts :] == 0).all()
    assert (demand[: SMALL.contracts] > 0).any()
    assert ((demand >= 0) & (demand <= 1000 * market.contracts.penalty.max())).all()


def test_states_of_bonuses_hold_contracts_alone() -> None:
    env = generated(2, mode="bonuses", **{name: getattr(SMALL, name) for name in ("requests", "contracts", "windows")})
    state = env.reset(0)
    assert state["ad"].shape[1] == state["queue_mask"].shape[1] == env.spec.action.size == SMALL.contracts
    assert state["queue_mask"].all()
    assert env.spec.action_high == pytest.approx(tuple(1000 * env.contracts.penalty))


@pytest.mark.parametrize(
    ("play", "words"),
    [
        ({"repeat": 2}, "decides several requests"),
        ({"mode": "bonuses", "shuffle": True}, "no effect in mode bonuses"),
        ({"mode": "bonuses", "reward_by": "contract"}, r"needs play\.relative"),
        ({"mode": "all", "reward_by": "contract", "relative": True}, "bids at their eCPM"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(play: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PlayConfig(**play)


def test_a_log_has_no_yesterday() -> None:
    hand = HandDay(contracts([1]), requests([[1.0]], [[0.01]]))
    with pytest.raises(ConfigError, match="a log holds one day"):
        hand_env(hand, prior="yesterday")


def test_an_explorer_can_have_a_part_of_the_day_alone() -> None:
    env = market_env(2, mode="bonuses", repeat=10, first_window=2, last_window=5)
    state, times = env.reset(1), []
    for _ in range(400):
        step = env.step(np.zeros((2, SMALL.contracts), np.float32))
        times.append(state["overall"][:, PlayConfig().overall_fields.index("time")])
        assert not step.terminated.any()
        state = step.observation
        if step.truncated.any():
            break
    assert min(time.min() for time in times) >= 2 / SMALL.windows
    assert max(time.max() for time in times) < 5 / SMALL.windows
    assert step.truncated.any()
    for _ in range(2):  # the step after the end begins the next day, in the same part
        step = env.step(np.zeros((2, SMALL.contracts), np.float32))
    again = step.observation["overall"][:, PlayConfig().overall_fields.index("time")]
    assert (again >= 2 / SMALL.windows).all()
    assert step.raw_reward.max() > -0.2  # what was due before the part began is not charged
    with pytest.raises(ConfigError, match="must be above"):
        PlayConfig(first_window=3, last_window=3)

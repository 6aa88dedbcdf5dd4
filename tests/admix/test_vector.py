"""The environment's rules: what is in the queue, what is shown, what it earns, what is known of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from ddrl.admix import Market, PlayConfig, generated, generated_env
from ddrl.admix.environment import present_columns
from ddrl.core.errors import ConfigError, EnvError
from tests.admix.days import CLICK_VALUE, SMALL, HandDay, contracts, hand_env, market_env, play, requests


def first_contract(state):
    return np.tile([[10.0, 0.0]], (len(state), 1))


def test_each_term_of_the_reward_is_what_a_hand_computes():
    # two windows, four requests at 1/8, 3/8, 5/8, 7/8; two contracts that want 2 impressions each at 0.01 a miss.
    # due at 3/8: 2 * 3/8 = 0.75 each; at 5/8: 1.25; at 7/8: 1.75; at the end: 2.
    booked = contracts([2, 2], penalty=0.01)
    day = HandDay(booked, requests([[4.0], [3.0], [2.0], [1.0]], [[0.03, 0.05]] * 4))
    scores = [[9, 0], [0, 9], [0, 0], [9, 0]]  # contract 1, contract 2, the bid of 2, contract 1

    def rewards(**weights):
        env = hand_env(day, **{"shortfall_weight": 0, "ctr_weight": 0, "bid_weight": 0, **weights})
        env.reset(0)
        return [env.step(np.array([row], np.float32)).raw_reward[0] for row in scores]

    assert rewards(ctr_weight=2) == pytest.approx([2 * 0.003, 2 * 0.005, 0, 2 * 0.003])
    assert rewards(bid_weight=3) == pytest.approx([0, 0, 3 * 0.002, 0])
    # missing: after 1: contract 2 lacks .75; after 2: .25 each; after 3: .75 each; at the end 0 and 1
    assert rewards(shortfall_weight=1) == pytest.approx([-0.0075, 0.0075 - 0.005, 0.005 - 0.015, 0.015 - 0.01])
    whole = rewards(shortfall_weight=1, ctr_weight=1, bid_weight=1)
    assert sum(whole) == pytest.approx(0.003 + 0.005 + 0.002 + 0.003 - 0.01)  # V of the optimum's formula


def test_the_learner_sees_the_reward_scaled_and_the_columns_of_a_sample():
    day = HandDay(contracts([2, 2]), requests([[4.0], [3.0]], [[0.03, 0.05]] * 2, logged=np.array([1, 2])))
    env = hand_env(day, reward_scale=500.0)
    env.reset(0)
    step = env.step(np.array([[0, 7]], np.float32))
    assert step.reward.dtype == np.float32
    assert step.reward[0] == pytest.approx(500 * step.raw_reward[0])
    assert {name: values[0] for name, values in step.columns.items()} == {
        "chosen": 1, "score": 7.0, "revenue": pytest.approx(5.0), "logged": 1,
    }  # fmt: skip
    step = env.step(np.array([[0, 0]], np.float32))
    assert (step.columns["chosen"][0], step.columns["score"][0], step.columns["revenue"][0]) == (2, 3.0, 3.0)
    assert step.terminated[0]


def test_the_rewards_of_a_day_add_up_to_its_value():
    env = market_env(3)
    env.reset(5)
    market, total, over = Market(SMALL), np.zeros(3), np.zeros(3, bool)
    rng = np.random.default_rng(0)
    value = np.zeros(3)
    while not over.all():
        step = env.step(rng.uniform(0, 30, (3, 6)))
        total += np.where(over, 0, step.raw_reward)
        value += np.where(over, 0, step.columns["revenue"] / 1000)
        for row in np.flatnonzero(step.terminated & ~over):
            value[row] -= market.contracts.penalty @ np.maximum(market.contracts.demand - env.delivery.billed[row], 0)
        over |= step.terminated
    assert total == pytest.approx(value, rel=1e-5)


def test_an_episode_that_begins_midway_is_not_charged_for_what_was_due_before():
    # of a demand of 4 a quarter falls due with each request, of which the second window has three; none is served
    times = [0.25, 0.5, 0.75, 1 - 1e-9]
    day = HandDay(contracts([4], penalty=0.01), requests([[1.0]] * 4, np.zeros((4, 1)), time=times))
    env = hand_env(day, first_window=1, ctr_weight=0, bid_weight=0)
    env.reset(0)
    rewards = [env.step(np.zeros((1, 1), np.float32)).raw_reward[0] for _ in range(8)]
    assert rewards == pytest.approx([-0.01, -0.01, 0.0, 0.0] * 2, abs=1e-6)  # the fourth step begins the next day


def test_equal_scores_go_to_contracts_first_and_then_to_the_first_bid():
    day = HandDay(contracts([5, 5]), requests([[4.0, 4.0]] * 2, [[0.1, 0.1]] * 2))
    env = hand_env(day, mode="all")
    env.reset(0)
    assert env.step(np.full((1, 4), 1.0)).columns["chosen"][0] == 0
    assert env.step(np.array([[0.0, 0.0, 2.0, 2.0]])).columns["chosen"][0] == 2


def test_in_mode_all_the_scores_of_bids_decide_and_not_their_ecpm():
    day = HandDay(contracts([5]), requests([[4.0, 9.0]] * 2, [[0.1]] * 2))
    env = hand_env(day, mode="all")
    env.reset(0)
    step = env.step(np.array([[1.0, 3.0, 2.0]]))
    assert step.columns["chosen"][0] == 1
    assert step.columns["revenue"][0] == 4.0


def test_an_empty_queue_shows_nothing_and_is_counted():
    day = HandDay(contracts([5]), requests([[0.0], [0.0], [2.0]], [[0.1]] * 3, eligible=[[False], [True], [False]]))
    env = hand_env(day)
    state = env.reset(0)
    assert not state["queue_mask"].any()
    step = env.step(np.array([[np.nan]]))  # a score outside the mask means nothing
    assert (step.columns["chosen"][0], step.columns["revenue"][0]) == (-1, 0)
    env.step(np.array([[1.0]]))
    env.step(np.array([[1.0]]))
    assert env.events == {"requests": 3, "empty_queues": 1, "contract_shown": 1, "bid_shown": 1, "billed": 1}


@pytest.mark.parametrize("mode", ["all", "contracts"])
def test_a_market_without_bids_shows_contracts_or_nothing(mode):
    env = market_env(2, replace(SMALL, bids=0, extra_bids=0), mode=mode)
    shown = [step.columns["chosen"] for step in play(env, lambda state: np.ones((2, 6)), 200)]
    assert env.events["bid_shown"] == 0
    assert env.events["empty_queues"] + env.events["contract_shown"] == 400
    assert set(np.unique(shown).tolist()) <= set(range(-1, 6))
    assert env.events["contract_shown"] > 100


def test_no_ad_is_shown_beyond_its_cap():
    env = market_env(4, replace(SMALL, cap=1.0))
    state = env.reset(1)
    reached = False
    for _ in range(1500):
        before = env.delivery.shown.copy()
        assert not state["queue_mask"][:, :6][before >= env.contracts.cap].any()
        step = env.step(np.full((4, 6), 1e6))
        state = step.observation
        assert (env.delivery.shown <= env.contracts.cap).all()
        reached |= bool((env.delivery.shown == env.contracts.cap).any())
    assert reached


def test_rate_is_the_frequency_with_which_a_contract_enters_the_queue():
    day = HandDay(contracts([1e6, 1e6], cap=1e7), requests([[1.0]] * 4000, np.full((4000, 2), 0.1)))
    env = hand_env(day, 2)
    env.control(rate=np.array([0.3, 0.8]))
    seen = [env.reset(3)["queue_mask"][:, :2]] + [
        step.observation["queue_mask"][:, :2] for step in play(env, first_contract, 3999)
    ]
    frequency = np.mean(np.stack(seen[1:]), (0, 1))
    assert np.abs(frequency - [0.3, 0.8]).max() < 4 * np.sqrt(0.25 / 8000)


@pytest.mark.parametrize("theta", [0.0, 0.35, 1.0])
def test_theta_is_the_frequency_with_which_a_contract_of_the_queue_may_play(theta):
    day = HandDay(contracts([1e6], cap=1e7), requests([[1.0]] * 4000, np.full((4000, 1), 0.1)))
    env = hand_env(day, 2)
    env.control(theta=np.array([theta]))
    steps = play(env, lambda state: np.full((2, 1), 1e3), 3999)
    assert all(step.observation["queue_mask"][:, 0].all() for step in steps[:-1])  # it is in the queue all the same
    frequency = np.mean([step.columns["chosen"] == 0 for step in steps])
    assert abs(frequency - theta) <= 4 * np.sqrt(theta * (1 - theta) / 8000)


def test_theta_of_the_graph_is_what_play_control_uses():
    market = Market(SMALL)
    for name in ("split", "water"):
        env = market_env(2, theta=name)
        env.reset(3)
        for row, seed in enumerate(env._seeds):
            inventory = market.day(seed, 1).inventory
            assert np.allclose(env.delivery.theta[row], getattr(inventory, name)())
    assert not np.allclose(market.day(1).inventory.split(), market.day(1).inventory.water())


def test_support_lets_late_or_fresh_contracts_in_and_play_whatever_rate_and_theta_say():
    day = HandDay(contracts([100, 100], cap=1e7), requests([[1.0]] * 1000, np.full((1000, 2), 0.1)))
    for support, expected in (("off", 0), ("late", 75), ("fresh", 25)):
        env = hand_env(day, rate=0.0, support=support, support_gap=0.25)
        env.control(theta=np.zeros(2))
        play(env, first_contract, 999)
        # late: contract 1 keeps a quarter of its demand behind what is due; fresh: it gets a quarter and no more
        assert abs(env.delivery.shown[0, 0] - expected) <= 1
        assert env.delivery.shown[0, 1] == 0


def test_play_control_outside_0_and_1_is_refused():
    env = market_env(1)
    for values in (np.array([1.2] * 6), np.array([np.nan] * 6)):
        with pytest.raises(EnvError, match="theta must be probabilities"):
            env.control(theta=values)


def test_billing_is_known_after_the_delay_and_not_before():
    billing = np.where(np.arange(10) % 2, 0.9, 0.1)  # every second impression counts
    day = HandDay(
        contracts([10], cap=100, billed_rate=0.5),
        requests([[1.0]] * 10, np.full((10, 1), 0.1), billing=billing),
        billed_rate=0.5,
    )
    env = hand_env(day, delay=0.3)
    env.reset(0)
    seen = []
    for _ in range(9):
        env.step(np.full((1, 1), 1e3))
        seen.append((env.delivery.shown[0, 0], env.delivery.seen_shown[0, 0], env.delivery.seen_billed[0, 0]))
    assert seen == [(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 1, 1), (5, 2, 1), (6, 3, 2), (7, 4, 2), (8, 5, 3), (9, 6, 3)]
    assert env.delivery.billed[0, 0] == 5
    # 3 of 6 known impressions count, past rate 1/2: the 3 under way count half
    assert env.delivery.estimate[0, 0] == pytest.approx(3 + 1.5)


def test_without_own_counts_only_billed_impressions_are_known():
    day = HandDay(contracts([10], cap=100), requests([[1.0]] * 10, np.full((10, 1), 0.1)))
    states = {
        own: play(
            hand_env(day, delay=0.5, own_counts=own, ad_fields=("impressions",)), lambda s: np.full((1, 1), 1e3), 7
        )[-1]
        for own in (True, False)
    }
    assert states[True].observation["ad"][0, 0, 0] == pytest.approx(0.7)
    assert states[False].observation["ad"][0, 0, 0] == pytest.approx(0.2)


def test_a_day_that_is_over_is_followed_by_the_next_one_and_counts_from_zero():
    env = market_env(2, replace(SMALL, requests=60))
    env.reset(1)
    ends, days = 0, []
    for _ in range(400):
        over = env._over.copy()
        step = env.step(np.full((2, 6), 5.0))
        assert (step.raw_reward[over] == 0).all()
        assert (step.columns["chosen"][over] == -1).all()
        assert not step.truncated.any()
        assert not step.observation["queue_mask"][step.terminated].any()
        assert (step.observation["overall"][step.terminated][:, -1] == 1).all()  # the day's end
        for row in np.flatnonzero(over):
            assert env.delivery.shown[row].sum() == 0
            days.append(float(step.observation["overall"][row, -1]))
        ends += int(step.terminated.sum())
    assert ends >= 8
    assert len(set(days)) == len(days)  # each day is another
    assert max(days) < 0.3


@pytest.mark.parametrize("mode", ["all", "contracts"])
def test_permuting_the_queue_permutes_the_scores_and_changes_nothing_else(mode):
    weights = dict(zip(PlayConfig().ad_fields[2:], [1.5, 0.1, 9, 1, -2, 0.5, -0.3, 0.2, 0.1, 1], strict=True))

    def score(state):  # a policy that sees each ad by itself, wherever it stands
        ads = state["ad"].astype(np.float64)[:, : env.spec.action.shape[0]]
        return np.round(8 + ads @ np.array(list(weights.values())), 6)

    taken = []
    for shuffle in (False, True):
        env = market_env(3, mode=mode, shuffle=shuffle)
        steps = play(env, score, 300, seed=9)
        ids = []
        state = env.reset(9)
        for step in steps:
            at = step.columns["chosen"]
            ids.append(np.where(at >= 0, state["ad_id"][np.arange(3), at], 0))
            state = step.observation
        taken.append((np.array(ids), np.array([step.raw_reward for step in steps])))
    assert np.array_equal(taken[0][0], taken[1][0])
    assert np.array_equal(taken[0][1], taken[1][1])
    assert (taken[0][0] <= 6).any()
    assert (taken[0][0] > 6).any()


def test_shuffled_places_are_all_taken():
    env = market_env(1, shuffle=True, mode="all")
    steps = play(env, lambda s: np.zeros((1, env.queue)), 400)
    places = {place for step in steps for place in np.flatnonzero(step.observation["ad_id"][0] == 1).tolist()}
    assert len(places) > env.queue // 2


def test_the_state_holds_what_its_names_say():
    day = HandDay(
        contracts([4, 8], penalty=0.02, cap=10),
        requests([[4.0, 0.0]] * 8, np.tile([0.03, 0.05], (8, 1)), slot=np.full(8, 2)),
    )
    env = hand_env(day)
    env.reset(0)
    for _ in range(3):
        step = env.step(np.array([[9.0, 0.0]]))
    step = env.step(np.array([[0.0, 0.0]]))
    state, names = step.observation[0], PlayConfig().ad_fields[2:]
    first = dict(zip(names, state["ad"][0].tolist(), strict=True))
    # the fifth request stands at 9/16 of the day: 4 * 9/16 = 2.25 are due, 3 were shown and billed
    assert first == pytest.approx({
        "kind": 1, "ecpm": 0, "ctr": 0.03, "value": 3.0, "impressions": 0.75, "required": 0.5, "pace": 3 / 2.25,
        "cap": 0.7, "penalty": 20, "theta": 1,
    })  # fmt: skip
    bid = dict(zip(names, state["ad"][2].tolist(), strict=True))
    assert bid == pytest.approx({
        "kind": 0, "ecpm": 4, "ctr": 0.02, "value": 4, "impressions": 0, "required": 0, "pace": 0, "cap": 1,
        "penalty": 0, "theta": 1,
    })  # fmt: skip
    # due are 2.25 and 4.5, nothing of the second has come
    overall = dict(zip(PlayConfig().overall_fields, state["overall"].tolist(), strict=True))
    assert overall == pytest.approx({
        "shortfall": 4.5 / 6.75, "contract_ctr": 0.03, "bidding_ctr": 0.02, "payment": 4, "time": 9 / 16,
    })  # fmt: skip
    assert state["traffic"].tolist() == [1, 1, 0, 1]
    assert state["queue_mask"].tolist() == [True, True, True, False]
    assert state["ad_id"].tolist() == [1, 2, 100, 0]
    assert state["slot_id"] == 2


def test_any_subset_of_the_state_may_be_chosen():
    env = market_env(2, ad_fields=("pace", "value"), overall_fields=(), traffic_fields=("age",))
    state = env.reset(1)
    assert set(state.dtype.names) == {"queue_mask", "ad", "traffic"}
    assert state["ad"].shape == (2, 12, 2)
    assert state["traffic"].shape == (2, 3)
    whole = market_env(2).reset(1)
    assert np.array_equal(state["ad"][..., 1], whole["ad"][..., PlayConfig().ad_fields[2:].index("value")])
    with pytest.raises(ConfigError, match=r"play\.ad_fields"):
        PlayConfig(ad_fields=("speed",))


def test_what_the_mask_leaves_out_is_zero():
    for step in play(market_env(3, rate=0.5, shuffle=True), lambda s: np.full((3, 6), 5.0), 50):
        out = ~step.observation["queue_mask"]
        assert out.any()
        assert not step.observation["ad"][out].any()
        assert not step.observation["ad_id"][out].any()
        assert step.observation["ad_id"][~out].all()


def test_states_belong_to_the_caller():
    env = market_env(2)
    first = env.reset(1)
    copy = first.copy()
    env.step(np.zeros((2, 6)))
    assert np.array_equal(first, copy)


def test_the_same_seed_gives_the_same_run():
    runs = [
        [
            step.raw_reward
            for step in play(market_env(3, rate=0.7, theta="split"), lambda s: np.full((3, 6), 6.0), 200, seed)
        ]
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_broken_scores_are_refused_with_their_place():
    env = market_env(2)
    with pytest.raises(EnvError, match="step before reset"):
        env.step(np.zeros((2, 6)))
    state = env.reset(1)
    with pytest.raises(EnvError, match=r"scores of shape \(2, 3\); mode contracts takes \(2, 6\)"):
        env.step(np.zeros((2, 3)))
    for _ in range(200):
        if state["queue_mask"][1, :6].any():
            break
        state = env.step(np.zeros((2, 6))).observation
    slot = int(state["queue_mask"][1, :6].argmax())
    scores = np.zeros((2, 6))
    scores[1, slot] = np.nan
    with pytest.raises(EnvError, match=f"environment 1, ad slot {slot} is nan"):
        env.step(scores)


def test_a_day_without_requests_is_refused():
    day = HandDay(contracts([1]), requests(np.zeros((0, 1)), np.zeros((0, 1))))
    with pytest.raises(EnvError, match="without requests"):
        hand_env(day).reset(0)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_it_is_a_gymnasium_environment():
    env = generated_env(requests=100, contracts=4, windows=4, regions=4, ages=3)
    check_env(env, skip_render_check=True)
    env.reset(seed=3)
    ended = 0
    for _ in range(400):
        _, _, terminated, truncated, info = env.step(env.action_space.sample())
        assert set(info) == {"chosen", "score", "revenue", "logged"}
        if terminated or truncated:
            ended += 1
            env.reset()
    assert ended >= 2


def test_unknown_settings_are_refused_with_a_hint():
    with pytest.raises(ConfigError, match="no setting 'contract'; did you mean 'contracts'"):
        generated(2, contract=3)


def test_the_value_of_a_click_is_the_markets():
    assert generated(1, requests=100, contracts=3, click_value=CLICK_VALUE * 2).click_value == CLICK_VALUE * 2


def test_all_that_a_state_tells_of_an_ad_is_put_into_the_order_of_the_queue():
    fields = [("ad_id", "i8", 3), ("prior", "f4", 3), ("ad", "f4", (3, 2)), ("time", "f4")]
    state = np.zeros(2, fields)
    state["ad_id"] = state["prior"] = [[10, 20, 30], [40, 50, 60]]
    state["ad"] = state["ad_id"][:, :, None] + [0, 1]
    state["time"] = 0.5
    present_columns(state, np.array([[2, 0, 1], [1, 2, 0]]))
    assert state["ad_id"].tolist() == state["prior"].tolist() == [[30, 10, 20], [50, 60, 40]]
    assert (state["ad"] - state["ad_id"][:, :, None] == [0, 1]).all()
    assert state["time"].tolist() == [0.5, 0.5]

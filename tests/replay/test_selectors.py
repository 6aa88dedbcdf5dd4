"""Each selector draws by its law, and hears of every change."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from ddrl.replay import ExperienceReplay
from tests.replay.filled import add_episode, fill, make_replay


def drawn_counts(replay: ExperienceReplay, selector: int, *, batches: int = 400, size: int = 256) -> np.ndarray:
    """How often each pick of the table was drawn."""
    handles, positions = replay.picks()
    index = {pick: i for i, pick in enumerate(zip(handles.tolist(), positions.tolist(), strict=True))}
    counts = np.zeros(len(index))
    for _ in range(batches):
        batch = replay.sample(size, selector, 0.9)
        for pick in zip(batch.pick_epi.tolist(), batch.pick_pos.tolist(), strict=True):
            counts[index[pick]] += 1
    return counts


def assert_follows(counts: np.ndarray, law: np.ndarray) -> None:
    assert not counts[law == 0].any()
    kept = law > 0
    assert chisquare(counts[kept], counts.sum() * law[kept] / law[kept].sum()).pvalue > 1e-4


def test_uniform_draws_follow_the_uniform_law_while_episodes_come_and_go() -> None:
    replay = fill(make_replay(300, n_step=2), [7, 13, 1, 90, 120, 110, 40])
    selector = replay.new_pick_selector("uniform")
    add_episode(replay, 33)
    counts = drawn_counts(replay, selector)
    assert_follows(counts, np.full(len(counts), 1 / len(counts)))


@pytest.mark.parametrize("stratified", [False, True])
def test_prioritized_draws_follow_priority_to_the_alpha(stratified: bool) -> None:
    replay = fill(make_replay(300), [50, 60, 70, 80, 90])
    selector = replay.new_pick_selector("prioritized", priority_exponent=0.6, stratified=stratified)
    rng = np.random.default_rng(3)
    handles, positions = replay.picks()
    priority = rng.exponential(size=len(handles)).astype(np.float32)
    priority[::7] = 0
    replay.set_priority(selector, handles, positions, priority)
    add_episode(replay, 20)  # evicts the oldest episode: the table's picks move
    known = {
        pick: p
        for *pick, p in zip(handles.tolist(), positions.tolist(), priority.tolist(), strict=True)
        for pick in [tuple(pick)]
    }
    mass = np.array(
        [
            known.get(pick, priority.max()) ** 0.6 if known.get(pick, 1) else 0.0
            for pick in zip(*(side.tolist() for side in replay.picks()), strict=True)
        ]
    )
    law = mass / mass.sum()
    np.testing.assert_allclose(replay.probabilities(selector), law, rtol=1e-5)
    counts = drawn_counts(replay, selector)
    if stratified:  # less spread than independent draws: only the bound is tested
        expected = counts.sum() * law
        assert np.all(np.abs(counts - expected) < 6 * np.sqrt(expected + 1))
        assert not counts[law == 0].any()
    else:
        assert_follows(counts, law)


def test_rank_based_draws_follow_the_rank_to_the_minus_alpha() -> None:
    replay = fill(make_replay(300), [50, 60, 70, 80, 90])
    selector = replay.new_pick_selector("rank_based", priority_exponent=0.7)
    rng = np.random.default_rng(3)
    handles, positions = replay.picks()
    priority = rng.permutation(len(handles)) + 1.0
    replay.set_priority(selector, handles, positions, priority)
    rank = len(handles) + 1 - priority
    law = rank**-0.7 / (rank**-0.7).sum()
    np.testing.assert_allclose(replay.probabilities(selector), law, rtol=1e-9)
    assert_follows(drawn_counts(replay, selector), law)
    batch = replay.sample(64, selector, 0.9)
    index = {pick: i for i, pick in enumerate(zip(handles.tolist(), positions.tolist(), strict=True))}
    drawn = law[[index[pick] for pick in zip(batch.pick_epi.tolist(), batch.pick_pos.tolist(), strict=True)]]
    np.testing.assert_allclose(batch.weight, (drawn / drawn.min()) ** -0.5, rtol=1e-4)


def test_recency_draws_halve_with_every_half_life() -> None:
    replay = fill(make_replay(300), [100] * 7)
    selector = replay.new_pick_selector("recency", half_life=50)
    handles, positions = replay.picks()
    age = 299 - ((handles - 4) * 100 + positions).astype(np.float64)
    law = 0.5 ** (age / 50) / (0.5 ** (age / 50)).sum()
    late = replay.probabilities(selector)  # made late, it knows the order of the table alone
    np.testing.assert_allclose(late.sum(), 1)
    early = make_replay(300)
    selector = early.new_pick_selector("recency", half_life=50)
    fill(early, [100] * 7)
    np.testing.assert_allclose(early.probabilities(selector), law, rtol=1e-4)
    assert_follows(drawn_counts(early, selector), early.probabilities(selector))


def test_a_recency_selector_survives_many_half_lives() -> None:
    replay = make_replay(1000)
    selector = replay.new_pick_selector("recency", half_life=0.5)
    fill(replay, [100] * 300)
    handles, positions = replay.picks()
    newest = np.argmax(handles * 1000 + positions)
    np.testing.assert_allclose(replay.probabilities(selector)[newest], 0.75, rtol=1e-4)
    replay.check()


def test_picks_from_before_and_after_a_move_of_the_origin_keep_their_shares() -> None:
    replay = make_replay(300)
    selector = replay.new_pick_selector("recency", half_life=50)
    fill(replay, [100] * 31)  # the origin moves after 60 half-lives, which is between those that are held
    handles, positions = replay.picks()
    law = replay.probabilities(selector)[np.lexsort((positions, handles))]
    np.testing.assert_allclose(law[1:] / law[:-1], 2 ** (1 / 50), rtol=1e-4)


def test_ranks_stay_exact_through_thousands_of_updates_and_evictions() -> None:
    replay = make_replay(5000)
    selector = replay.new_pick_selector("rank_based", priority_exponent=1.0)
    rng = np.random.default_rng(4)
    known: dict[tuple[int, int], float] = {}
    highest = 1.0
    for turn in range(60):
        handle = add_episode(replay, int(rng.integers(100, 400)))
        known |= {(handle, position): highest for position in range(400)}
        handles, positions = replay.picks()
        chosen = rng.integers(len(handles), size=200)
        values = rng.integers(1, 50, 200) / 8
        replay.set_priority(selector, handles[chosen], positions[chosen], values)
        known |= dict(
            zip(zip(handles[chosen].tolist(), positions[chosen].tolist(), strict=True), values.tolist(), strict=True)
        )
        highest = max(highest, values.max())
        if turn % 10 == 9:
            replay.check()
    handles, positions = replay.picks()
    priority = np.array([known[pick] for pick in zip(handles.tolist(), positions.tolist(), strict=True)])
    rank = np.empty(len(priority))
    rank[np.argsort(-priority, kind="stable")] = np.arange(1, len(priority) + 1)
    np.testing.assert_allclose(replay.probabilities(selector), 1 / rank / (1 / rank).sum(), rtol=1e-9)


def test_stratified_draws_fall_one_into_each_part_of_the_mass() -> None:
    replay = fill(make_replay(64), [64])
    selector = replay.new_pick_selector("prioritized", stratified=True)
    batch = replay.sample(64, selector, 0.9)  # 64 equal masses, 64 parts
    assert sorted(batch.pick_pos.tolist()) == list(range(64))


def test_importance_weights_are_those_of_the_paper() -> None:
    replay = fill(make_replay(100), [50])
    selector = replay.new_pick_selector("prioritized", priority_exponent=0.5, importance_exponent=0.0)
    replay.set_priority(selector, *replay.picks(), np.arange(1, 51))
    assert (replay.sample(32, selector, 0.9).weight == 1).all()
    replay.set_importance_exponent(selector, 0.8)
    batch = replay.sample(32, selector, 0.9)
    probability = replay.probabilities(selector)[batch.pick_pos]  # one episode: the table stands in order of positions
    weight = (50 * probability) ** -0.8
    np.testing.assert_allclose(batch.weight, weight / weight.max(), rtol=1e-4)


def test_a_selector_made_late_sees_all_picks() -> None:
    replay = fill(make_replay(), [10, 20])
    early = replay.new_pick_selector("prioritized")
    add_episode(replay, 5)
    late = replay.new_pick_selector("prioritized")
    np.testing.assert_array_equal(replay.probabilities(early), replay.probabilities(late))


def test_selectors_on_the_same_data_keep_their_own_priorities() -> None:
    replay = fill(make_replay(), [10])
    one, other = replay.new_pick_selector("prioritized"), replay.new_pick_selector("prioritized")
    replay.set_priority(one, [0], [3], [100.0])
    assert replay.probabilities(one)[3] > 0.5
    np.testing.assert_allclose(replay.probabilities(other), 0.1)


def test_new_picks_get_the_maximal_priority_seen() -> None:
    replay = fill(make_replay(), [4])
    selector = replay.new_pick_selector("prioritized", priority_exponent=1.0)
    replay.set_priority(selector, [0, 0], [0, 1], [8.0, 0.5])
    add_episode(replay, 1)
    np.testing.assert_allclose(replay.probabilities(selector), np.array([8, 0.5, 1, 1, 8]) / 18.5)


def test_picks_of_priority_zero_are_never_drawn() -> None:
    replay = fill(make_replay(), [100])
    selector = replay.new_pick_selector("prioritized")
    replay.set_priority(selector, np.zeros(99), np.arange(99), np.zeros(99))
    assert (replay.sample(1000, selector, 0.9).pick_pos == 99).all()
    replay.set_priority(selector, [0], [99], [0.0])
    with pytest.raises(ValueError, match="no pick can be drawn"):
        replay.sample(1, selector, 0.9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, -np.inf])
def test_impossible_priorities_are_refused_and_change_nothing(bad: float) -> None:
    replay = fill(make_replay(), [10])
    selector = replay.new_pick_selector("prioritized")
    before = replay.probabilities(selector)
    with pytest.raises(ValueError, match="finite"):
        replay.set_priority(selector, [0, 0], [1, 2], [5.0, bad])
    np.testing.assert_array_equal(replay.probabilities(selector), before)


def test_late_priority_updates_do_not_touch_picks_that_replaced_them() -> None:
    replay = fill(make_replay(20), [10, 10])
    selector = replay.new_pick_selector("prioritized")
    batch = replay.sample(50, selector, 0.9)
    add_episode(replay, 15)  # both episodes are gone, their slots are written again
    assert replay.set_priority(selector, batch.pick_epi, batch.pick_pos, np.full(50, 1000.0)) == 0
    np.testing.assert_allclose(replay.probabilities(selector), 1 / 15)


def test_drawing_from_nothing_says_what_to_do() -> None:
    replay = make_replay()
    with pytest.raises(ValueError, match="record more"):
        replay.sample(1, replay.new_pick_selector("uniform"), 0.9)
    with pytest.raises(ValueError, match="no pick selector 7"):
        replay.sample(1, 7, 0.9)
    with pytest.raises(ValueError, match="choose one of uniform"):
        replay.new_pick_selector("unifrom")
    with pytest.raises(ValueError, match="takes no"):
        replay.new_pick_selector("uniform", alpha=1)

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.balance.sizes import (
    balanced_sizes,
    fractions_at,
    memory_limit,
    model_speed,
    proportional_sizes,
    water_level,
)
from ddrl.core.errors import ConfigError


@st.composite
def bounded(draw, most_nodes=64, most=400, spread=1e4):
    """Weights, overheads, bounds and a batch that they can hold."""
    nodes = draw(st.integers(1, most_nodes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lower = rng.integers(0, 3, nodes)
    upper = lower + rng.integers(0, max(2, most // nodes), nodes) + (lower == 0)
    total = draw(st.integers(int(max(lower.sum(), 1)), int(max(upper.sum(), 1))))
    weight = spread ** rng.random(nodes)
    return total, rng.choice([0.0, 0.01, 0.5], nodes) * rng.random(nodes), weight, lower, upper


@settings(max_examples=300)
@given(bounded())
def test_sizes_sum_to_the_batch_and_keep_their_bounds(case):
    total, overhead, speed, lower, upper = case
    for sizes in (proportional_sizes(total, speed, lower, upper), balanced_sizes(total, overhead, speed, lower, upper)):
        assert sizes.sum() == total
        assert (sizes >= lower).all()
        assert (sizes <= upper).all()


@settings(max_examples=200)
@given(bounded())
def test_proportional_sizes_are_clipped_shares_of_one_factor_rounded_by_less_than_one(case):
    total, _, weight, lower, upper = case
    none = np.zeros_like(weight)
    exact = fractions_at(water_level(total, none, weight, lower, upper), none, weight, lower, upper)
    assert exact.sum() == pytest.approx(total, rel=1e-9)
    inside = (exact > lower) & (exact < upper)
    factors = (exact / weight)[inside]
    assert not len(factors) or np.ptp(factors) < 1e-6 * factors.max()
    assert (np.abs(proportional_sizes(total, weight, lower, upper) - exact) < 1 + 1e-6).all()


def slowest(sizes, overhead, speed):
    return max((a + b / v if b else 0.0 for b, a, v in zip(sizes, overhead, speed, strict=True)), default=0.0)


@settings(max_examples=200)
@given(bounded(most_nodes=4, most=24, spread=30.0))
def test_balanced_sizes_are_the_best_of_all_integers(case):
    total, overhead, speed, lower, upper = case
    choices = itertools.product(*(range(low, high + 1) for low, high in zip(lower, upper, strict=True)))
    best = min(slowest(sizes, overhead, speed) for sizes in choices if sum(sizes) == total)
    assert slowest(balanced_sizes(total, overhead, speed, lower, upper), overhead, speed) <= best * (1 + 1e-9)


def test_the_level_without_bounds_is_the_closed_form_over_the_active_nodes():
    overhead, speed = np.array([0.1, 0.2, 5.0]), np.array([100.0, 50.0, 100.0])
    level = water_level(60, overhead, speed, np.zeros(3, int), np.full(3, 60))
    assert level == pytest.approx((60 + 100 * 0.1 + 50 * 0.2) / 150)  # the third node's overhead lies above T*


def test_many_clusters_at_once_give_what_each_gives_alone():
    rng = np.random.default_rng(3)
    overhead, speed = rng.random((50, 12)), 100 ** rng.random((50, 12))
    total, lower = rng.integers(12, 400, 50), np.ones((50, 12), int)
    upper = np.maximum(1, rng.integers(1, 200, (50, 12)))
    upper[:, 0] = 400
    together = balanced_sizes(total, overhead, speed, lower, upper)
    alone = [balanced_sizes(total[c], overhead[c], speed[c], lower[c], upper[c]) for c in range(50)]
    np.testing.assert_array_equal(together, alone)
    together = proportional_sizes(total, speed, lower, upper)
    np.testing.assert_array_equal(
        together, [proportional_sizes(total[c], speed[c], lower[c], upper[c]) for c in range(50)]
    )


def test_largest_remainders_are_rounded_up_first():
    bounds = np.zeros(3, int), np.full(3, 10)
    np.testing.assert_array_equal(proportional_sizes(10, np.array([5.0, 3.2, 1.8]), *bounds), [5, 3, 2])


def test_clipped_mass_goes_to_the_others_in_proportion():
    sizes = proportional_sizes(100, np.array([8.0, 1.0, 1.0]), np.ones(3, int), np.array([20, 100, 100]))
    np.testing.assert_array_equal(sizes, [20, 40, 40])


@pytest.mark.parametrize(
    ("total", "lower", "upper", "reason"),
    [
        (2, [1, 1, 1], [9, 9, 9], "below what 3 nodes take at least"),
        (30, [1, 1, 1], [9, 9, 9], "exceeds what all 3 nodes hold"),
        (9, [1, 5, 1], [9, 4, 9], "node 1: its largest"),
    ],
)
def test_bounds_that_cannot_hold_are_refused_with_the_reason(total, lower, upper, reason):
    with pytest.raises(ConfigError, match=reason):
        proportional_sizes(total, np.ones(3), np.array(lower), np.array(upper))
    with pytest.raises(ConfigError, match=reason):
        balanced_sizes(total, np.zeros(3), np.ones(3), np.array(lower), np.array(upper))


@pytest.mark.parametrize(
    ("totals", "lower", "upper", "words"),
    [
        ([7, 2], [1, 2], [9, 9], r"the batch \(2 samples\) is below what 2 nodes take at least \(3\)"),
        ([7, 30], [1, 2], [9, 8], r"the batch \(30 samples\) exceeds what all 2 nodes hold together \(17\)"),
        ([7, 7], [1, 5], [9, 4], r"node 1: its largest micro-batch \(4\) is below its smallest \(5\)"),
    ],
)
def test_of_many_clusters_the_smallest_batch_is_named_as_too_small_and_the_largest_as_too_large(
    totals, lower, upper, words
):
    bounds = np.array([[0, 1], lower]), np.array([[20, 20], upper])  # the first cluster can be cut
    with pytest.raises(ConfigError, match=words):
        proportional_sizes(totals, np.ones((2, 2)), *bounds)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_speed_that_cannot_be_is_refused_with_the_node(bad):
    with pytest.raises(ConfigError, match=r"node 1: its speed"):
        balanced_sizes(9, np.zeros(3), np.array([1.0, bad, 1.0]), np.ones(3, int), np.full(3, 9))
    with pytest.raises(ConfigError, match=r"node 1: its weight"):
        proportional_sizes(9, np.array([1.0, bad, 1.0]), np.ones(3, int), np.full(3, 9))


def test_an_overhead_below_zero_is_refused():
    with pytest.raises(ConfigError, match="overhead"):
        balanced_sizes(9, np.array([0.0, -1.0, np.nan]), np.ones(3), np.ones(3, int), np.full(3, 9))


def test_memory_gives_whole_samples_and_refuses_less_than_one():
    np.testing.assert_array_equal(memory_limit([1000, 1999], 500.0, 100.0), [5, 14])
    with pytest.raises(ConfigError, match=r"node 1: its memory .* not one sample"):
        memory_limit([1000, 550], 500.0, 100.0)
    with pytest.raises(ConfigError, match="bytes a sample"):
        memory_limit([1000], 0.0, 0.0)


def test_model_information_gives_samples_a_second_by_what_binds_a_node():
    speed = model_speed([6e9, 6e9], 6 * 1e6, byte_rate=[np.inf, 1e6], sample_bytes=1e4)
    np.testing.assert_allclose(speed, [1000.0, 100.0])  # the second one waits for its memory
    for values, reason in (([1.0, 0.0], "node 1: its rate"), ([1.0], "cannot be")):
        with pytest.raises(ConfigError, match=reason):
            model_speed(values, 0.0 if len(values) == 1 else 1.0)

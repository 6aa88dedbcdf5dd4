import numpy as np
import pytest

from ddrl.balance import Cluster, Observation
from ddrl.balance.sizes import AffineFilter, FilterSettings

CLUSTER = Cluster.of(300, np.full(3, 100.0))


def feed(track, sizes, overhead, speed, rng=None):
    seconds = overhead + sizes / speed
    seconds = seconds if rng is None else seconds * rng.lognormal(0.0, 0.05, len(seconds))
    track.update(Observation.of(CLUSTER, sizes, seconds))


def test_overhead_and_speed_are_both_found_where_sizes_differ():
    track, rng = AffineFilter(CLUSTER, FilterSettings(drift=0.001, learning=0.0)), np.random.default_rng(1)
    overhead, speed = np.array([0.1, 0.3, 0.5]), np.array([200.0, 100.0, 50.0])
    for _ in range(400):
        feed(track, rng.integers(20, 200, 3), overhead, speed, rng)
    np.testing.assert_allclose(track.speed, speed, rtol=0.05)
    np.testing.assert_allclose(track.overhead, overhead, atol=0.05)


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_jump_scales_overhead_and_seconds_a_sample_at_once(factor):
    track, sizes = AffineFilter(CLUSTER, FilterSettings()), np.array([100, 100, 100])
    for _ in range(20):
        feed(track, sizes, 0.2, 100.0)
    before = track.overhead.copy(), track.speed.copy()
    slowed = np.array([factor, 1.0, 1.0])
    feed(track, sizes, 0.2 * slowed, 100.0 / slowed)
    np.testing.assert_array_equal(track.jumped, [True, False, False])
    np.testing.assert_allclose(track.overhead[0], before[0][0] * factor, rtol=1e-3)
    np.testing.assert_allclose(track.speed[0], before[1][0] / factor, rtol=1e-3)


def follow(noise, amplitude, **settings):
    """A filter after 200 iterations of 100 nodes whose times have this much noise; the later 50 of them swing."""
    cluster, sizes, rng = Cluster.of(10_000, np.full(100, 100.0)), np.full(100, 100), np.random.default_rng(2)
    track = AffineFilter(cluster, FilterSettings(**settings))
    swing = np.where(np.arange(100) < 50, 0.0, amplitude)
    for iteration in range(200):
        seconds = 0.1 + np.exp(-swing * np.sin(iteration / 6))
        track.update(Observation.of(cluster, sizes, seconds * rng.lognormal(0.0, noise, 100)))
    return track


def test_drift_is_learned_where_it_is_and_unlearned_where_it_is_not():
    drift = follow(0.05, 0.5).drift
    assert drift[50:].min() > 3 * np.median(drift[:50])
    assert np.median(drift[:50]) < 0.01


@pytest.mark.parametrize("between", [0, 1, 2])
def test_iterations_without_a_nodes_time_do_not_part_the_innovations_that_its_drift_is_learned_from(between):
    track = AffineFilter(CLUSTER, FilterSettings(drift=0.02, jitter_learning=0.0))
    heard = [1.0] * 6 + [1.1] + [None] * between + [1.2]
    for seconds in heard:
        times = np.full(3, seconds or 1.0)
        track.update(Observation.of(CLUSTER, np.full(3, 100), times, received=np.full(3, seconds is not None)))
    np.testing.assert_allclose(track.drift, 0.02984, rtol=1e-3)  # two innovations that agree


@pytest.mark.parametrize("jitter", [0.02, 0.2, 0.5])
def test_jitter_is_learned(jitter):
    assert np.median(follow(jitter, 0.0).jitter) == pytest.approx(jitter, rel=0.15)


def test_jitter_that_is_not_to_be_learned_stays_and_nodes_that_are_not_heard_keep_theirs():
    assert (follow(0.2, 0.0, jitter=0.005, jitter_learning=0.0).jitter == 0.005).all()
    track = AffineFilter(CLUSTER, FilterSettings())
    for seconds in (1.0, 2.0, 1.0, 2.0):
        received = np.array([True, True, False])
        track.update(Observation.of(CLUSTER, np.full(3, 100), np.full(3, seconds), received=received))
    assert track.jitter[0] == track.jitter[1] > 0.1
    assert track.jitter[2] == 0.05


def test_samples_never_cost_nothing_also_where_sizes_answer_to_times():
    track = AffineFilter(CLUSTER, FilterSettings(drift=0.003, learning=0.0, jump=1e9))
    for iteration in range(60):  # a node that slows while it gets less: a line through its points falls
        sizes = np.array([160 - 2 * iteration, 70 + iteration, 70 + iteration])
        seconds = np.array([1.0 + 0.02 * iteration, 1.0, 1.0])
        track.update(Observation.of(CLUSTER, sizes, seconds))
        assert (sizes / track.speed > 0.099 * (track.overhead + sizes / track.speed)).all(), iteration


def test_times_of_a_machine_that_is_busy_with_other_things_never_make_a_variance_negative():
    cluster, rng = Cluster.of(160, np.full(10, 100.0)), np.random.default_rng(3)
    track = AffineFilter(cluster, FilterSettings())
    for _ in range(4000):
        stolen = np.where(rng.random(10) < 0.1, rng.exponential(0.05, 10), 0.0)  # by other processes
        sizes = rng.integers(3, 14, 10)
        seconds = (1e-3 + sizes * 1e-5) * rng.lognormal(0.0, 0.3, 10) + stolen
        with np.errstate(invalid="raise"):
            track.update(Observation.of(cluster, sizes, seconds))
    assert np.isfinite(track.speed).all()
    assert (track.speed > 0).all()


def test_what_is_learned_after_a_jump_is_the_same_in_the_nodes_new_unit():
    """A node's times are then four times as long, another's a quarter, with another overhead than expected."""
    settings = FilterSettings(learning=0.0, jitter_learning=0.0)
    track = AffineFilter(CLUSTER, settings)
    for _ in range(20):
        feed(track, np.array([100, 100, 100]), 0.2, 100.0)
    factor = np.array([4.0, 0.25, 4.0])
    feed(track, np.array([100, 100, 100]), 0.2 * factor, 100.0 / factor)
    assert track.jumped.all()
    for size in (60, 140, 80, 100):
        feed(track, np.full(3, size), 0.3 * factor, 110.0 / factor)
        assert not track.jumped.any()
        np.testing.assert_allclose(track.overhead / factor, track.overhead[0] / 4.0, rtol=1e-6)
        np.testing.assert_allclose(track.speed * factor, track.speed[0] * 4.0, rtol=1e-6)

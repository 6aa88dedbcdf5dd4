"""Policy lag: every consumed sample counts once, whenever the counting happens."""

import math

import numpy as np
import pytest

from ddrl.run.lag import PENDING, RECENT, LagMeter


def consume(meter: LagMeter, batches: int, size: int, seed: int = 0) -> np.ndarray:
    """Consume random batches, a version published before each; every lag, in order [batches * size]."""
    random = np.random.default_rng(seed)
    lags = []
    for newest in range(1, batches + 1):
        meter.published(newest)
        acted = random.integers(max(0, newest - 900), newest + 1, size)
        meter.consumed(acted.astype(np.uint64), newest)
        lags.append(newest - acted)
    return np.concatenate(lags)


@pytest.mark.parametrize(("batches", "size"), [(7, 3), (3000, 32), (5, PENDING + 1), (3, 2 * RECENT + 5)])
def test_percentiles_and_means_are_those_of_all_samples(batches: int, size: int) -> None:
    meter = LagMeter(0)
    lags = consume(meter, batches, size)
    summary = meter.summary()
    ordered = np.sort(lags)
    assert summary["p50"] == ordered[math.ceil(0.50 * len(lags)) - 1]
    assert summary["p99"] == ordered[math.ceil(0.99 * len(lags)) - 1]
    assert summary["mean"] == pytest.approx(lags.mean())
    assert summary["mean_seconds"] >= 0
    assert meter.recent(50) == pytest.approx(np.percentile(lags[-RECENT:], 50))


def test_looking_does_not_change_what_is_counted() -> None:
    looked, not_looked = LagMeter(0), LagMeter(0)
    for seed in range(5):
        consume(looked, 20, 64, seed)
        looked.recent(99)
        looked.summary()
        consume(not_looked, 20, 64, seed)
    for name in ("p50", "p99", "mean"):
        assert looked.summary()[name] == not_looked.summary()[name]


def test_lag_beyond_a_thousand_versions_is_counted() -> None:
    meter = LagMeter(5000)
    meter.consumed(np.array([0, 5000], np.uint64), 5000)
    assert meter.summary()["p99"] == 5000
    assert meter.summary()["p50"] == 0


def test_before_the_first_sample_there_is_no_lag() -> None:
    meter = LagMeter()
    assert math.isnan(meter.recent(50))
    assert meter.summary() == {"p50": None, "p99": None}


def test_versions_on_their_way_and_in_replay_are_told_apart() -> None:
    meter = LagMeter(0)
    for version in range(1, 11):
        meter.published(version)
    meter.arrived(np.full(4, 2, np.uint64), newest=5)  # three versions old when it arrives
    meter.consumed(np.full(4, 2, np.uint64), 10)
    assert meter.arrival.percentile(50) == 3
    assert meter.recent(50) == 8
    assert meter.summary()["mean_in_flight"] == 3
    assert meter.summary()["mean_in_queue"] == 5

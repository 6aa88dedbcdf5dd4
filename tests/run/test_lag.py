"""Policy lag: every consumed sample counts once, whenever the counting happens."""

import math
from pathlib import Path

import numpy as np
import pytest

from ddrl.core.algorithm import Experience
from ddrl.core.errors import ConfigError
from ddrl.core.rows import RowKind, row_schema
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.replay.sources import make_source
from ddrl.run.training import PENDING, RECENT, LagBound, LagMeter, Recent
from ddrl.telemetry import Run
from tests.run.launch import TINY, ddrl, settings


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
    assert meter.recent(50, "arrived") == 3
    assert meter.recent(50) == 8
    assert meter.summary()["mean_in_flight"] == 3
    assert meter.summary()["mean_in_queue"] == 5


def test_the_parts_of_lag_are_those_of_the_samples_not_of_all_rows_that_arrived() -> None:
    meter = LagMeter(0)
    for version in range(1, 11):
        meter.published(version)
    meter.arrived(np.zeros(1000, np.uint64), newest=9)  # many rows came late, and none of them is drawn
    meter.arrived(np.full(4, 8, np.uint64), newest=9)
    meter.consumed(np.full(32, 8, np.uint64), 10, unpublished=6)
    summary = meter.summary()
    assert (summary["mean_in_flight"], summary["mean_in_queue"], summary["mean_unpublished"]) == (1, 1, 6)


ROW = np.dtype([("stream", "u4"), ("kind", "u4"), ("policy_version", "u8")])


def rows(*versions: int, stream: int = 0, kind: RowKind = RowKind.STEP) -> np.ndarray:
    made = np.zeros(len(versions), ROW)
    made["stream"], made["kind"], made["policy_version"] = stream, kind, versions
    return made


def bound(*overrides: str, rollouts: int = 2) -> LagBound:
    return LagBound(load_config(None, ["env.num_envs=2", "rollout.max_policy_lag=3", *overrides]), rollouts, -1)


def test_waiting_holds_the_next_version_back_until_every_rollout_is_recent_enough() -> None:
    waits = bound()
    assert waits.allows(3)
    assert not waits.allows(4)
    assert len(waits.admit(rows(2, 2, stream=1), 3)) == 2
    assert not waits.allows(4)  # the second stream is of the first rollout still
    waits.admit(rows(1, stream=2), 3)
    assert waits.allows(4)
    assert not waits.allows(5)


def test_waiting_leaves_out_rollouts_that_have_no_process() -> None:
    absent = np.zeros(2, np.bool_)
    waits = LagBound(load_config(None, ["env.num_envs=2", "rollout.max_policy_lag=3"]), 2, -1, lambda: absent)
    waits.admit(rows(1, stream=2), 3)
    assert not waits.allows(4)
    absent[0] = True
    assert waits.allows(4)
    assert not waits.allows(5)
    absent[:] = True
    assert waits.allows(5)


def test_rows_beyond_the_bound_are_dropped_and_ends_of_episodes_stay() -> None:
    drops = bound("rollout.at_max_lag=drop")
    assert drops.admit(rows(1, 2, 3, 4, 5), 5)["policy_version"].tolist() == [2, 3, 4, 5]
    assert len(drops.admit(rows(0, kind=RowKind.TERMINATED), 9)) == 1
    assert drops.allows(100)


def test_waiting_within_no_version_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_policy_lag \(0\) must be at least 1"):
        load_config(None, ["rollout.max_policy_lag=0"])
    assert load_config(None, ["rollout.max_policy_lag=0", "rollout.at_max_lag=drop"]).rollout.max_policy_lag == 0


def test_samples_beyond_the_bound_weigh_less() -> None:
    config = load_config(None, ["rollout.max_policy_lag=9", "rollout.at_max_lag=weight", "replay.selector=uniform"])
    schema = row_schema(EnvSpec("X", ArraySpec((1,), "float32"), 2))
    source = make_source(config, schema, Experience())
    made = np.zeros(2000, schema.dtype)
    made["step"] = np.arange(2000)
    made["policy_version"][1000:] = 30
    source.record(made, 39)
    batch = source.sample()
    assert set(batch.policy_version) == {0, 30}
    np.testing.assert_allclose(batch.weight, np.where(batch.policy_version == 0, 10 / 40, 1.0), rtol=1e-6)


@pytest.mark.parametrize("what", ["wait", "drop"])
def test_no_row_is_learned_from_that_arrived_beyond_the_bound(what: str, tmp_path: Path) -> None:
    done = ddrl(
        *TINY, *settings(f"run.dir={tmp_path / 'run'}", "rollout.max_policy_lag=2", f"rollout.at_max_lag={what}"),
        *settings("learner.publish_period=1", "run.processes=2", "replay.samples_per_insert=8"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Run(tmp_path / "run") as run:
        series = run.series(["arrival_lag_p99", "publishes", "rows_too_old", "env_steps"])
    assert series["env_steps"][-1] == 3000
    assert np.nanmax(series["arrival_lag_p99"]) <= 2
    assert series["publishes"][-1] > 20
    assert what == "drop" or series["rows_too_old"][-1] == 0


def test_a_percentile_is_numpys() -> None:
    recent = Recent()
    values = np.random.default_rng(3).integers(0, 1000, 4097)
    for part in np.array_split(values, 7):
        recent.add(part)
    for percentile in (0, 3.7, 50, 99, 100):
        assert recent.percentile(percentile) == pytest.approx(float(np.percentile(values, percentile)), abs=1e-9)
    one = Recent()
    one.add(np.array([4]))
    assert one.percentile(99) == 4

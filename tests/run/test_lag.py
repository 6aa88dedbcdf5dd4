"""Policy lag: every consumed sample counts once, whenever the counting happens."""

import math
from pathlib import Path

import numpy as np
import pytest

from ddrl.core.errors import ConfigError
from ddrl.core.rows import RowKind, row_schema
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec, Experience
from ddrl.replay.sources import make_source
from ddrl.run.lag import PENDING, RECENT, LagBound, LagMeter, Recent
from ddrl.run.serial import SerialRun
from ddrl.run.task import Outcome
from ddrl.telemetry import Run
from tests.run.launch import TINY, settings
from tests.run.preloaded import forked
from tests.run.test_turns import prepare


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


def bound(*overrides: str, rollouts: int = 2, absent: np.ndarray | None = None) -> LagBound:
    """At most 30 updates; versions 0 to 5 were published after 0, 10, ... 50 of them."""
    config = load_config(None, ["env.num_envs=2", "rollout.max_policy_lag=30", *overrides])
    made = LagBound(config, rollouts, 0, None if absent is None else lambda: absent)
    for version in range(6):
        made.published(version, 10 * version)
    return made


def test_waiting_holds_the_next_update_back_until_every_rollout_is_recent_enough() -> None:
    waits = bound()
    assert waits.allows(30)
    assert not waits.allows(31)
    assert len(waits.admit(rows(2, 2, stream=1), 30)) == 2
    assert not waits.allows(31)  # the second stream is of the first rollout still
    waits.admit(rows(1, stream=2), 30)
    assert waits.allows(40)
    assert not waits.allows(41)


def test_waiting_leaves_out_rollouts_that_have_no_process() -> None:
    absent = np.zeros(2, np.bool_)
    waits = bound(absent=absent)
    waits.admit(rows(1, stream=2), 30)
    assert not waits.allows(31)
    absent[0] = True
    assert waits.allows(40)
    assert not waits.allows(41)
    absent[:] = True
    assert waits.allows(41)


@pytest.mark.parametrize("what", ["wait", "drop"])
def test_rows_beyond_the_bound_are_dropped_and_ends_of_episodes_stay(what: str) -> None:
    drops = bound(f"rollout.at_max_lag={what}")
    assert drops.admit(rows(1, 2, 3, 4, 5), 50)["policy_version"].tolist() == [2, 3, 4, 5]
    assert len(drops.admit(rows(0, kind=RowKind.TERMINATED), 90)) == 1
    assert drops.allows(1000) == (what == "drop")


def test_versions_of_before_a_resume_count_as_published_at_it() -> None:
    waits = LagBound(load_config(None, ["rollout.max_policy_lag=5"]), 1, 7000, None)
    waits.published(3000, 7000)
    assert waits.allows(7005)
    assert not waits.allows(7006)
    assert len(waits.admit(rows(12, 2999), 7005)) == 2
    waits.published(3001, 7004)
    waits.admit(rows(3001), 7005)
    assert waits.allows(7009)


def ages_of(run: SerialRun) -> list[int]:
    """Updates that the policies lacked that acted, at each vector step of the run."""
    training = run.task.training
    step = run._worker.step
    found: list[int] = []

    def noting() -> int:
        found.append(training._unpublished)
        return step()

    run._worker.step = noting  # type: ignore[method-assign]
    while run.turn() is not Outcome.DONE:
        pass
    run.finish()
    return found


def test_policies_are_never_older_with_the_bound_than_without(tmp_path: Path) -> None:
    ages = {}
    apart = {}  # updates from one version to the next
    for most in ("inf", "40", "3"):
        words = settings("run.max_env_steps=600", "learner.publish_period=10", f"rollout.max_policy_lag={most}")
        more = settings("replay.samples_per_insert=30", "rollout.warmup_steps=50", "replay.min_size=50")
        run = SerialRun(prepare(tmp_path / most, 1, *words, *more))
        ages[most] = ages_of(run)
        apart[most] = run.task.training.state.updates / run.task.training.state.policy_version
    assert max(ages["inf"]) > 3
    assert max(ages["40"]) <= max(ages["inf"])
    assert set(ages["3"]) == {0}  # what was learned is published before the trainer waits
    assert apart["3"] <= 3 < apart["inf"]


def test_waiting_within_no_version_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_policy_lag \(0\) must be at least 1"):
        load_config(None, ["rollout.max_policy_lag=0"])
    assert load_config(None, ["rollout.max_policy_lag=0", "rollout.at_max_lag=drop"]).rollout.max_policy_lag == 0


def test_samples_beyond_the_bound_weigh_less() -> None:
    names = ["rollout.max_policy_lag=90", "rollout.at_max_lag=weight", "replay.selector=uniform"]
    config = load_config(None, [*names, "learner.publish_period=10"])
    schema = row_schema(EnvSpec("X", ArraySpec((1,), "float32"), 2))
    source = make_source(config, schema, Experience())
    made = np.zeros(2000, schema.dtype)
    made["step"] = np.arange(2000)
    made["policy_version"][1000:] = 30
    source.record(made, 39)
    batch = source.sample()
    assert set(batch.policy_version) == {0, 30}
    np.testing.assert_allclose(batch.weight, np.where(batch.policy_version == 0, 91 / 391, 1.0), rtol=1e-6)


@pytest.mark.parametrize("what", ["wait", pytest.param("drop", marks=pytest.mark.long)])
def test_no_row_is_learned_from_that_arrived_beyond_the_bound(what: str, tmp_path: Path) -> None:
    done = forked(
        *TINY, *settings(f"run.dir={tmp_path / 'run'}", "rollout.max_policy_lag=2", f"rollout.at_max_lag={what}"),
        *settings("learner.publish_period=1", "run.processes=2", "replay.samples_per_insert=8"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Run(tmp_path / "run") as run:
        series = run.series(["arrival_lag_p99", "publishes", "rows_too_old", "env_steps"])
    assert series["env_steps"][-1] == 3000
    assert np.nanmax(series["arrival_lag_p99"]) <= 2
    assert series["publishes"][-1] > 20


def test_a_percentile_is_numpys() -> None:
    recent = Recent()
    values = np.random.default_rng(3).integers(0, 1000, 4097)
    for part in np.array_split(values, 7):
        recent.add(part)
    for percentile in (0, 3.7, 50, 99, 100):
        assert recent.percentile(percentile) == pytest.approx(float(np.percentile(values, percentile)), abs=1e-9)
    apart = Recent()  # neighbours of which no two are alike
    apart.add(np.array([0, 1000, 10, 100]))
    for percentile in (10, 25, 50, 80, 99):
        assert apart.percentile(percentile) == pytest.approx(float(np.percentile([0, 10, 100, 1000], percentile)))
    whole = Recent()
    for begin in range(0, RECENT + 10, RECENT // 4):
        whole.add(np.arange(begin, min(begin + RECENT // 4, RECENT + 10)))
    assert (whole.percentile(0), whole.percentile(100)) == (10, RECENT + 9)  # the oldest are forgotten first
    one = Recent()
    one.add(np.array([4]))
    assert one.percentile(99) == 4

"""`ddrl.compare`: runs by the settings that differ, seeds as a mean and its interval."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

import ddrl
from ddrl.core.config import Config, LearnerConfig, RunConfig, TelemetryConfig
from ddrl.core.errors import ConfigError, RunDirError
from ddrl.core.roles import Evaluation, Returns
from ddrl.core.settings import config_to_toml
from ddrl.plots.runs import interval_of_mean
from ddrl.telemetry import Recorder, Table
from tests.telemetry.fake_cluster import FakeCluster


def record(path, seed, lr, means, code="", package="cells_0000"):
    config = Config(
        run=RunConfig(seed=seed), learner=LearnerConfig(lr=lr), telemetry=TelemetryConfig(period=1000.0, live=False)
    )
    path.mkdir(parents=True)
    text = config_to_toml(config)
    if code:
        (path / "cells").mkdir()
        (path / "cells" / "env.py").write_text(code)
        text = text.replace('id = "CartPole-v1"', f'id = "{package}.env:Env"')
        assert package in text
    (path / "config.toml").write_text(text)
    cluster = FakeCluster()
    with Recorder(path, cluster.table, config, clock=lambda: cluster.now, monotonic=lambda: cluster.now) as recorder:
        for index, mean in enumerate(means):
            recorder.record_evaluation(Evaluation(0, 1000 * (index + 1), Returns(mean, 3.0, 20)), updates=100)
    return path


def test_seeds_are_one_group_with_mean_and_interval_and_other_settings_another(tmp_path, capsys):
    runs = [record(tmp_path / f"a{seed}", seed, 0.1, (0.0, value)) for seed, value in ((1, 10.0), (2, 14.0), (3, 12.0))]
    runs.append(record(tmp_path / "b", 1, 0.5, (0.0, 7.0)))
    made = ddrl.compare(runs)
    slow, fast = made.groups
    assert (slow.label, slow.runs, slow.mean) == ("learner.lr=0.1", ("a1", "a2", "a3"), 12.0)
    assert slow.half == pytest.approx(4.303 * 2 / np.sqrt(3))
    assert (fast.label, fast.runs, fast.mean) == ("learner.lr=0.5", ("b",), 7.0)
    assert np.isnan(fast.half)
    band, mean, single = made.figure.data
    assert mean.x[-1] == single.x[-1] == 2000
    assert mean.y[-1] == pytest.approx(12.0)
    assert (slow.iqm, slow.low, slow.high) == pytest.approx((12.0, 10.0, 14.0))
    assert (min(band.y[:200]), max(band.y)) == pytest.approx((0.0, 14.0))
    assert list(single.y) == [0.0, 7.0]
    words = str(made).splitlines()
    assert words[1].split() == ["learner.lr=0.1", "3", "12.0", "5.0", "12.0", "10.0", "14.0"]
    made._ipython_display_()
    assert "learner.lr=0.1" in capsys.readouterr().out


def test_code_of_cells_is_compared_by_its_text(tmp_path):
    runs = [
        record(tmp_path / f"{k}", k, 0.1, (k,), code, f"cells_{k}")
        for k, code in enumerate(("a = 1", "a = 1", "a = 2"))
    ]
    same, other = ddrl.compare(runs).groups
    assert (same.runs, other.runs) == (("0", "1"), ("2",))
    assert same.label.startswith("env.id=env:Env (")


def test_runs_of_one_name_are_told_apart_and_what_is_no_comparison_is_one_line(tmp_path):
    runs = [record(tmp_path / folder / "run", 1, lr, (1.0,)) for folder, lr in (("a", 0.1), ("b", 0.2))]
    assert [each.runs for each in ddrl.compare(runs).groups] == [(str(runs[0]),), (str(runs[1]),)]
    for wrong in ([], [runs[0], runs[0]]):
        with pytest.raises(ConfigError, match="each of them once"):
            ddrl.compare(wrong)
    with pytest.raises(RunDirError, match="there is no run directory"):
        ddrl.compare([tmp_path / "absent"])


def test_without_evaluations_the_last_training_return_counts(tmp_path, monkeypatch):
    path = record(tmp_path / "a", 1, 0.1, ())
    columns = {"env_steps": np.arange(3.0), "return_mean": np.array([1.0, 2.0, np.nan])}
    monkeypatch.setattr(ddrl.Run, "series", lambda *_, **__: Table(columns, 3))
    (only,) = ddrl.compare([path]).groups
    assert only.mean == 2.0


def test_the_interval_of_a_mean_is_students():
    mean, half = interval_of_mean(np.array([[1.0, 5.0], [3.0, 5.0]]))
    np.testing.assert_allclose(mean, [2.0, 5.0])
    np.testing.assert_allclose(half, [12.706, 0.0])
    many = np.arange(31.0)
    assert interval_of_mean(many)[1] == pytest.approx(2.0423 * many.std(ddof=1) / np.sqrt(31), rel=1e-3)

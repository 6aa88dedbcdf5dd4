import contextlib
import urllib.request

import numpy as np
import pytest

from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.errors import ConfigError
from ddrl.core.metrics import Metric, info_figure, run_metrics
from ddrl.telemetry import LiveReader, Recorder, Run
from ddrl.telemetry.series import SeriesWindow
from ddrl.telemetry.sinks import PrometheusPage
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import CONFIG, Feed
from tests.waiting import PATIENCE


def test_a_figure_that_an_algorithm_declares_is_recorded_read_and_drawn_without_any_list_changing(tmp_path):
    entropy = Metric("entropy", "gauge", "nats", "Entropy of the policy in a recent batch.")
    group = Metric("group", "gauge", "", "A figure whose name is a word of SQL.")  # by every reader of the tables
    figures = (entropy, group)
    cluster = FakeCluster(figures=figures)
    cluster.gauge(0, entropy=0.75, group=3.0)
    feed = Feed(cluster, 10**9)
    config = Config(telemetry=TelemetryConfig(period=0.001, tensorboard=True))
    with (
        Recorder(tmp_path, feed, config, figures=figures, clock=feed.clock, monotonic=feed.clock) as recorder,
        LiveReader(tmp_path) as reader,
    ):
        items = []
        while not items:
            items = [item for item in reader.receive(timeout=PATIENCE) if hasattr(item, "series")]
        with contextlib.closing(PrometheusPage(0, run_metrics(figures))) as page:
            page.record(recorder.latest)
            with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics") as answer:
                text = answer.read().decode()
    assert items[0].columns[-2:] == ("entropy", "group")
    assert items[0].series["entropy"] == 0.75
    assert "ddrl_entropy 0.75" in text
    assert 'ddrl_process_entropy{host="0",rank="0",role="trainer"} 0.75' in text
    assert b"run/entropy" in next((tmp_path / "tensorboard").iterdir()).read_bytes()
    with Run(tmp_path) as run:
        assert run.figures == ("entropy", "group")
        series = run.series()
        assert run.processes().column("entropy")[-1, 0] == 0.75
        assert np.isnan(series["td_error"]).all(), "a series of other algorithms is known and not reported"
    assert set(series["entropy"]) == {0.75}
    assert set(series["group"]) == {3.0}
    plots = pytest.importorskip("ddrl.plots", reason="needs the extra [plots]")
    figure = plots.series_over({"run": series}, "entropy")
    assert figure.layout.yaxis.title.text == "nats"
    assert set(figure.data[0].y) == {0.75}


@pytest.mark.parametrize("name", ["loss", "learn_share", "tick", "return_mean", "Big", 'a"b', ""])
def test_a_figure_whose_name_is_taken_or_no_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="figure"):
        Recorder(tmp_path, FakeCluster().table, CONFIG, figures=(Metric(name, "gauge", "", ""),))


def test_a_figure_of_info_is_the_mean_over_the_rollouts_that_have_one():
    figures = (info_figure("Score (own)"),)
    cluster = FakeCluster(figures=figures)
    cluster.gauge(cluster.rollouts[:2], info_score__own_=np.array([1.0, 4.0]))
    window = SeriesWindow(Config(), metrics=run_metrics(figures))
    assert window.measure(cluster.table(), cluster.now, 1.0)["info_score__own_"] == 2.5

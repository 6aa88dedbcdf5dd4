"""What stands under a name is what the name says: every line, column and label, in tables whose every value differs."""

from html import unescape

import numpy as np
import pytest

from ddrl import plots
from ddrl.core.config import Config, ReplayConfig
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.plots.runs import interval_of_mean
from ddrl.telemetry import summary as command
from ddrl.telemetry.series import Event, SeriesWindow
from ddrl.telemetry.store import Store
from ddrl.telemetry.summary import Facts
from tests.plots.test_figures import moments, table_of


def lines_of(figure):
    """Name -> last value of every line."""
    return {line.name: float(line.y[-1]) for line in figure.data}


def test_each_line_has_the_series_that_its_name_says():
    shares = {
        "learn_share": 0.31, "sample_share": 0.17, "record_share": 0.13, "publish_share": 0.05,
        "checkpoint_share": 0.02, "trainer_wait_share": 0.21, "rollout_wait_share": 0.07, "rollout_hold": 0.43,
        "other_share": 0.11,
    }  # fmt: skip
    table = table_of(
        wall_seconds=[0, 2], rows_recorded=[0, 100], samples=[0, 800], replay_size=[0, 60], samples_per_insert=[8, 8],
        versions_in_flight=[2, 2], version_age_p50=[3, 3], version_age_max=[5, 5],
        **{name: [value, value] for name, value in shares.items()},
    )  # fmt: skip
    assert lines_of(plots.who_waits(table)) == {
        "trainer for data": 0.21, "rollouts at full lanes": 0.07, "rollouts held back": 0.43,
    }  # fmt: skip
    assert lines_of(plots.trainer_time(table)) == {
        "learning": 0.31, "drawing": 0.17, "recording": 0.13, "publishing": 0.05, "checkpoints": 0.02,
        "waiting": 0.21, "other": 0.11,
    }  # fmt: skip
    assert lines_of(plots.recording_rates(table)) == {"recorded": 50.0, "learned from": 400.0}
    for figure in (plots.who_waits(table), plots.trainer_time(table)):
        assert figure.layout.yaxis.tickformat == ".0%"
    fill = lines_of(plots.replay_fill(table, 300))
    assert (fill["held"], fill["capacity"]) == (60.0, 300.0)
    assert lines_of(plots.sample_balance(table, 4.0)) == {"measured": 8.0, "asked for: 4": 4.0}
    assert lines_of(plots.version_flow(table)) == {"in flight": 2.0, "median age": 3.0, "oldest": 5.0}


def test_each_column_of_the_ranks_has_the_counter_that_its_name_says_and_follows_its_rank():
    counters = {
        "policy version": "policy_version", "env steps": "env_steps", "episodes": "episodes",
        "waited [s]": "wait_seconds", "restarts": "restarts", "pid": "pid", "host": "host",
    }  # fmt: skip
    places = np.arange(3.0)
    values = {name: 100.0 * COLUMNS.index(name) + places for name in COLUMNS if name not in ("role", "rank", "ended")}
    values["heartbeat"] = np.array([1000.0, 900.0, 1000.0])  # the second one is late, and first
    table = plots.rank_table(moments([0], [Role.TRAINER, Role.ROLLOUT, Role.ROLLOUT], **values), 1001.0)
    assert table["rank"].tolist() == [1, 0, 2]
    for column, counter in counters.items():
        assert table[column].tolist() == (100.0 * COLUMNS.index(counter) + table["rank"]).tolist(), column


def test_only_late_and_silent_ranks_are_marked():
    found = moments([0], [Role.TRAINER, *[Role.ROLLOUT] * 2], heartbeat=[1000, 900, 900], ended=[0, 0, 1])
    (bars,) = plots.heartbeat_ages(found, 1001.0).data
    marked = {int(rank): bool(shape) for rank, shape in zip(bars.x, bars.marker.pattern.shape, strict=True)}
    assert marked == {0: False, 1: True, 2: False}  # nobody is expected at the last place
    assert dict(zip(bars.x, bars.customdata, strict=True)) == {0: "trainer", 1: "rollout", 2: "rollout"}
    assert "rank %{x} (%{customdata}): %{y" in bars.hovertemplate


def test_each_column_of_the_command_has_the_figure_that_its_name_says():
    facts = Facts(
        "p", "n", "ended", "r\nmore", "t", 9, best=1, last=2, confirmed=3, env_steps=4, env_steps_per_s=5,
        wall_seconds=6, seconds_left=7,
    )  # fmt: skip
    assert dict(zip(command.COLUMNS, command.row_of(facts), strict=True)) == {
        "run": "n", "state": "ended", "task": "t", "best": "1.0", "last": "2.0", "confirmed": "3.0", "steps": "4",
        "steps/s": "5", "time": "6s", "left": "7s", "reason": "r",
    }  # fmt: skip


def test_of_many_events_the_command_shows_the_newest(tmp_path):
    store = Store(tmp_path)
    for number in range(3 * command.EVENTS):
        store.event(Event(0.0, float(number), "note", f"event {number}."))
    store.close()
    (tmp_path / "config.toml").write_text("")
    text = command.show_run(tmp_path)
    assert [number for number in range(3 * command.EVENTS) if f"event {number}." in text] == [*range(20, 30)]


def test_a_logarithmic_scale_is_one():
    table = {"a": table_of(env_steps=[0, 1, 2], loss=[1, 10, 100])}
    assert plots.series_over(table, "loss", log=True).layout.yaxis.type == "log"
    assert plots.series_over(table, "loss").layout.yaxis.type != "log"


def test_the_labels_of_a_sketch_stand_at_their_values():
    text = plots.sketch([("a", np.array([0.0, 10.0]), np.array([0.0, 8.0]))])
    points = [tuple(map(float, point.split(","))) for point in text.split('points="')[1].split('"')[0].split()]
    heights = {}
    for label in text.split("<text ")[1:]:
        if 'text-anchor="end"' in label and label.startswith('x="46"'):
            heights[float(unescape(label.split(">")[1].split("<")[0]))] = float(label.split('y="')[1].split('"')[0])
    assert heights[0.0] - 4 == pytest.approx(points[0][1])
    assert heights[8.0] - 4 == pytest.approx(points[1][1])
    assert heights[4.0] == pytest.approx((heights[0.0] + heights[8.0]) / 2)


def test_the_interval_of_a_mean_is_students():
    mean, half = interval_of_mean(np.array([[1.0], [2.0], [3.0], [6.0]]))
    assert mean[0] == 3.0
    assert half[0] == pytest.approx(3.182 * np.sqrt(14 / 3) / 2)  # three degrees of freedom, four runs
    _, half = interval_of_mean(np.random.default_rng(0).normal(size=(10_000, 1)))
    assert half[0] == pytest.approx(1.96 / 100, rel=0.03)


def test_the_fill_of_replay_is_its_share_of_the_capacity():
    config = Config(replay=ReplayConfig(capacity=200, min_size=50))
    table = moments([0], [Role.TRAINER], replay_size=50.0).values[0]
    assert SeriesWindow(config).measure(table, 0.0, 0.0)["replay_fill"] == 0.25

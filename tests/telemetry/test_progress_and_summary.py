import io
import json
import re

import numpy as np

from ddrl.core.config import Config, ReplayConfig
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Returns
from ddrl.telemetry import Evaluation, Event, ProgressLine, Record, summarize
from ddrl.telemetry.series import SERIES_NAMES, SeriesWindow
from ddrl.telemetry.sinks import count_text, duration_text
from tests.telemetry.fake_cluster import FakeCluster

NAN = float("nan")


def records(count, cluster=None, config=None, step=1.0, sick=None):
    """`sick`: by tick, the rank that has shown no sign of life for long."""
    cluster = cluster or FakeCluster()
    window = SeriesWindow(config or Config())
    for tick in range(count):
        cluster.advance(step)
        if sick and tick in sick:
            cluster.set(sick[tick], heartbeat=cluster.now - 100.0)
        yield Record(
            tick,
            cluster.now,
            cluster.elapsed,
            window.measure(cluster.table(), cluster.now, cluster.elapsed),
            cluster.table(),
        )


def test_a_table_in_which_nobody_has_reported_gives_no_numbers_and_no_warnings():
    window = SeriesWindow(Config())
    table = np.full((5, len(COLUMNS)), NAN)
    for now in (0.0, 1.0):
        values = window.measure(table, now, now)
    assert set(values) == set(SERIES_NAMES)
    assert np.isnan(values["env_steps"])
    assert np.isnan(values["return_mean"])
    assert values["rollouts"] == 0


def test_rates_are_over_the_window_and_never_negative():
    cluster = FakeCluster()
    window = SeriesWindow(Config())
    for _ in range(20):
        cluster.advance(1.0)
        values = window.measure(cluster.table(), cluster.now, cluster.elapsed)
    assert 9_000 < values["env_steps_per_s"] < 11_000
    assert values["updates_per_s"] == 200
    assert values["model_mb_per_s"] * 1e6 == 20 * cluster.model_nbytes
    cluster.set(int(cluster.rollouts[0]), env_steps=0.0)
    cluster.now += 1
    assert window.measure(cluster.table(), cluster.now, 21.0)["env_steps_per_s"] >= 0


def test_steps_that_the_trainer_has_not_recorded_yet_count_as_speed_but_not_as_progress():
    cluster = FakeCluster()
    window = SeriesWindow(Config())
    for _ in range(5):
        cluster.advance(1.0)
        cluster.set(0, env_steps=cluster.elapsed * 100)
        values = window.measure(cluster.table(), cluster.now, cluster.elapsed)
    assert values["env_steps"] == 500
    assert values["env_steps_per_s"] > 9_000
    assert values["seconds_left"] == (500_000 - 500) / 100
    assert summarize(cluster.table(), wall_seconds=5.0)["env_steps"] == 500


def test_the_time_left_of_a_resumed_run_is_that_of_the_steps_that_are_left():
    cluster = FakeCluster()
    window = SeriesWindow(Config(), base={"env_steps": 100_000.0})
    for _ in range(5):
        cluster.advance(1.0)
        cluster.set(0, env_steps=cluster.elapsed * 100)
        values = window.measure(cluster.table(), cluster.now, cluster.elapsed)
    assert values["env_steps"] == 100_500
    assert values["seconds_left"] == (500_000 - 100_500) / 100


def test_the_return_is_the_mean_over_the_episodes_that_ended_in_the_window():
    cluster = FakeCluster(processes=5, hosts=1)
    window = SeriesWindow(Config(), window=5.0)
    for rank in cluster.rollouts:
        cluster.set(int(rank), episodes=100.0, return_sum=1000.0)
    window.measure(cluster.table(), 0.0, 0.0)
    cluster.set(int(cluster.rollouts[0]), episodes=102.0, return_sum=1000.0 + 300.0)
    cluster.set(int(cluster.rollouts[1]), episodes=101.0, return_sum=1000.0 + 600.0)
    assert window.measure(cluster.table(), 1.0, 1.0)["return_mean"] == 300.0


def test_samples_per_insert_are_those_of_the_window():
    cluster = FakeCluster(processes=5, hosts=1)
    window = SeriesWindow(Config(), window=5.0)
    cluster.set(0, samples=1000.0, rows_recorded=1000.0)
    window.measure(cluster.table(), 0.0, 0.0)
    cluster.set(0, samples=1800.0, rows_recorded=1100.0)
    assert window.measure(cluster.table(), 1.0, 1.0)["samples_per_insert"] == 8.0


def test_returns_below_zero_are_told_as_they_are():
    cluster = FakeCluster(processes=5, hosts=1)
    window = SeriesWindow(Config(), window=5.0)
    row = int(cluster.rollouts[0])
    cluster.set(row, episodes=1.0, return_sum=-21.0)
    window.measure(cluster.table(), 0.0, 0.0)
    cluster.set(row, episodes=3.0, return_sum=-61.0)
    assert window.measure(cluster.table(), 1.0, 1.0)["return_mean"] == -20.0


def test_time_left_is_the_nearer_of_the_two_limits():
    from ddrl.core.config import RunConfig

    for run, low, high in (
        (RunConfig(max_env_steps=200_000), 9, 13),
        (RunConfig(max_env_steps=200_000, max_seconds=12.0), 2, 2),
    ):
        last = list(records(10, config=Config(run=run)))[-1]
        assert low <= last.series["seconds_left"] <= high


def on_screen(text: str) -> list[str]:
    """What a terminal shows after `text`: the few escapes that the panel uses, carried out."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[2K|\x1b\[1A|\r|\n)", text):
        if part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part and part != "\r":
            lines[row] += part
    return lines


def test_on_a_terminal_two_lines_are_rewritten_in_place_and_fit_the_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    line = ProgressLine(Config(), stream, live=True)
    for record in records(5):
        line.record(record)
        if record.tick == 2:
            line.evaluation(Evaluation(0, 0, 0, 0, 123.5, 1, 20))
            line.event(Event(0, 0, "checkpoint", "checkpoint written", {}))
    line.close()
    shown = on_screen(stream.getvalue())
    assert shown[0] == "checkpoint written"
    assert re.search(r"5s\s+9%\s+steps\s+\S+k\s+env/s\s+\d+\s+upd/s\s+200\s+MB/s\s+8.0\s+left\s+\d+s", shown[1])
    assert re.search(r"return\s+\S+\s+eval\s+123.5\s+lag\s+1/3\s+replay\s+\d+%\s+loss\s+0\.\d+", shown[2])
    assert shown[3:] == [""]
    assert all(len(text) < 80 for text in shown)


def test_until_the_first_update_the_share_of_the_records_that_it_needs_is_shown():
    config = Config(replay=ReplayConfig(capacity=1_000_000, min_size=40_000))
    shown = []
    for size in (0.0, 10_000.0, 39_999.0, 40_000.0):
        stream = io.StringIO()
        line = ProgressLine(config, stream, plain_period=0.0)
        (record,) = records(1, config=config)
        record.table[:, COLUMNS.index("replay_size")] = [size] + [NAN] * (len(record.table) - 1)
        record.series["replay_fill"] = size / 1_000_000
        line.record(record)
        shown += re.findall(r"(filling|replay) +(\d+%)", stream.getvalue())
    assert shown == [("filling", "0%"), ("filling", "25%"), ("filling", "100%"), ("replay", "4%")]


def test_elsewhere_plain_lines_come_every_so_often_and_the_last_is_printed(monkeypatch):
    stream = io.StringIO()
    line = ProgressLine(Config(), stream, plain_period=10.0)
    for record in records(25):
        line.record(record)
    line.close()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    limits = [text for text in lines if text.startswith("limit: ")]
    assert [text.split()[1] for text in limits] == ["Learner:"]  # said once, while it stays the same
    lines = [text for text in lines if text not in limits]
    assert [text.split()[0] for text in lines] == ["1s", "11s", "21s", "25s"]
    assert "left" in lines[-1]


def test_a_pause_and_what_follows_are_named_as_causes_within_seconds():
    stream = io.StringIO()
    line = ProgressLine(Config(), stream)
    for record in records(40):
        line.record(record)
        if record.tick in (14, 20):
            command = "pause" if record.tick == 14 else "resume"
            line.event(Event(0, 0, "command", f"{command}: ok", {"command": command, "ok": True}))
    line.close()
    limits = [text.split()[1] for text in stream.getvalue().splitlines() if text.startswith("limit: ")]
    assert limits == ["Learner:", "Paused:", "Learner:"]


def test_each_sick_rank_is_named_once():
    stream = io.StringIO()
    line = ProgressLine(Config(), stream)
    sick = dict.fromkeys(range(20, 50), 4) | dict.fromkeys(range(50, 80), 7)
    for record in records(80, sick=sick):
        line.record(record)
    line.close()
    limits = [text for text in stream.getvalue().splitlines() if text.startswith("limit: ")]
    assert [" ".join(text.split()[1:4]) for text in limits[1:]] == ["Rank: rank 4", "Rank: rank 7"]


def test_numbers_are_short():
    assert [count_text(value) for value in (0, 950, 12_345, 456_789, 4_560_000, 7.8e9, NAN)] == [
        "0",
        "950",
        "12.3k",
        "457k",
        "4.6M",
        "7.8G",
        "-",
    ]
    assert max(len(count_text(value)) for value in np.geomspace(1, 9e11, 5000)) == 5
    assert [count_text(value) for value in (99_940, 99_960, 99_960_000)] == ["99.9k", "100k", "100M"]
    assert [duration_text(value) for value in (5, 185, 7800, NAN)] == ["5s", "3m05s", "2h10m", "-"]


def test_the_summary_holds_what_scripts_rely_on_and_is_json():
    cluster = FakeCluster()
    for _ in range(30):
        cluster.advance(1.0)
    found = summarize(cluster.table(), wall_seconds=30.0, evaluation=Returns(499.5, 0.5, 20), run_id="x")
    assert found == json.loads(json.dumps(found))
    assert found["env_steps"] == np.nansum(cluster.values[cluster.rollouts, COLUMNS.index("env_steps")])
    assert found["updates"] == 6000
    assert found["evaluation"] == {"mean": 499.5, "std": 0.5, "episodes": 20}
    assert found["policy_lag"] == {"p50": 2, "p99": 6}
    assert [host["host"] for host in found["hosts"]] == [0, 1]
    assert found["hosts"][0]["model_bytes_sent"] == 30 * 20 * cluster.model_nbytes
    assert abs(found["trainer_shares"]["learn"] - 0.6) < 1e-6
    assert abs(found["trainer_shares"]["wait"] - 0.1) < 1e-6
    assert found["run_id"] == "x"


def test_the_summary_of_a_resumed_run_adds_what_came_before_once():
    cluster = FakeCluster()
    cluster.advance(10.0)
    alone = summarize(cluster.table(), wall_seconds=10.0)
    counts = ("env_steps", "updates", "episodes", "publishes", "checksum_failures", "rows_dropped", "restarts")
    before = {name: 100.0 + number for number, name in enumerate((*counts, "episodes_cut"))}
    resumed = summarize(cluster.table(), wall_seconds=110.0, base={**before, "wall_seconds": 100.0})
    assert {name: resumed[name] - (alone[name] or 0) for name in before} == before
    assert resumed["trainer_shares"] == alone["trainer_shares"]
    assert resumed["env_steps_per_s"] == alone["env_steps_per_s"]


def test_the_summary_of_a_run_that_did_nothing_has_no_numbers_but_all_names():
    found = summarize(np.full((3, len(COLUMNS)), NAN), wall_seconds=0.0)
    assert found["env_steps"] == 0
    assert found["evaluation"] is None
    assert found["policy_lag"] == {"p50": None, "p99": None}
    json.dumps(found, allow_nan=False)

import json
import re
import socket
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from html import escape

import numpy as np
import pytest

pytest.importorskip("ipywidgets", reason="needs the extra [notebook]")
pytest.importorskip("plotly", reason="needs the extra [plots]")

from benchmarks.telemetry.fake_cluster import FakeCluster
from ddrl.core.config import Config, RunConfig, TelemetryConfig
from ddrl.core.errors import ConfigError, DdrlError, RunDirError
from ddrl.core.messages import Evaluation, Returns
from ddrl.core.settings import config_to_toml
from ddrl.notebook import Panel, _mpirun, _reason, _toml, panel_html, start, watch
from ddrl.plots.runs import sketch
from ddrl.telemetry import Recorder, Run, causes_of
from ddrl.telemetry.causes import Cause
from ddrl.telemetry.sinks import count_text, duration_text, value_text
from tests.waiting import ENDLESS, PATIENCE, wait_until


def record(path, seconds=20):
    cluster = FakeCluster()
    config = Config(telemetry=TelemetryConfig(period=1000.0, live=False))
    path.mkdir(exist_ok=True)
    (path / "config.toml").write_text(config_to_toml(config))
    for _ in range(seconds):
        cluster.advance(1.0)
        Recorder(path, cluster.table, config, clock=lambda: cluster.now, monotonic=lambda: cluster.now).close()
    return path


def test_the_panel_shows_a_run_and_stops_by_itself_when_the_run_has_ended(tmp_path):
    panel = watch(record(tmp_path / "a"), period=0.01)
    panel._thread.join(30)
    assert not panel._thread.is_alive()
    assert "<svg" in panel._html.value
    assert "ended" in panel._html.value
    assert all(button.disabled for button in panel._buttons)
    assert "application/vnd.jupyter.widget-view+json" in panel._repr_mimebundle_()
    panel.close()


def test_the_panel_shows_the_newest_evaluation(tmp_path):
    config = Config(telemetry=TelemetryConfig(period=1000.0, live=False))
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    cluster = FakeCluster()
    with Recorder(
        tmp_path, cluster.table, config, clock=lambda: cluster.now, monotonic=lambda: cluster.now
    ) as recorder:
        for env_steps, mean in ((1000, 120.5), (2000, 195.5)):
            recorder.record_evaluation(Evaluation(0, env_steps, Returns(mean, 3.0, 20)), updates=100)
    with Run(tmp_path) as run:
        shown = panel_html(run)
    assert "<b>195.5</b>" in shown
    assert "<b>120.5</b>" not in shown


def test_every_number_of_the_panel_and_its_curve_are_of_the_series_that_they_name(tmp_path, monkeypatch):
    config = Config(run=RunConfig(target_return=150.0), telemetry=TelemetryConfig(period=0.001, live=False))
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    cluster = FakeCluster()
    recorded = threading.Event()
    end = cluster.now + 20

    def table():
        if cluster.now < end:
            cluster.advance(1.0)
        else:
            recorded.set()
        return cluster.table()

    with Recorder(tmp_path, table, config, clock=lambda: cluster.now, monotonic=lambda: cluster.now) as recorder:
        recorder.record_evaluation(Evaluation(0, 1000, Returns(120.5, 3.0, 20)), updates=100)
        assert recorded.wait(PATIENCE)
    drawn = {}

    def sketch(lines, **names):
        drawn.update({name: (x, y) for name, x, y in lines}, **names)
        return ""

    monkeypatch.setattr("ddrl.plots.runs.sketch", sketch)
    with Run(tmp_path) as run:
        shown = panel_html(run)
        series = run.series(points=300)
        newest = run.series(since=run.cursor - 1)
        first = causes_of(run)[0].sentence
    numbers = (
        ("steps", count_text(newest["env_steps"][-1])),
        ("steps/s", count_text(newest["env_steps_per_s"][-1])),
        ("updates/s", count_text(newest["updates_per_s"][-1])),
        ("return", value_text(newest["return_mean"][-1])),
        ("evaluation", "120.5"),
        ("lag on arrival", "/".join(count_text(newest[f"arrival_lag_p{share}"][-1]) for share in (50, 99))),
        ("model MB/s", value_text(newest["model_mb_per_s"][-1])),
        ("left", duration_text(newest["seconds_left"][-1])),
    )
    assert re.findall("<small>(.*?)</small><br><b>(.*?)</b>", shown) == list(numbers)
    assert len({text for _, text in numbers}) == len(numbers), "numbers that are alike can be exchanged unseen"
    assert newest["arrival_lag_p50"][-1] < newest["arrival_lag_p99"][-1]
    assert duration_text(newest["wall_seconds"][-1]) != duration_text(newest["seconds_left"][-1])
    assert escape(first) in shown
    np.testing.assert_array_equal(drawn["training"], (series["env_steps"], series["return_mean"]))
    np.testing.assert_array_equal(drawn["evaluation"], ([1000.0], [120.5]))
    np.testing.assert_array_equal(drawn["target"], (series["env_steps"][[0, -1]], [150.0, 150.0]))
    assert (drawn["x_name"], drawn["y_name"]) == ("environment steps", "return")


def test_a_panel_before_the_first_episodes_end_says_so_instead_of_drawing_the_target_alone(tmp_path, monkeypatch):
    config = Config(run=RunConfig(target_return=150.0), telemetry=TelemetryConfig(period=1000.0, live=False))
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    cluster = FakeCluster()
    with Recorder(tmp_path, cluster.table, config, clock=lambda: cluster.now, monotonic=lambda: cluster.now):
        pass
    with Run(tmp_path) as run:
        series = run.series(points=300)
        series.columns["return_mean"][:] = np.nan
        monkeypatch.setattr(run, "series", lambda *_, **__: series)
        assert "no episode has ended yet" in panel_html(run)


def test_a_run_that_has_ended_shows_its_last_rates_and_no_guess_of_what_limits_it(tmp_path, monkeypatch):
    with Run(record(tmp_path / "a", seconds=5)) as run:
        series = run.series(points=300)
        series.columns["env_steps_per_s"][-2:] = 4321.0, np.nan
        series.columns["seconds_left"][-2:] = 54.0, np.nan
        monkeypatch.setattr(run, "series", lambda *_, **__: series)
        monkeypatch.setattr("ddrl.notebook.causes_of", lambda _: [Cause("unknown", "Not known yet")])
        shown = panel_html(run)
    assert f"<small>steps/s</small><br><b>{count_text(4321.0)}</b>" in shown
    assert "<small>left</small><br><b>-</b>" in shown
    assert "ended" in shown
    assert "Not known yet" not in shown


def test_the_panel_of_a_directory_that_is_no_run_says_so_and_a_command_to_it_is_answered_in_words(tmp_path):
    panel = Panel(tmp_path / "absent", period=1000.0)
    assert "there is no run directory" in panel._html.value
    panel.command("pause")
    assert "there is no run directory" in panel._said.value
    panel.close()


def test_each_button_of_the_panel_does_what_it_says(tmp_path):
    pytest.importorskip("torch", reason="needs the extra [train]")
    settings = {"env.num_envs": 2, "run.processes": 1, "run.max_seconds": ENDLESS, "run.max_env_steps": 10**9}
    settings |= {"evaluation.period": 300, "run.target_return": 1e6, "telemetry.period": 0.2}
    run = start(settings, root=tmp_path, wait=PATIENCE)
    panel = watch(run, period=0.1)
    buttons = {button.description: button for button in (*panel._buttons, panel._play)}

    def press(name, until):
        wait_until(lambda: not buttons[name].disabled, f"the button {name}")
        buttons[name].click()
        wait_until(until, f"{name}: {panel._said.value}")

    try:
        assert set(buttons) == {"Pause", "Resume", "Checkpoint", "Stop", "Set", "Play"}
        press("Pause", lambda: run.state == "paused")
        assert run.state == "paused"
        press("Resume", lambda: run.state == "running")
        press("Checkpoint", lambda: any((run.path / "checkpoints").iterdir()))
        panel._lr.value = 0.00123
        press("Set", lambda: "0.00123" in panel._said.value)
        wait_until((run.path / "policy.json").exists, "the first policy")
        press("Play", lambda: "<img" in panel._film.value)
        wait_until(lambda: panel._said.value.startswith("return "), "what the episode returned")
        assert panel._film.value.endswith(panel._said.value)
        panel._said.value = ""
        press("Play", lambda: panel._said.value.startswith("return "))  # as often as one likes
        wait_until(lambda: panel._html.value.count("<polyline") == 3, "training, evaluation, target")
        assert ">target<" in panel._html.value
        press("Stop", lambda: run.state == "ended")
        assert run.wait(PATIENCE) == "ended"
        with run.open() as tables:
            given = [fields["command"] for fields in tables.events(kinds=["command"])["fields"]]
        assert given == ["pause", "resume", "checkpoint", "set", "stop"]
    finally:
        run.stop()
        panel.close()
    panel.refresh()
    assert all(button.disabled for name, button in buttons.items() if name != "Play")
    assert "ended" in panel._html.value
    frame = run.frame("env_steps", points=None)
    assert list(frame.columns) == ["wall_seconds", "env_steps"]
    assert frame["env_steps"].dropna().is_monotonic_increasing
    policy = run.policy()
    state = np.zeros(4, np.float32)
    assert policy(state) == policy(state[None])[0] == policy.outputs(state)["q"].argmax()
    with pytest.raises(ValueError, match=r"shape \(3,\) is not \(4,\)"):
        policy(state[:3])
    assert len(run.evaluate(episodes=3).returns) == 3


def test_a_run_that_failed_shows_what_it_said_last(tmp_path):
    path = record(tmp_path / "a", seconds=5)
    (path / "status.json").write_text('{"state": "failed", "reason": "the environment raised"}')
    path.with_suffix(".log").write_text("first\nValueError: <bad> action\n")
    panel = Panel(path, period=1000.0)
    panel.close()
    assert "failed (the environment raised)" in panel._html.value
    assert "ValueError: &lt;bad&gt; action" in panel._html.value


def test_a_sketch_is_well_formed_and_leaves_out_what_is_not_a_number():
    x = 11 + np.arange(5.0)
    text = sketch([("a <b>", x, np.array([1.0, np.nan, 3.0, 4.0, np.nan])), ("b", x[:0], x[:0])], x_name="steps")
    lines = [element for element in ElementTree.fromstring(text) if element.tag == "polyline"]
    points = [tuple(map(float, point.split(","))) for point in lines[0].get("points").split()]
    assert len(points) == 3
    (left, low), (_, middle), (right, high) = points
    assert left < right
    assert low > middle > high, "pixels count from the top"
    labels = {element.text: element for element in ElementTree.fromstring(text) if element.tag == "text"}
    assert {"11", "14", "0", "2", "4", "steps", "a <b>"} <= set(labels)
    assert (labels["11"].get("text-anchor"), labels["14"].get("text-anchor")) == ("start", "end")
    assert float(labels["4"].get("y")) < float(labels["2"].get("y")) < float(labels["0"].get("y"))
    assert abs(float(labels["4"].get("y")) - high) < 5
    assert labels["a <b>"].get("fill") == lines[0].get("stroke")
    unknown = np.full(5, np.nan)
    assert "no episode" in sketch([("a", x, unknown)])
    assert "no episode" in sketch([("a", unknown, x)])
    ElementTree.fromstring(sketch([("flat", x, np.zeros(5))]))


def test_settings_reach_the_command_line_as_toml():
    values = ("CartPole-v1", 3, 1e-4, True, [64, 64], {"a": 1, "b c": [False]}, 'say "hi" \\ bye', float("inf"))
    import tomllib

    for value in values:
        assert tomllib.loads(f"v = {_toml(value)}")["v"] == value
    for scalar in (np.float32(0.5), np.float64(0.5), np.array([0.5])[0]):
        assert tomllib.loads(f"v = {_toml([scalar, np.int64(3)])}")["v"] == [0.5, 3]


def test_a_run_that_ends_at_once_gives_its_own_words(tmp_path):
    with pytest.raises(DdrlError, match=r"learner\.lrr"):
        start({"learner.lrr": 1.0}, root=tmp_path, wait=PATIENCE)
    with pytest.raises(ConfigError, match="ranks"):
        _mpirun(-1)
    record(tmp_path / "a", seconds=1)
    with pytest.raises(RunDirError, match="holds a run already"):
        start({"run.dir": str(tmp_path / "a")})


def test_a_run_whose_port_is_taken_says_which_setting_to_change(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(DdrlError, match=r"cannot listen on .*: set telemetry\.control_port = 0"):
            start(
                {"telemetry.control_port": other.getsockname()[1], "env.num_envs": 2, "run.max_seconds": 60.0},
                root=tmp_path,
                wait=PATIENCE,
            )


def test_the_reason_stands_above_what_mpirun_adds():
    said = (
        "starting\nddrl: there is no setting 'learner.lrr'\n-------\n"
        "prterun detected that one or more processes exited\n-------\n"
    )
    assert _reason(said) == "ddrl: there is no setting 'learner.lrr'"
    assert _reason("a\n\n") == "a"
    assert _reason("") == "it said nothing"


def test_a_run_started_from_a_plain_script_goes_on_stops_when_told_and_leaves_a_summary(tmp_path):
    script = (
        "import ddrl, json, sys\n"
        f"settings = {{'env.num_envs': 2, 'run.max_seconds': {ENDLESS}, 'run.max_env_steps': 10**9, "
        "'evaluation.period': 0}\n"
        f"run = ddrl.start(settings, root={str(tmp_path)!r})\n"
        "assert run.state == 'running', run.state\n"
        "state = run.stop()\n"
        "print(json.dumps([state, run.summary is not None, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["ended", True, False]

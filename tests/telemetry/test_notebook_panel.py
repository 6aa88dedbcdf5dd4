import itertools
import json
import re
import socket
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from html import escape
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("ipywidgets", reason="needs the extra [notebook]")
pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl.core.config import Config, LearnerConfig, RunConfig, TelemetryConfig
from ddrl.core.errors import ConfigError, DdrlError, RunDirError
from ddrl.core.roles import Evaluation, Returns
from ddrl.core.settings import config_to_toml
from ddrl.core.specs import ArraySpec
from ddrl.notebook import (
    Panel,
    Policy,
    StartedRun,
    _mpirun,
    _reason,
    _toml,
    learning_rate,
    panel_html,
    play,
    start,
    watch,
)
from ddrl.plots.runs import headline, sketch
from ddrl.telemetry import Recorder, Run, causes_of
from ddrl.telemetry.causes import Cause
from ddrl.telemetry.sinks import duration_text
from ddrl.telemetry.summary import facts_of
from tests.telemetry.fake_cluster import FakeCluster
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
    assert panel._period == 0.01
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
        first = causes_of(run)[0].sentence
        numbers = headline(facts_of(run), config.run.max_env_steps)
    shown_numbers = re.findall("<small>(.*?)</small><br><b>(.*?)</b><br><small>(.*?)</small>", shown)
    assert shown_numbers == numbers, "those of the dashboard's overview"
    assert ("Evaluation, last", "120.5") in [number[:2] for number in numbers]
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


def test_a_run_that_has_ended_shows_the_time_that_it_took_and_no_guess_of_what_limits_it(tmp_path, monkeypatch):
    monkeypatch.setattr("ddrl.notebook.causes_of", lambda _: [Cause("unknown", "Not known yet")])
    with Run(record(tmp_path / "a", seconds=5)) as run:
        shown = panel_html(run)
        assert f"<small>Time</small><br><b>{duration_text(facts_of(run).wall_seconds)}</b><br><small>ended" in shown
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
        panel._lr.value = 0.5  # typed, and not set
        with run.attach() as control:
            control.set("learner.lr", 5e-4)
        wait_until(lambda: panel._lr.value == 5e-4, "the rate that was set elsewhere")
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
        assert given == ["pause", "resume", "checkpoint", "set", "set", "stop"]
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
    for odd in (state[:3], state[:0], np.zeros((0, 4), np.float32), np.zeros((2, 3), np.float32)):
        with pytest.raises(ValueError, match=rf"shape {re.escape(str(odd.shape))} is not \(4,\), nor a batch of such"):
            policy(odd)
    assert len(run.evaluate(episodes=3).returns) == 3


def test_a_run_that_failed_shows_what_it_said_last(tmp_path):
    path = record(tmp_path / "a", seconds=5)
    (path / "status.json").write_text('{"state": "failed", "reason": "the environment raised"}')
    path.with_suffix(".log").write_text("".join(f"line {k}\n" for k in range(9)) + "ValueError: <bad> action\n")
    panel = Panel(path, period=1000.0)
    assert panel._lr.value == LearnerConfig.lr
    panel._lr.value = 0.125
    panel.refresh()
    assert panel._lr.value == 0.125, "what the user has typed stays until it is set"
    panel.close()
    assert "failed (the environment raised)" in panel._html.value
    said = panel._html.value.partition("<pre>")[2].partition("</pre>")[0].splitlines()
    assert said == [*(f"line {k}" for k in range(2, 9)), "ValueError: &lt;bad&gt; action"]


def test_the_panels_learning_rate_is_the_one_in_force(tmp_path):
    config = Config(telemetry=TelemetryConfig(period=1000.0, live=False))
    (tmp_path / "config.toml").write_text(config_to_toml(config))

    def given(name, value, ok=True):
        return "command", {"command": "set", "arguments": {"name": name, "value": value}, "ok": ok}

    with Recorder(tmp_path, FakeCluster().table, config) as recorder, Run(tmp_path) as run:
        for (kind, fields), rate in (
            (("start", {"live": {"lr": None}}), config.learner.lr),
            (given("rollout.epsilon", 0.5), config.learner.lr),
            (given("learner.lr", 0.125), 0.125),
            (given("learner.lr", 1), 1.0),
            (given("learner.lr", 2, ok=False), 1.0),
            (("command", {"command": "set", "arguments": 3, "ok": True}), 1.0),
            (("start", {"live": {"lr": 0.125}}), 0.125),
            (("start", {"live": {"lr": None}}), config.learner.lr),
        ):
            recorder.record_event(kind, "", **fields)
            wait_until(lambda rate=rate: learning_rate(run) == rate, f"{rate} after {kind} {fields}")


def test_a_started_run_says_what_its_directory_and_its_process_say(tmp_path, monkeypatch):
    path = record(tmp_path / "a", seconds=5)
    log = path.with_suffix(".log")
    log.write_text("one\ntwo\nthree\n")
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        run = StartedRun(path, log, process, under_mpirun=False)
        assert run.wait(0.01) in ("starting", "ending"), "its process lives"
        process.stdin.close()
        assert run.wait(PATIENCE) == "ended"
    assert run.last_words(2) == "two\nthree"
    monkeypatch.chdir(tmp_path)
    assert repr(run) == "<run a: ended>"
    assert StartedRun(tmp_path / "b", log, process, under_mpirun=False).state == "ended"
    frame = run.frame("updates", "env_steps", points=2)
    assert list(frame.columns) == ["wall_seconds", "updates", "env_steps"]
    with run.open() as tables:
        np.testing.assert_array_equal(frame["updates"], tables.series(["updates"], points=2)["updates"])
        assert len(frame) < len(tables.series(["updates"]))
        assert set(run.frame().columns) == set(tables.series().columns) - {"tick", "time"}


def test_episodes_and_seed_reach_those_who_play(tmp_path, monkeypatch):
    monkeypatch.setattr("ddrl.notebook.policy", lambda *_, **__: SimpleNamespace(saved="the policy"))
    played = []
    monkeypatch.setattr("ddrl.evaluate.record", lambda *given: played.append(given))
    monkeypatch.setattr("ddrl.evaluate.evaluate", lambda *given: played.append(given))
    film = play(tmp_path, episodes=2, seed=3)
    StartedRun(tmp_path, tmp_path, None, under_mpirun=False).evaluate(4, seed=5)
    assert played == [("the policy", film.path, 2, 3), ("the policy", 4, 5)]
    assert film.path == tmp_path / "agent.gif"


class Acting:
    """An acting policy that gives the sum of its input "a" and counts its episodes."""

    def __init__(self):
        self.q = np.zeros((2, 3))
        self.resets = 0

    def act(self, batch, vector):
        self.q[: len(batch)] = batch["a"].sum(1, keepdims=True) - batch["b"][:, None]
        return {"q": self.q[: len(batch)]}

    def greedy(self, batch, vector):
        return self.act(batch, vector)["q"].sum(1)

    def reset(self):
        self.resets += 1


def test_a_policy_takes_named_arrays_in_any_order_one_or_many_and_its_outputs_stay():
    acts = object.__new__(Policy)
    acts._acting = Acting()
    acts.saved = SimpleNamespace(vector=None)
    arrays = {"a": ArraySpec((2,), "float32"), "b": ArraySpec((), "float32")}
    acts.spec = SimpleNamespace(observation=ArraySpec.record(arrays))
    first = acts.outputs({"b": 1.0, "a": [1.0, 2.0]})["q"]
    many = acts.outputs({"b": [1.0, 0.0], "a": [[2.0, 2.0], [5.0, 0.0]]})["q"]
    assert acts({"b": 0.0, "a": [1.0, 1.0]}) == 6.0
    np.testing.assert_array_equal(first, [2.0, 2.0, 2.0])
    np.testing.assert_array_equal(many, [[3.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert acts({"b": [0.0, 1.0], "a": [[1.0, 1.0], [1.0, 1.0]]}).tolist() == [6.0, 3.0]
    acts.reset()
    assert acts._acting.resets == 1


def test_an_environment_that_fails_under_the_panel_is_said_and_the_button_can_be_pressed_again(tmp_path, monkeypatch):
    def fails(path):
        raise RuntimeError("no <screen>\nat all")

    monkeypatch.setattr("ddrl.notebook.play", fails)
    panel = Panel(record(tmp_path / "a", seconds=2), period=1000.0)
    for _ in range(2):
        panel._said.value = ""
        panel._play.click()
        panel._filming.join()
        assert panel._said.value.startswith("RuntimeError: no <screen>"), panel._said.value
        assert "\n" not in panel._said.value
    panel.close()


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


def test_settings_override_a_task_given_as_a_mapping_and_what_is_given_by_name_overrides_both(tmp_path, monkeypatch):
    commands = []

    def refused(command, **_):
        commands.append(command)
        raise OSError("no processes are left")

    monkeypatch.setattr("ddrl.notebook.subprocess.Popen", refused)
    task = {"learner.lr": 1e-3, "env.num_envs": 2, "env.id": "One-v0", "learner.network": "mlp"}
    settings = {"learner.lr": 5e-4, "env.id": "Two-v0"}
    with pytest.raises(RunDirError, match="no processes are left"):
        start(task, settings, env="Three-v0", root=tmp_path)
    words = commands[0]
    given = dict(word.split("=", 1) for option, word in itertools.pairwise(words) if option == "--set")
    assert given.pop("run.dir").startswith(str(tmp_path))
    assert given == {
        "learner.lr": "0.0005", "env.num_envs": "2", "env.id": '"Three-v0"', "learner.network": '"mlp"',
    }  # fmt: skip
    assert task["learner.lr"] == 1e-3


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
        f"run = ddrl.start(settings, root={str(tmp_path)!r}, wait={PATIENCE})\n"
        "assert run.state == 'running', run.state\n"
        "state = run.stop()\n"
        "print(json.dumps([state, run.summary is not None, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["ended", True, False]

"""What each page hands to its charts and tables, without a browser: the right figure at each place, the right column
under each name."""

import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from ddrl.admix.account import write_account
from ddrl.core.config import EnvConfig, ReplayConfig
from ddrl.core.metrics import COLUMNS
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import Recorder
from ddrl.telemetry.directory import HIDDEN, Notes, read_notes, write_notes
from ddrl.telemetry.summary import LEDGER
from tests.plots.accounts import small_account
from tests.pool.recorded import write_pool
from tests.sources import ROOT, environment
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import CONFIG, Feed, record_run
from tests.waiting import PATIENCE


def run_in_app(program, folder):
    """Run a program that opens the dashboard's script on the runs of a folder."""
    app = ROOT / "ddrl" / "dashboard" / "app.py"
    command = [sys.executable, "-c", program, str(app), str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


PAGES = """
import sys
import numpy as np
from streamlit.testing.v1 import AppTest
from ddrl.dashboard import drawing, watch
app, runs = sys.argv[1:]
sys.argv = [app, runs]
drawn = {}
drawing.draw = lambda place, figure, key, open_point: drawn.update({key: figure})

def page(name):
    drawn.clear()
    test = AppTest.from_file(app, default_timeout=600)
    test.session_state["wanted page"] = name
    test.run()
    assert not test.exception, test.exception
    return test

def titles():
    return {key: figure.layout.title.text for key, figure in drawn.items()}

page("distribution")
assert titles() == {
    "map": "Hosts: MB/s, versions behind, who waits",
    "sent": "MPI bytes sent by each relay",
    "received": "MPI bytes received by each relay",
    "flow": "Versions on their way",
    "bound": "Bytes a version against the bound",
    "sealed": "From publish to sealed",
    "ages": "Version age of every rollout",
}, titles()
page("devices")
assert titles() == {"cpu": "Cores in use", "memory": "Private memory"}, titles()
page("replay")
assert titles() == {
    "fill": "Replay: fill and age",
    "balance": "Samples per insert",
    "waits": "Who waits for whom",
    "time": "The trainer's time",
    "rates": "Recorded and learned from",
}, titles()
ledger = page("replay").dataframe[0].value
assert ledger.to_numpy().tolist() == [
    ["rows taken from lanes", "in all", 130],
    ["rows taken from lanes", "steps recorded", 100],
    ["rows taken from lanes", "ends of episodes recorded", 10],
    ["rows taken from lanes", "too old", 3],
    ["rows taken from lanes", "beyond the last step", 2],
    ["rows taken from lanes", "lost with a trainer", 14],
    ["rows taken from lanes", "dropped with a collector", 3],
    ["rows taken from lanes", "missing", -2],
    ["steps recorded", "in all", 100],
    ["steps recorded", "held", 60],
    ["steps recorded", "evicted, seen", 30],
    ["steps recorded", "evicted, unseen", 7],
    ["steps recorded", "missing", 3],
], ledger
(error,) = page("replay").error
assert error.value == "An account does not balance: rows taken from lanes, steps recorded.", error
page("replay")
levels = {line.name: line.y[0] for key in ("fill", "balance") for line in drawn[key].data}
assert levels["capacity"] == 100_000 and "asked for: 8" in levels, levels
page("overview")
assert titles()["return"] == "Return", titles()
assert titles()["env_steps_per_s"] == "Environment steps per second", titles()
assert titles()["arrival_lag_p99"] == "Age of experience on arrival, 99th percentile", titles()
ranks, events = page("ranks").dataframe
assert set(ranks.value["health"]) == {"reported"}, ranks.value  # at the run's last record, not by today's clock
assert (ranks.value["seconds silent"] < 1.0).all(), ranks.value
assert events.value["what"].tolist() == ["third", "second", "first"], events.value
assert events.value["kind"].tolist() == ["stop", "alarm", "note"], events.value
assert events.value["after [s]"].is_monotonic_decreasing, events.value
whole = watch.ranks_of
count = len(ranks.value)
health = np.array(["silent", "late", *["reported"] * (count - 2)])
watch.ranks_of = lambda run, latest: {**whole(run, latest), "health": health}
words = [one.value for one in page("ranks").warning]
assert any(text.startswith(f"2 of {count} ranks") for text in words), words
"""


ACCOUNTS = {
    "state": {
        "rows_taken": 130,
        "env_steps": 100,
        "rows_ended": 10,
        "rows_too_old": 3,
        "rows_beyond": 2,
        "rows_lost": 14,
        "rows_dropped": 3,
    },
    "popped": None,
    "held": 60,
    "evicted_seen": 30,
    "evicted_unseen": 7,
    "ended": False,
}


WAITING = """
import sys
from streamlit.testing.v1 import AppTest
from ddrl.dashboard import drawing
app, runs = sys.argv[1:]
sys.argv = [app, runs]
drawn = {}
drawing.draw = lambda place, figure, key, open_point: drawn.update({key: figure})
test = AppTest.from_file(app, default_timeout=600)
test.session_state["wanted page"] = "distribution"
test.run()
assert not test.exception, test.exception
assert [one.value for one in test.info] == ["No rank has reported where it is yet."], test.info
test = AppTest.from_file(app, default_timeout=600)
test.session_state["wanted page"] = "replay"
test.run()
assert not test.exception, test.exception
wanted = "What the run has counted cannot be read: it is damaged, or another version's."
assert wanted in [one.value for one in test.caption], test.caption
shares = {line.name: line.y[50] for line in drawn["priorities"].data}  # of the quarter with the highest priorities
assert {name: round(share, 6) for name, share in shares.items()} == {
    "exponent 0.5": 0.4, "uniform": 0.25, "proportional": round(16 / 30, 6),
}, shares
"""


ADMIX = """
import sys
from streamlit.testing.v1 import AppTest
app, runs = sys.argv[1:]
sys.argv = [app, runs]
test = AppTest.from_file(app, default_timeout=600)
test.session_state["wanted page"] = "admix"
test.run()
assert not test.exception, test.exception
(said,) = [one.value for one in test.markdown if "Score" in one.value]
assert said.startswith("**Score 0.850** over 2 held-out days"), said
"""


def test_the_score_of_ad_mixing_is_that_of_the_policy_where_another_rule_is_best(tmp_path):
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    run = tmp_path / "run"
    record_run(run, records=2, config=replace(CONFIG, env=EnvConfig(id="ddrl.admix:generated")))
    write_account(run, small_account())
    run_in_app(ADMIX, tmp_path)


def test_while_nobody_has_reported_nothing_is_said_of_how_many_hosts_there_are_or_of_damaged_accounts(tmp_path):
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    run = tmp_path / "run"
    run.mkdir()
    config = replace(CONFIG, replay=ReplayConfig(selector="prioritized", priority_exponent=0.5))
    (run / "config.toml").write_text(config_to_toml(config))
    with Recorder(run, lambda: np.full((12, len(COLUMNS)), np.nan), config) as recorder:  # which writes a last record
        recorder.record_snapshot(LEDGER, state="damaged")
        recorder.record_snapshot("replay", probabilities=np.array([0.1, 0.4, 0.3, 0.2]))  # of priorities 1, 16, 9, 4
    run_in_app(WAITING, tmp_path)


def test_every_figure_is_at_its_place_and_an_ended_run_is_judged_at_its_last_record(tmp_path):
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config_to_toml(CONFIG))
    feed = Feed(FakeCluster(12, 3), 20)
    with Recorder(run, feed, CONFIG, clock=feed.clock, monotonic=feed.clock) as recorder:
        assert feed.done.wait(PATIENCE)
        for kind, text in (("note", "first"), ("alarm", "second"), ("stop", "third")):
            feed.cluster.now += 1e-3
            recorder.record_event(kind, text)
        recorder.record_snapshot(LEDGER, **ACCOUNTS)
    run_in_app(PAGES, tmp_path)


ADDRESS = """
import sys
from streamlit.testing.v1 import AppTest
app, runs = sys.argv[1:]
sys.argv = [app, runs]

def opened(page, **words):
    test = AppTest.from_file(app, default_timeout=600)
    test.session_state["wanted page"] = page
    for name, value in words.items():
        test.query_params[name] = value
    test.run()
    assert not test.exception, test.exception
    return test

def looks(test):
    return test.sidebar.radio(key="x").value, test.sidebar.slider(key="smoothing").value, test.toggle(key="log").value

def written(test):
    return {name: "".join(value) for name, value in test.query_params.items()}

test = opened("overview")
assert looks(test) == ("env_steps", 0.0, False), looks(test)
assert written(test) == {"run": "run", "x": "env_steps", "smoothing": "0", "log": "0"}, test.query_params
alerts = [(one.type, one.value.split()[0]) for one in test.main if one.type in ("error", "warning")]
assert alerts == [("error", "fourth"), ("warning", "third"), ("warning", "second")], alerts
shared = {"run": "run", "x": "updates", "smoothing": "0.5", "log": "1"}
test = opened("overview", **shared)
assert looks(test) == ("updates", 0.5, True), looks(test)
assert written(test) == shared, test.query_params  # which whoever it is sent to opens again
test.toggle(key="log").set_value(False).run()
assert written(test) == {**shared, "log": "0"}, test.query_params
table = {"filter": "cart", "fold": "1", "hidden": "1"}
test = opened("runs", **shared, **table)
assert test.text_input(key="filter").value == "cart", test.text_input
assert (test.toggle(key="fold").value, test.toggle(key="hidden").value) == (True, True), test.toggle
assert written(test) == {**shared, **table}, test.query_params
"""


def test_what_is_chosen_is_in_the_address_and_taken_from_it_and_alerts_stand_newest_first(tmp_path):
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config_to_toml(CONFIG))
    feed = Feed(FakeCluster(12, 3), 3)
    with Recorder(run, feed, CONFIG, clock=feed.clock, monotonic=feed.clock) as recorder:
        assert feed.done.wait(PATIENCE)
        for level, word in (("error", "first"), ("warning", "second"), ("warning", "third"), ("error", "fourth")):
            feed.cluster.now += 1e-3
            recorder.record_event("alert", f"{level}: {word}", rule=word, level=level)
        recorder.record_event("error", "a rank has died")
    run_in_app(ADDRESS, tmp_path)


CHOSEN = """
import sys
from types import SimpleNamespace
import streamlit
from streamlit.testing.v1 import AppTest
from ddrl.dashboard import drawing
app, runs = sys.argv[1:]
sys.argv = [app, runs]
drawn = {}
drawing.draw = lambda place, figure, key, open_point: drawn.update({key: figure})

def page(name):
    test = AppTest.from_file(app, default_timeout=600)
    test.session_state["wanted page"] = name
    test.run()
    assert not test.exception, test.exception
    return test

captions = [one.value for one in page("pool").caption]
words = "the task of that row often finds the device with the task of that column."
assert any(words in text for text in captions), captions
(diamond,) = [trace for trace in drawn["tasks"].data if trace.marker.symbol == "diamond"]
assert diamond.x == (3,), diamond.x
assert 0.5 < diamond.y[0] <= 1.0, diamond.y
frames = []

def dataframe(frame, **_):
    frames.append(frame)
    return SimpleNamespace(selection=SimpleNamespace(rows=[0]))  # a click on the first row

streamlit.dataframe = dataframe
test = page("runs")
test.text_input(key="filter").input("first").run()  # so the first row that is shown is not the first of all
(hide,) = [button for button in test.button if button.label == "Hide the chosen runs"]
hide.click().run()
assert not test.exception, test.exception
assert frames[-1].empty
test.toggle(key="hidden").set_value(True).run()
assert list(frames[-1]["tags"]) == ["good, old, hidden"], frames[-1]["tags"]
"""


def test_a_pool_stands_at_its_number_of_tasks_and_a_run_that_is_hidden_keeps_its_notes(tmp_path):
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    write_pool(tmp_path / "morning", tasks=3, devices=("cpu:0", "cpu:1"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config_to_toml(CONFIG))
    with Recorder(run, lambda: np.full((12, len(COLUMNS)), np.nan), CONFIG):
        pass
    others = [tmp_path / name for name in ("another", "test")]
    for other in others:
        shutil.copytree(run, other)
    write_notes(run, Notes("first", ("good", "old"), "a note"))
    run_in_app(CHOSEN, tmp_path)
    assert read_notes(run) == Notes("first", ("good", "old", HIDDEN), "a note")
    assert not any(HIDDEN in read_notes(other).tags for other in others)

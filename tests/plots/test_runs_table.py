"""The table of all runs, and what is folded of it, against values computed by hand."""

import json
import math
import os
import subprocess
import sys
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from ddrl import plots
from ddrl.core.errors import RunDirError
from ddrl.core.metrics import COLUMNS
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import Recorder, summary
from ddrl.telemetry.directory import HIDDEN, Notes, read_notes, read_settings, write_notes
from ddrl.telemetry.series import Event
from ddrl.telemetry.store import Store
from ddrl.telemetry.summary import Facts, facts_at, facts_of, list_facts
from tests.sources import ROOT, environment
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import CONFIG, Feed, record_run
from tests.waiting import PATIENCE

NAN = math.nan
SETTINGS = {
    "a": {"run": {"seed": 1, "dir": "a"}, "env": {"id": "Small-v0"}, "learner": {"lr": 0.001, "hidden": [64]}},
    "b": {"run": {"seed": 2, "dir": "b"}, "env": {"id": "Small-v0"}, "learner": {"lr": 0.001, "hidden": [64]}},
    "pool/c": {"run": {"seed": 1, "dir": "c"}, "env": {"id": "Small-v0"}, "learner": {"lr": 0.1, "hidden": [64]}},
}
FACTS = {
    "a": Facts(
        "a",
        "a",
        "ended",
        "goal\nmore",
        "Small-v0",
        3,
        9.0,
        7.0,
        8.0,
        1e4,
        label="first",
        tags=("good", "old"),
        note="a note",
    ),
    "b": Facts("b", "b", "running", task="Small-v0", best=5.0, last=5.0, wall_seconds=120.0),
    "pool/c": Facts("c", "c", "failed", task="Small-v0", best=1.0),
}


def test_a_run_is_a_row_with_what_it_reached_and_then_only_settings_that_differ():
    table = plots.runs_table(FACTS, SETTINGS)
    assert list(table)[:4] == ["run", "name", "tags", "state"]
    assert list(table)[-2:] == ["learner.lr", "run.seed"]
    assert table["run"] == ["a", "b", "pool/c"]
    assert table["tags"] == ["good, old", "", ""]
    assert table["reason"] == ["goal", "", ""]
    assert table["best return"] == [9.0, 5.0, 1.0]
    assert table["last return"][:2] == [7.0, 5.0]
    assert table["confirmed return"][0] == 8.0
    assert table["time [min]"][1] == 2.0
    assert table["learner.lr"] == ["0.001", "0.001", "0.1"]
    assert table["note"] == ["a note", "", ""]


def test_a_run_without_readable_settings_has_a_row_too():
    table = plots.runs_table(FACTS, {name: SETTINGS[name] for name in ("a", "pool/c")})
    assert table["learner.lr"] == ["0.001", "-", "0.1"]
    assert "learner.lr" not in plots.runs_table({"a": FACTS["a"]}, {"a": SETTINGS["a"]})


def test_seeds_are_folded_to_the_interquartile_mean_and_its_interval():
    labels = plots.differing_labels(SETTINGS)
    table = plots.folded_runs(FACTS, labels)
    assert table["settings"] == ["learner.lr=0.001", "learner.lr=0.1"]
    assert table["runs"] == [2, 1]
    assert table["best return"] == [7.0, 1.0]
    assert table["best, 95 %"] == ["5.0 to 9.0", "-"]


def test_runs_of_two_tasks_are_two_groups_whatever_their_settings_are_called():
    facts = {"a": Facts("a", "a", "ended", task="A-v0", best=1.0), "b": Facts("b", "b", "ended", task="B-v0", best=3.0)}
    table = plots.folded_runs(facts, {"a": "all seeds", "b": "all seeds"})
    assert (table["task"], table["runs"], table["best return"]) == (["A-v0", "B-v0"], [1, 1], [1.0, 3.0])


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([3.0], 3.0),
        ([1.0, 3.0], 2.0),
        ([0.0, 1.0, 2.0, 100.0], 1.5),
        ([0.0, 10.0, 1000.0], 0 / 6 + 10 * 4 / 6 + 1000 / 6),
        ([NAN, 4.0], 4.0),
    ],
)
def test_the_interquartile_mean_weighs_each_run_by_its_part_of_the_middle_half(values, mean):
    assert plots.interquartile(np.array(values))[0] == pytest.approx(mean)


def test_no_number_has_no_mean_and_the_interval_holds_the_mean_of_a_normal_sample():
    assert all(map(math.isnan, plots.interquartile(np.array([NAN]))))
    mean, low, high = plots.interquartile(np.random.default_rng(1).normal(10.0, 2.0, 40))
    assert low < mean < high
    assert 0.8 < high - low < 2.2  # 2 * 1.96 * 2 / sqrt(40) = 1.2 for the mean; the middle half's varies a little more
    # Of a uniform sample its variance is 1 / (6 n): a value counts by twice its distance from the middle, at most 0.5.
    _, low, high = plots.interquartile(np.linspace(0, 1, 2001))
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(6 * 2001), rel=0.05)  # at 90 % it would be 0.84 of that


def test_a_filter_wants_all_of_its_words_anywhere_in_the_row():
    row = ["runs/a", "failed", 0.001]
    assert plots.matches(row, "FAIL 0.001")
    assert plots.matches(row, "")
    assert not plots.matches(row, "failed 0.002")


PAGE = """
import sys
from types import SimpleNamespace
import streamlit
from streamlit.testing.v1 import AppTest
app, runs = sys.argv[1:]
sys.argv = [app, runs]
test = AppTest.from_file(app, default_timeout=600)
test.session_state["wanted page"] = "runs"
test.query_params["filter"] = "two"
test.run()
assert not test.exception, test.exception
(table,) = test.dataframe
assert table.value["run"].tolist() == ["folder/two"], table.value
assert test.caption[0].value.startswith("1 of 4 runs."), test.caption[0].value  # the hidden one is counted
real = streamlit.dataframe
streamlit.dataframe = lambda *given, **how: SimpleNamespace(selection=SimpleNamespace(rows=[0]))  # a click on the row
test.run()
(compare,) = (button for button in test.button if button.label == "Compare the chosen runs (1)")
compare.click().run()
assert test.session_state["names"] == ["folder/two"], test.session_state["names"]
streamlit.dataframe = real
test.session_state["wanted page"] = "runs"
test.run()
test.text_input(key="filter").set_value("").run()
assert sorted(test.dataframe[0].value["run"]) == ["folder/two", "one", "silent"], test.dataframe[0].value
test.toggle(key="hidden").set_value(True).run()
table = test.dataframe[0].value.set_index("run")
assert table["name"]["three"] == "third", table
assert test.query_params["hidden"] in ("1", ["1"]), test.query_params
test.toggle(key="fold").set_value(True).run()
assert not test.exception, test.exception
assert test.dataframe[0].value["runs"].sum() == 4, test.dataframe[0].value
said = []
for page in ("overview", "ranks"):
    test.session_state["wanted names"] = ["silent"]
    test.session_state["wanted page"] = page
    test.run()
    assert not test.exception, test.exception
    said += [caption.value for caption in test.caption]
assert len(said) >= 9, said
assert not [text for text in said if text.startswith("-")], said  # a list, to markdown
assert "No rank has reported yet." in said, said
"""


def test_the_page_filters_hides_and_names_runs_and_its_address_says_so(tmp_path):
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    for name in ("one", "folder/two", "three"):
        (tmp_path / name).mkdir(parents=True)
        record_run(tmp_path / name, records=2)
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "config.toml").write_text(config_to_toml(CONFIG))
    with Recorder(tmp_path / "silent", lambda: np.full((2, len(COLUMNS)), NAN), CONFIG):
        pass  # which writes a last record
    write_notes(tmp_path / "three", Notes("third", (HIDDEN,), "*no* markdown"))
    assert read_notes(tmp_path / "three") == Notes("third", (HIDDEN,), "*no* markdown")
    app = ROOT / "ddrl" / "dashboard" / "app.py"
    command = [sys.executable, "-c", PAGE, str(app), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


WALK = """
import sys
from streamlit.testing.v1 import AppTest
app, runs, *pages = sys.argv[1:]
sys.argv = [app, runs]
seen = ""
for page in pages:
    test = AppTest.from_file(app, default_timeout=600)
    test.session_state["wanted page"] = page
    test.run()
    for toggle in test.toggle:
        if "CSV" in toggle.label:
            toggle.set_value(True).run()
    assert not test.exception, (page, test.exception)
    kinds = (test.markdown, test.caption, test.error, test.warning, test.info, test.button, test.subheader)
    said = [getattr(one, "label", None) or str(one.value) for kind in kinds for one in kind]
    said += [one.proto.label for one in test.get("download_button")]
    for text in said:
        assert "](" not in text.replace("\\\\]", ""), (page, text)
        assert "://stranger" not in text, (page, text)
        assert "<a" not in text.replace("\\\\<", ""), (page, text)
    seen += page * any("stranger" in text for text in said)
print(seen)
"""


def test_what_a_run_a_pool_and_an_event_say_is_text_on_every_page(tmp_path):
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    said = "![x](http://stranger.invalid/x.png) <a href='http://stranger.invalid'>y</a> :red[z] \x1b[31m"
    record_run(tmp_path / "good", records=2)
    bad = tmp_path / (said.replace("/", "-") + os.fsdecode(b"\xff"))
    bad.mkdir()
    feed = Feed(FakeCluster(), 3)
    (bad / "config.toml").write_text(config_to_toml(CONFIG))
    with Recorder(bad, feed, CONFIG, clock=feed.clock, monotonic=feed.clock) as recorder:
        assert feed.done.wait(PATIENCE)
        recorder.record_snapshot("values", steps=[said, 2], predicted="no", returns={})
        for kind in ("plan", "alert", "alarm", "error"):
            recorder.record_event(kind, said, level=said, rule=said, traceback=said)
    os.utime(bad / "config.toml", (2e9, 2e9))  # the newest, which every page shows
    with (bad / "agent.gif").open("wb") as film:
        film.truncate(1 << 35)
    write_notes(bad, Notes(said, (said,), said))
    (bad / "summary.json").write_text("[1]")
    own = bad / "pool"
    own.mkdir()
    task = {"name": said, "file": said, "directory": said}
    plan = {"directory": said, "devices": ",".join([said] * 12), "policy": said, "tasks": [task]}
    (own / "plan.json").write_text(json.dumps(plan))
    app = ROOT / "ddrl" / "dashboard" / "app.py"
    pages = [path.stem.partition("_")[2] for path in sorted((app.parent / "subjects").glob("*.py"))]
    command = [sys.executable, "-c", WALK, str(app), str(tmp_path), *pages]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert all(page in done.stdout for page in ("overview", "ranks", "pool")), done.stdout


def test_notes_that_are_damaged_are_none_and_too_long_ones_are_refused(tmp_path):
    (tmp_path / "notes.json").write_text('{"name": 3')
    assert read_notes(tmp_path) == Notes()
    with pytest.raises(RunDirError, match="at most"):
        write_notes(tmp_path, Notes(note="x" * 10**7))


@pytest.mark.parametrize(
    "text",
    [
        '[a]\nb = 1\n[a.c]\nd = 2\n[e]\nf = """\n[a]\nb = 3\n"""\n',
        "[a]\nb = [\n[1],\n[2]]\n",
        "[c]\nd = 1\n[a]\n[b]\n[b.c.d]\ne = 1\n[b.c]\nf = 2\n",
        "[a]\n[[a.b]]\nc = 1\n[[a.b]]\nc = 2\n",
    ],
)
def test_settings_that_are_parsed_table_by_table_are_those_of_the_whole_file(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert read_settings(file) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text", ["[a]\nb = 1\n[a]\nb = 2\n", "a = 1\n[a]\nb = 1\n", "[a\n", "a = 1\n", "[[a]]\nb = 1\n"]
)
def test_settings_that_are_no_toml_are_refused_as_before(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(RunDirError, match="no file of settings"):
        read_settings(file)


def test_a_table_of_runs_that_are_over_opens_no_database_and_says_the_same(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    record_run(tmp_path / "one", records=4)
    with summary.Run(tmp_path / "one") as run:
        read = facts_of(run)
    assert read.env_steps > 0
    write_notes(tmp_path / "one", Notes("first"))
    (tmp_path / "one").rename(tmp_path / "two")
    monkeypatch.delattr(summary, "Run")
    (kept,) = list_facts(tmp_path)
    assert (kept.path, kept.name, kept.label, kept.state) == (str(tmp_path / "two"), "two", "first", "ended")
    assert repr(replace(kept, path=read.path, name=read.name, label="")) == repr(read)
    brief = facts_at(tmp_path / "two", ["env_steps", "stranger"])
    assert repr(brief.newest) == repr({"env_steps": read.env_steps, "stranger": NAN})


@pytest.mark.parametrize(
    "status",
    [
        {"state": "running", "host": "elsewhere"},
        {"figures": {}},
        {"figures": {"size": 0}},
        {"figures.newest": [1]},
        {"figures.best": "9"},
        {"figures.best": {}},
        {"figures.path": "elsewhere"},
        {"figures.stranger": 1.0},
    ],
)
def test_figures_beside_a_database_count_only_while_they_are_whole_and_its_own(tmp_path, monkeypatch, status):
    record_run(tmp_path / "one", records=4)
    file = tmp_path / "one" / "status.json"
    document = json.loads(file.read_text())
    document["figures"]["best"] = 7.0  # which the database does not say
    file.write_text(json.dumps(document))
    assert facts_at(tmp_path / "one").best == 7.0
    for name, value in status.items():
        outer, _, inner = name.partition(".")
        document[outer] = {**document[outer], inner: value} if inner else value
    file.write_text(json.dumps(document))
    assert math.isnan(facts_at(tmp_path / "one").best)
    assert facts_at(tmp_path / "one").env_steps > 0


ALERTS = """
import sys
from ddrl.dashboard import watch
from ddrl.telemetry import Run
for level, text in watch.alerts_of(Run(sys.argv[1])):
    print(level, text, sep=": ")
"""


def test_the_newest_alerts_of_a_run_are_shown_the_newest_first(tmp_path):
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    store = Store(tmp_path)
    for number in range(5):
        level = ("warning", "error")[number % 2]
        store.event(Event(0.0, 60.0 * number, "alert", f"{level}: number {number}", {"level": level}))
    store.close()
    command = [sys.executable, "-c", ALERTS, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.splitlines() == [
        "warning: number 4 (4m00s into the run)",
        "error: number 3 (3m00s into the run)",
        "warning: number 2 (2m00s into the run)",
    ]

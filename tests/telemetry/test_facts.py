"""Figures of a run against values computed by hand from a small store."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from ddrl import __version__
from ddrl.core.config import Config, EnvConfig, TelemetryConfig
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Evaluation as Judged
from ddrl.core.roles import Returns, Role
from ddrl.core.settings import config_to_toml
from ddrl.run.cli import parse
from ddrl.telemetry import Recorder, Run, reading
from ddrl.telemetry import summary as runs
from ddrl.telemetry.directory import find_runs
from ddrl.telemetry.summary import BRIEF, facts_at, facts_of
from tests.sources import environment
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import CONFIG, Feed, record_run
from tests.waiting import PATIENCE, wait_until

RETURNS = [1.0, 50.0, *[2.0] * 40, 7.0]  # the best one is the second of many


def store(path, *, state="running", returns=RETURNS, seconds=20):
    """A run that takes 100 steps and makes 10 updates a second, and nothing in its last ten seconds."""
    path.mkdir(parents=True)
    config = Config(env=EnvConfig(id="Small-v0"), telemetry=TelemetryConfig(period=0.001, live=False))
    (path / "config.toml").write_text(config_to_toml(config))
    table = np.full((2, len(COLUMNS)), np.nan)
    for place, role in enumerate((Role.TRAINER, Role.ROLLOUT)):
        for name, value in (("rank", place), ("role", list(Role).index(role)), ("host", 0)):
            table[place, COLUMNS.index(name)] = value
    ticks = iter(range(seconds + 1))
    now = [0.0]
    done = threading.Event()

    def tables():
        tick = next(ticks, None)
        if tick is None:
            done.set()
            return table
        now[0] = float(tick)
        table[:, COLUMNS.index("env_steps")] = 100.0 * min(tick, 10)
        table[0, COLUMNS.index("updates")] = 10.0 * min(tick, 10)
        return table.copy()

    recorder = Recorder(path, tables, config, clock=lambda: 1000.0 + now[0], monotonic=lambda: 1000.0 + now[0])
    assert done.wait(PATIENCE)
    for number, value in enumerate(returns):
        recorder.record_evaluation(Judged(number, 10 * number, Returns(value, 1.0, 5)), updates=number)
    if state == "failed":
        recorder.record_event("error", "rank 1 was killed\nTraceback: ...")
    if state != "running":
        recorder.close()
        return path
    with Run(path) as run:
        wait_until(lambda: len(run.evaluations()) == len(returns), "every evaluation in the store")
    return path, recorder


def test_figures_are_those_of_all_records(tmp_path):
    path = store(tmp_path / "small", state="ended")
    (path / "summary.json").write_text(json.dumps({"best": {"mean": 50.0, "confirmed": {"mean": 41.5}}}))
    facts = facts_at(path)
    assert (facts.state, facts.task, facts.name) == ("ended", "Small-v0", "small")
    assert (facts.best, facts.last, facts.confirmed, facts.evaluations) == (50.0, 7.0, 41.5, 43)
    assert (facts.env_steps, facts.updates) == (1000.0, 100.0)
    assert facts.wall_seconds == 20.0
    assert facts.env_steps_per_s == 50.0  # over all of it; its last seconds took none
    assert facts.updates_per_s == 5.0
    assert math.isnan(facts.seconds_left)


def test_a_run_at_work_has_the_speed_of_its_last_seconds(tmp_path):
    path, recorder = store(tmp_path / "small", seconds=8)
    with recorder, Run(path) as run:
        facts = facts_of(run)
    assert facts.state == "running"
    assert facts.env_steps_per_s == pytest.approx(100.0, rel=0.3)
    assert math.isnan(facts.confirmed)
    path, recorder = store(tmp_path / "slower")  # nothing in its last ten seconds
    with recorder, Run(path) as run:
        assert facts_of(run).env_steps_per_s == facts_of(run).updates_per_s == 0.0


def test_an_evaluation_that_is_no_number_is_no_best(tmp_path):
    facts = facts_at(store(tmp_path / "small", state="ended", returns=[math.nan, 3.0, -1.0]))
    assert (facts.best, facts.last) == (3.0, -1.0)
    alone = facts_at(store(tmp_path / "none", state="ended", returns=[]))
    assert math.isnan(alone.best)
    assert alone.evaluations == 0


def without_figures(path):
    """Leave what status.json keeps of the end away, as an earlier ddrl did."""
    file = path / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "figures": {}}))


@pytest.mark.parametrize("kind", ["ended", "failed", "no evaluation", "no record", "resumed", "set aside", "killed"])
def test_a_run_has_the_same_figures_by_what_it_left_beside_its_store_and_by_the_store(tmp_path, kind):
    path = tmp_path / "run"
    if kind == "killed":  # nothing was left
        cluster = FakeCluster()
        feed = Feed(cluster, 5)
        path.mkdir()
        (path / "config.toml").write_text(config_to_toml(CONFIG))
        with Recorder(path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock):
            assert feed.done.wait(PATIENCE)
            wait_until(lambda: (path / "telemetry.sqlite").exists() and Run(path).cursor >= 5, "five records")
            shutil.copytree(path, tmp_path / "copy")
        path = tmp_path / "copy"
        status = json.loads((path / "status.json").read_text())
        (path / "status.json").write_text(json.dumps({**status, "pid": 2**22 + 1, "pid_started": 1.0}))
    elif kind in ("resumed", "set aside"):
        record_run(path, records=8)
        if kind == "set aside":
            (path / "telemetry.sqlite").write_bytes(b"no database" * 100)
        record_run(path, records=5, base={"env_steps": 100.0, "updates": 7.0, "wall_seconds": 20.0})
    else:
        returns = [] if kind == "no evaluation" else [math.nan, *RETURNS, math.nan]
        store(
            path,
            state="failed" if kind == "failed" else "ended",
            returns=returns,
            seconds=-1 if kind == "no record" else 20,
        )
    kept = facts_at(path)
    brief = facts_at(path, ["env_steps", "updates"])
    assert kept.state == {"failed": "failed", "killed": "dead"}.get(kind, "ended")
    without_figures(path)
    assert repr(facts_at(path)) == repr(kept)  # NaN is not equal to itself
    assert repr(facts_at(path, ["env_steps", "updates"])) == repr(brief)
    with Run(path) as run:
        assert repr(facts_of(run)) == repr(kept)


def test_the_store_of_an_older_run_is_asked_few_times(tmp_path, monkeypatch):
    """Of a folder of thousands of runs it is the statements that take the time: there were fifteen."""
    path = store(tmp_path / "small", state="ended")
    without_figures(path)
    asked: list[str] = []

    def counted(file):
        db = open_unchanged(file)
        db.set_trace_callback(asked.append)
        return db

    open_unchanged = reading._open_unchanged
    monkeypatch.setattr(reading, "_open_unchanged", counted)
    assert facts_at(path, BRIEF).best == 50.0
    assert 0 < len(asked) <= 8


def test_the_table_has_a_line_a_run_and_json_has_no_nan(tmp_path, capsys):
    store(tmp_path / "runs" / "first", state="ended")
    store(tmp_path / "runs" / "second", state="failed", returns=[])
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "telemetry.sqlite").write_bytes(b"no database" * 100)
    assert runs.main([str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "state", "task", "best"]
    by_name = {line.split()[0]: line for line in lines[1:]}
    assert by_name["first"].split()[1:6] == ["ended", "Small-v0", "50.0", "7.0", "-"]
    assert by_name["second"].endswith("rank 1 was killed")
    assert "cannot be read" in by_name["broken"]
    assert runs.main([str(tmp_path / "runs"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert {row["name"]: row["best"] for row in listed} == {"first": 50.0, "second": None, "broken": None}


def test_a_run_of_an_experiment_is_named_by_its_place_in_the_folder(tmp_path, capsys):
    for folder in ("one", "two"):
        store(tmp_path / folder / "seed 1", state="ended", seconds=2, returns=[])
    assert runs.main([str(tmp_path)]) == 0
    listed = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(listed) == ["one/seed 1", "two/seed 1"]


def test_everything_about_one_run(tmp_path, capsys):
    path, recorder = store(tmp_path / "small", seconds=8)
    with recorder:
        recorder.record_event("note", "hello")
        recorder.record_event("checkpoint", "saved")
        assert runs.main([str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert found["best"] == 50.0
        assert found["settings"]["env"]["id"] == "Small-v0"
        assert found["limits"][0].keys() == {"kind", "sentence", "share", "rank", "remedy"}
        assert runs.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "limit" in text
    assert "Small-v0" in text


def test_names_that_the_terminal_has_no_letters_for_are_escaped(tmp_path):
    store(tmp_path / "Läufe" / os.fsdecode(b"\xc3\xa4\xff"), state="failed")
    for words in (["Läufe"], ["Läufe", "--json"], [os.fsdecode(b"L\xc3\xa4ufe/\xc3\xa4\xff")]):
        done = subprocess.run(
            [sys.executable, "-m", "ddrl.runs", *words],
            cwd=tmp_path,
            env=environment() | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"Small-v0" in done.stdout


def test_a_run_that_this_user_may_not_enter_hides_no_others(capsys):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        store(folder / "mine", state="ended")
        store(folder / "another's", state="ended")
        (folder / "another's").chmod(0)
        try:
            if os.geteuid() == 0:  # who may enter all
                os.seteuid(54_321)
            assert [path.name for path in find_runs(folder)] == ["mine"]
            assert runs.main([str(folder / "another's")]) == 1
        finally:
            os.seteuid(os.getuid())
            (folder / "another's").chmod(0o755)
    assert "another's cannot be read by this user" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_said_in_one_line(tmp_path, capsys):
    assert runs.main([str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "file").touch()
    assert runs.main([str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'file'} is a file: name a run, or a folder of runs\n"
    (tmp_path / "empty").mkdir()
    assert runs.main([str(tmp_path / "empty")]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_commands_say_their_version(capsys):
    for command in (runs.main, parse):
        with pytest.raises(SystemExit) as end:
            command(["--version"])
        assert end.value.code == 0
        assert capsys.readouterr().out == f"ddrl {__version__}\n"

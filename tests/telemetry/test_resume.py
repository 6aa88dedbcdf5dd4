import contextlib
import json
import os
import sqlite3

import numpy as np
import pytest

from ddrl.core.config import Config
from ddrl.core.errors import RunDirError
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Evaluation as Judged
from ddrl.core.roles import Returns
from ddrl.telemetry import Recorder, Run
from ddrl.telemetry.series import SERIES, SeriesWindow
from ddrl.telemetry.store import FANOUT
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import CONFIG, Feed, record_run
from tests.waiting import PATIENCE


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path):
    record_run(tmp_path, records=10)
    with Run(tmp_path) as run:
        first = run.series()
        cursor = run.cursor
    totals = {"env_steps": float(first["env_steps"][-1]), "updates": float(first["updates"][-1])}
    record_run(tmp_path, records=10, base={**totals, "wall_seconds": 100.0})
    with Run(tmp_path) as run:
        whole, later = run.series(), run.series(since=cursor)
        assert len(run.events(kinds=["resume"])) == 0, "nothing was cut"
    assert np.array_equal(whole["tick"], np.arange(len(whole)))
    assert len(whole) == len(first) + len(later)
    assert later["wall_seconds"][0] >= 100
    for series in SERIES:
        recorded = np.isfinite(first[series.name]).any()  # nobody reports those of nodes here
        if series.kind == "total" and series.name != "rows_dropped" and recorded:
            assert np.all(np.diff(whole[series.name]) >= 0), series.name
            assert whole[series.name][-1] > first[series.name][-1] or series.name == "checksum_failures", series.name


def test_what_came_after_the_checkpoint_that_a_run_resumes_at_is_cut(tmp_path):
    record_run(tmp_path, records=100)
    with Run(tmp_path) as run:
        first = run.series()
    feed = Feed(FakeCluster(), 1)
    with Recorder(tmp_path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock) as recorder:
        for wall, steps in ((30.0, 1e4), (70.0, 1e9)):
            recorder.steps = lambda steps=steps: steps
            recorder.record_evaluation(Judged(0, int(steps), Returns(wall, 1.0, 20)), updates=1)
            recorder.record_event("note", f"after {wall:g} s")
            recorder.record_event("checkpoint", f"at {steps:g} steps", env_steps=steps)
        recorder.record_event("checkpoint", "at 20000 steps", env_steps=2e4)
    checkpoint = {name: float(first[name][50]) for name in ("env_steps", "updates", "wall_seconds")}
    record_run(tmp_path, records=30, base=checkpoint)
    with Run(tmp_path) as run:
        whole, coarse = run.series(), run.series(points=20)
        assert run.evaluations()["mean"].tolist() == [30.0]
        notes = run.events()
        frames = run.processes()
    assert np.array_equal(whole["tick"], np.arange(len(whole)))
    assert np.array_equal(whole["env_steps"][:51], first["env_steps"][:51])
    for table in (whole, coarse):
        for name in ("wall_seconds", "env_steps", "updates", "episodes", "samples"):
            assert np.all(np.diff(table[name]) >= 0), name
    assert whole["env_steps"][51] < first["env_steps"][-1], "the other course is gone"
    assert np.all(np.diff(frames.wall_seconds) >= 0)
    assert [text for text in notes["text"] if text.startswith("after")] == ["after 30 s"]
    assert [text for text in notes["text"] if text.startswith("at")] == ["at 10000 steps", "at 20000 steps"]
    assert "1 evaluations and 2 events after it" in notes["text"][list(notes["kind"]).index("resume")]
    with contextlib.closing(sqlite3.connect(tmp_path / "telemetry.sqlite")) as db:
        kept = [json.loads(row) for (row,) in db.execute("SELECT row FROM abandoned ORDER BY kind")]
    assert [row.get("mean", row.get("text")) for row in kept] == [70.0, "after 70 s", "at 1e+09 steps"]


def test_no_coarse_row_reaches_beyond_the_checkpoint_that_a_run_resumes_at(tmp_path):
    """Until later records have completed it: whoever reads the file finds no steps in it that were given up."""
    record_run(tmp_path, records=300)
    with Run(tmp_path) as run:
        first = run.series()
    record_run(tmp_path, 2, base={name: float(first[name][130]) for name in ("env_steps", "updates", "wall_seconds")})
    with contextlib.closing(sqlite3.connect(tmp_path / "telemetry.sqlite")) as db:
        rows = db.execute("SELECT level, tick FROM series").fetchall()
    records = max(tick for level, tick in rows if level == 0) + 1
    assert records > 131
    assert {level for level, _ in rows} >= {0, 1, 2, 3}
    assert max(tick + FANOUT**level for level, tick in rows) == records


@pytest.mark.parametrize(("hours", "way"), [(1.0, "forward"), (-1.0, "back")])
def test_a_clock_that_is_set_changes_no_duration_and_gives_nothing_up(tmp_path, hours, way):
    feed = Feed(FakeCluster(), 60)
    set_at = feed.clock() + 30

    def clock():
        return feed.clock() + (3600 * hours if feed.clock() > set_at else 0.0)

    with Recorder(tmp_path, feed, CONFIG, clock=clock, monotonic=feed.clock) as recorder:
        assert feed.done.wait(PATIENCE)
        recorder.record_event("note", "after it")
    with Run(tmp_path) as run:
        first = run.series()
        said = [text for text in run.events()["text"] if "the clock of the trainer's machine was set" in text]
    assert len(said) == 1
    assert f"was set {way} by 3600 s" in said[0]
    assert np.all(np.diff(first["wall_seconds"]) <= 1.001)
    assert first["wall_seconds"][-1] < 61
    speeds = first["env_steps_per_s"][5:]
    assert np.all((speeds > 5_000) & (speeds < 15_000))
    checkpoint = {name: float(first[name][-1]) for name in ("env_steps", "updates", "wall_seconds")}
    record_run(tmp_path, records=10, base=checkpoint)
    with Run(tmp_path) as run:
        assert len(run.series()) > len(first)
        assert not any("given up" in text for text in run.events()["text"])
        assert "after it" in run.events()["text"]


@pytest.mark.parametrize("damage", ["pages", "head", "layout", "program", "schema", "meta", "number"])
def test_telemetry_that_cannot_be_gone_on_with_is_set_aside_and_the_resume_goes_on(tmp_path, damage):
    record_run(tmp_path, records=50)
    file = tmp_path / "telemetry.sqlite"
    if damage in ("pages", "head"):
        data = bytearray(file.read_bytes())
        begin, end = (4096, len(data)) if damage == "pages" else (0, 100)
        data[begin:end] = b"\x5a" * (end - begin)
        file.write_bytes(data)
    else:
        statement = {
            "layout": "PRAGMA user_version = 99",
            "program": "PRAGMA application_id = 7",
            "schema": "ALTER TABLE series RENAME COLUMN tick TO tock",
            "meta": "ALTER TABLE meta RENAME COLUMN value TO worth",
            "number": f"UPDATE series SET tick = {2**63 - 1} WHERE tick = 1",
        }[damage]
        with contextlib.closing(sqlite3.connect(file)) as db:
            db.execute(statement)
            db.commit()
    before = file.read_bytes()
    record_run(tmp_path, records=5, base={"env_steps": 100.0, "updates": 7.0, "wall_seconds": 20.0})
    with Run(tmp_path) as run:
        series, alarms = run.series(), run.events(kinds=["alarm"])
    assert series["wall_seconds"][0] >= 20
    assert series["updates"][0] >= 7
    assert "was set aside as telemetry.sqlite.aside-1" in alarms["text"][0]
    assert (tmp_path / "telemetry.sqlite.aside-1").read_bytes() == before


@pytest.mark.parametrize("kind", ["another file's", "a fifo", "a link"])
def test_a_journal_that_came_with_a_folder_removes_nothing_elsewhere_and_hangs_nobody(tmp_path, kind):
    """SQLite rolls back what a journal beside a file says, and removes the journal of several files that it names."""
    outside = tmp_path / "outside"
    outside.write_text("private\n")
    run = tmp_path / "run"
    record_run(run, records=5)
    file = run / "telemetry.sqlite"
    journal = run / "telemetry.sqlite-journal"
    named = bytes(outside)
    magic = bytes.fromhex("d9d505f920a163d7")
    counts = b"".join(number.to_bytes(4) for number in (1, 0, file.stat().st_size // 4096, 512, 4096))
    page = (1).to_bytes(4) + file.read_bytes()[:4096] + bytes(4)
    end = named + len(named).to_bytes(4) + sum(named).to_bytes(4) + magic
    hot = (magic + counts).ljust(512, b"\0") + page + end
    if kind == "a fifo":
        os.mkfifo(journal)
    elif kind == "a link":
        (run / "hot").write_bytes(hot)
        journal.symlink_to("hot")
    else:
        journal.write_bytes(hot)
    record_run(run, records=5, base={"env_steps": 100.0, "updates": 7.0, "wall_seconds": 20.0})
    assert outside.read_text() == "private\n"
    assert not journal.exists()


def bytes_of(folder):
    return {path.name: (path.stat().st_mode, path.read_bytes()) for path in folder.iterdir()}


@pytest.mark.parametrize("same_run", [False, True])
def test_the_database_of_another_run_that_came_as_a_hard_link_is_copied_before_it_is_written(tmp_path, same_run):
    other = tmp_path / "other"
    given = tmp_path / "given"
    for folder, run_id in ((other, "other"), (given, "other" if same_run else "given")):
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"run_id": run_id}))
        record_run(folder, records=10)
    (other / "telemetry.sqlite").chmod(0o640)
    with contextlib.closing(sqlite3.connect(other / "telemetry.sqlite")) as db:  # one whose writer was killed
        db.execute("INSERT INTO meta VALUES ('only in the log', '1')")
        db.commit()
        for ending in ("", "-wal", "-shm"):
            (tmp_path / f"telemetry.sqlite{ending}").write_bytes((other / f"telemetry.sqlite{ending}").read_bytes())
    for ending in ("", "-wal", "-shm"):
        name = f"telemetry.sqlite{ending}"
        (tmp_path / name).rename(other / name)
        (given / name).unlink(missing_ok=True)
        (given / name).hardlink_to(other / name)
    before = bytes_of(other)
    record_run(given, records=5, base={"env_steps": 100.0, "updates": 7.0, "wall_seconds": 20.0})
    assert bytes_of(other) == before
    aside = [path.name for path in given.glob("*.aside-1*")]
    assert bool(aside) != same_run, aside
    with Run(given) as run:
        assert len(run.series()) > 0
    if same_run:
        assert (given / "telemetry.sqlite").stat().st_mode == (other / "telemetry.sqlite").stat().st_mode
        with contextlib.closing(sqlite3.connect(given / "telemetry.sqlite")) as db:
            assert db.execute("SELECT value FROM meta WHERE key = 'only in the log'").fetchall() == [("1",)]


@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
def test_a_link_to_the_database_of_another_run_is_set_aside(tmp_path, ending):
    other = tmp_path / "other"
    given = tmp_path / "given"
    for folder in (other, given):
        record_run(folder, records=5)
    named = other / f"telemetry.sqlite{ending}"
    if ending:
        named.write_bytes(b"")
    link = given / named.name
    link.unlink(missing_ok=True)
    link.symlink_to(named)
    before = bytes_of(other)
    record_run(given, records=5, base={"env_steps": 100.0, "updates": 7.0, "wall_seconds": 20.0})
    assert bytes_of(other) == before
    assert not link.is_symlink()
    assert (given / f"telemetry.sqlite.aside-1{ending}").is_symlink()
    with Run(given) as run:
        assert "it is a link" in run.events(kinds=["alarm"])["text"][0]


def test_a_process_that_starts_again_counts_on_from_what_it_had_counted():
    cluster = FakeCluster()
    window = SeriesWindow(Config())
    row = int(cluster.rollouts[0])
    cluster.set(row, episodes=100.0, return_sum=-500.0)
    before = window.measure(cluster.table(), 0.0, 0.0)["episodes"]
    cluster.set(row, episodes=3.0, return_sum=-30.0, pid=99.0)
    values = window.measure(cluster.table(), 1.0, 1.0)
    assert values["episodes"] == before + 3
    assert values["return_mean"] == -10.0


@pytest.mark.parametrize("times", [(1.0, 2.0), (2.0, 1.0)])
def test_a_process_that_continues_the_counts_of_a_dead_one_counts_nothing_twice(times):
    cluster = FakeCluster()
    window = SeriesWindow(Config())
    row = int(cluster.rollouts[0])
    cluster.set(row, episodes=100.0, return_sum=-500.0, queued_seconds=times[0], pid=98.0)
    before = window.measure(cluster.table(), 0.0, 0.0)["episodes"]
    cluster.set(row, episodes=103.0, return_sum=-530.0, queued_seconds=times[1], pid=99.0)
    values = window.measure(cluster.table(), 1.0, 1.0)
    assert values["episodes"] == before + 3
    assert values["return_mean"] == -10.0


def test_a_process_that_begins_anew_and_has_played_more_than_the_one_before_has_returns_of_its_own():
    cluster = FakeCluster()
    window = SeriesWindow(Config())
    row = int(cluster.rollouts[0])
    cluster.set(row, episodes=2.0, return_sum=1000.0, episode_steps_sum=1000.0)
    window.measure(cluster.table(), 0.0, 0.0)
    cluster.set(row, episodes=3.0, return_sum=60.0, episode_steps_sum=60.0, pid=99.0)
    assert window.measure(cluster.table(), 1.0, 1.0)["return_mean"] == 20.0


def test_frames_of_a_ddrl_with_other_counters_are_dropped_on_resume_not_misread(tmp_path):
    record_run(tmp_path, records=5)
    db = sqlite3.connect(tmp_path / "telemetry.sqlite")
    db.execute("UPDATE meta SET value = ? WHERE key = 'columns'", (json.dumps(COLUMNS[:-1]),))
    db.commit()
    db.close()
    with Run(tmp_path) as run:
        first = run.cursor
        with pytest.raises(RunDirError, match="is damaged"):
            run.processes()
    cluster = record_run(tmp_path, records=3)
    with Run(tmp_path) as run:
        frames = run.processes()
    assert frames.tick[0] >= first
    assert np.array_equal(frames.values[-1], cluster.table(), equal_nan=True)

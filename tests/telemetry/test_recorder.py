import contextlib
import itertools
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import zmq

from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.errors import MessageError, RunDirError
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Evaluation as Judged
from ddrl.core.roles import Returns
from ddrl.core.settings import config_to_toml
from ddrl.notebook import panel_html
from ddrl.telemetry import LiveReader, Recorder, Run, find_runs, run_status
from ddrl.telemetry import summary as runs
from ddrl.telemetry.control import STREAM_TOPIC, _key_pair, decode_item, encode_item
from ddrl.telemetry.directory import read_live_file
from ddrl.telemetry.reading import MAX_TEXT, MAX_VALUE
from ddrl.telemetry.series import Record
from ddrl.telemetry.store import FILE_NAME, Store
from ddrl.telemetry.summary import list_facts
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import CONFIG, LIVE, Feed, record_run
from tests.waiting import PATIENCE


def test_a_run_is_read_back_as_it_was_recorded(tmp_path):
    cluster = record_run(tmp_path / "a", records=50)
    with Run(tmp_path / "a") as run:
        series = run.series()
        frames = run.processes()
        assert run.state == "ended"
        assert run.config == CONFIG
    assert np.array_equal(series["tick"], np.arange(len(series)))
    written = np.isin(series["tick"], frames.tick)  # but for records of the same moment
    assert np.all(np.diff(series["wall_seconds"])[~written[1:]] == 0.0)
    assert written[-1]
    assert np.array_equal(frames.wall_seconds, series["wall_seconds"][written])
    assert np.array_equal(frames.time, series["time"][written])
    assert len(series) >= 50
    assert series["env_steps"][-1] == np.nansum(cluster.values[cluster.rollouts, COLUMNS.index("env_steps")])
    assert np.array_equal(frames.values[-1], cluster.table(), equal_nan=True)
    assert 8_000 < series["env_steps_per_s"][20] < 12_000
    assert 15 < series["return_mean"][20] < 500
    assert np.isnan(series["return_mean"][0])
    assert series["updates_per_s"][20] == pytest.approx(200)
    assert series["samples_per_insert"][20] == pytest.approx(200 * 128 / series["env_steps_per_s"][20])


def test_events_and_evaluations_keep_their_order_and_are_never_lost_at_the_end(tmp_path):
    feed = Feed(FakeCluster(), 1)
    with Recorder(tmp_path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock) as recorder:
        for number in range(200):
            recorder.record_event("note", f"event {number}", number=number, share=np.float32(0.5))
        recorder.record_evaluation(Judged(7, 1000, Returns(195.5, 3.0, 20)), updates=100)
    with Run(tmp_path) as run:
        events, evaluations = run.events(), run.evaluations()
        assert [fields["number"] for fields in events["fields"]] == list(range(200))
        assert list(run.events(newest=3)["text"]) == ["event 197", "event 198", "event 199"]
        assert len(run.events(since=events.cursor)) == 0
    expected = {"mean": 195.5, "std": 3.0, "episodes": 20, "env_steps": 1000, "updates": 100, "policy_version": 7}
    assert {name: evaluations[name].tolist() for name in expected} == {name: [one] for name, one in expected.items()}


def test_only_the_newest_snapshot_of_a_kind_is_kept(tmp_path):
    feed = Feed(FakeCluster(), 1)
    with Recorder(tmp_path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock) as recorder:
        recorder.record_snapshot("priorities", priorities=np.zeros(3))
        recorder.record_snapshot("priorities", priorities=np.arange(3.0), size=3)
    with Run(tmp_path) as run:
        found = run.snapshot("priorities")
        assert run.snapshot("unheard of") is None
    assert found is not None
    assert (found["priorities"], found["size"]) == ([0.0, 1.0, 2.0], 3)


def test_a_failing_table_is_reported_once_and_recording_goes_on(tmp_path):
    reports: list[str] = []
    feed = Feed(FakeCluster(), 5)
    calls = iter(range(10**9))

    def tables():
        if next(calls) < 3:
            raise OSError("segment gone")
        return feed()

    with Recorder(tmp_path, tables, CONFIG, clock=feed.clock, monotonic=feed.clock, report=reports.append):
        assert feed.done.wait(PATIENCE)
    assert len(reports) == 1
    assert "segment gone" in reports[0]
    assert "the rest continues" in reports[0]
    assert "Traceback" in reports[0]
    with Run(tmp_path) as run:
        assert len(run.series()) >= 5


def test_a_failing_sink_does_not_keep_records_from_the_others(tmp_path):
    class Broken:
        def record(self, record):
            raise RuntimeError("no space left")

        event = evaluation = record

        def close(self):
            raise RuntimeError("still none")

    reports: list[str] = []
    record_run(tmp_path / "a", records=5, sinks=[Broken()], report=reports.append)
    assert len(reports) == 3  # its records, the alarm that says so, its end
    with Run(tmp_path / "a") as run:
        assert len(run.series()) >= 5


INTERRUPTED_CLOSE = """
import sys, threading
from pathlib import Path
from tests.telemetry.feeding import CONFIG, Feed, FakeCluster
from ddrl.telemetry import Recorder, run_status

go = threading.Event()

class Slow:
    def record(self, record): pass
    event = evaluation = record
    def close(self):
        print("closing", flush=True)
        go.wait()

reports = []
recorder = Recorder(Path(sys.argv[1]), Feed(FakeCluster(), 5), CONFIG, report=reports.append, sinks=[Slow()])
try:
    recorder.close(float(sys.argv[2]))
except KeyboardInterrupt:
    recorder.close(0.05)
    go.set()
    recorder.close(float(sys.argv[2]))
    print(run_status(Path(sys.argv[1])).figures["size"], *reports, flush=True)
"""


def test_ctrl_c_at_the_end_does_not_leave_the_recorder_behind(tmp_path):
    (tmp_path / "config.toml").write_text(config_to_toml(CONFIG))
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_CLOSE, tmp_path, str(PATIENCE)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "closing\n"
    child.send_signal(signal.SIGINT)
    printed, _ = child.communicate(timeout=PATIENCE)
    size, report = printed.split(maxsplit=1)
    assert int(size) == (tmp_path / FILE_NAME).stat().st_size
    assert report.startswith("telemetry: the recorder did not end within 0.05 s")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12: this process has another thread
def test_a_copy_of_the_process_does_not_wait_for_a_recorder_that_it_has_not(tmp_path):
    feed = Feed(FakeCluster(), 5)
    reports: list[str] = []
    with Recorder(tmp_path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock, report=reports.append) as recorder:
        child = os.fork()
        if child == 0:
            recorder.close(0.1)
            os._exit(len(reports))
        assert os.waitpid(child, 0)[1] == 0


def test_a_decimated_series_covers_the_whole_run_in_few_rows(tmp_path):
    record_run(tmp_path, records=1000)
    with Run(tmp_path) as run:
        whole, few = run.series(), run.series(["env_steps", "loss"], points=100)
        frames = run.processes(points=10)
        late = run.series(["env_steps"], since=900, points=50)
    assert 25 <= len(few) <= 112
    assert few["env_steps"][-1] == whole["env_steps"][-1]
    assert np.all(np.diff(few["tick"]) > 0)
    assert np.all(np.diff(few["env_steps"]) >= 0)
    assert few["loss"][0] == pytest.approx(np.mean(whole["loss"][: few["tick"][1]]))
    assert len(frames) == 10
    assert frames.tick[-1] == whole["tick"][-1]
    assert late["tick"][0] > 880


def test_every_decimation_counts_each_record_exactly_once(tmp_path):
    from ddrl.telemetry.store import spans as spans_of

    for end in (1, 3, 4, 63, 64, 65, 1000, 12345):
        for points in (1, 7, 100, None):
            spans = spans_of(0, end, points)
            assert spans[0][1] == 0
            assert spans[-1][2] == end
            assert all(left[2] == right[1] for left, right in itertools.pairwise(spans))


def test_frames_are_a_fifth_of_a_second_apart_and_the_last_record_has_one(tmp_path):
    feed = Feed(FakeCluster(), 23, seconds=0.0625)
    with Recorder(tmp_path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock):
        assert feed.done.wait(PATIENCE)
    with Run(tmp_path) as run:
        series, frames = run.series(), run.processes()
    assert np.all(np.diff(frames.wall_seconds)[:-1] == 0.25)
    assert len(frames) >= 6
    assert frames.tick[-1] == series["tick"][-1]
    assert np.array_equal(frames.values[-1], feed.cluster.table(), equal_nan=True)


def test_old_frames_are_thinned_to_the_budget_and_the_newest_stay(tmp_path):
    from ddrl.telemetry.series import Record
    from ddrl.telemetry.store import Store

    cluster = FakeCluster(processes=40)
    store = Store(tmp_path, frame_budget=600_000)
    for tick in range(1500):
        cluster.advance(1.0)
        store.record(Record(tick, cluster.now, cluster.elapsed, {}, cluster.table()))
    store.close()
    with Run(tmp_path) as run:
        frames = run.processes()
    assert frames.tick[-1] == 1499
    assert np.array_equal(frames.tick[-200:], np.arange(1300, 1500))
    assert frames.tick[0] == 0
    db = sqlite3.connect(tmp_path / "telemetry.sqlite")
    assert db.execute("SELECT sum(length(data)) FROM frames").fetchone()[0] <= 600_000
    db.close()


def test_the_live_stream_carries_the_same_records_as_the_run_directory(tmp_path):
    feed = Feed(FakeCluster(), 10**9)
    with (
        Recorder(tmp_path, feed, LIVE, clock=feed.clock, monotonic=feed.clock) as recorder,
        LiveReader(tmp_path) as reader,
    ):
        items = []
        recorder.record_event("note", "hello", n=1)
        while not items:
            items = [item for item in reader.receive(timeout=PATIENCE) if hasattr(item, "series")]
        assert run_status(tmp_path).state == "running"
        live = items[0]
    assert run_status(tmp_path).state == "ended"
    with Run(tmp_path) as run:
        stored = run.processes(since=live.tick)
        series = run.series(since=live.tick)
    assert np.array_equal(stored.values[0], live.table, equal_nan=True)
    assert series["env_steps"][0] == live.series["env_steps"]


def test_a_message_that_is_not_ours_is_refused_in_plain_words():
    for data in (b"", b"hello", b"\x81\xa4type\xa5other", b"\x93\x01\x02\x03"):
        with pytest.raises(MessageError, match="not one of ddrl"):
            decode_item(data)
    assert STREAM_TOPIC.startswith(b"ddrl.telemetry.")


def test_an_event_survives_the_wire_unchanged():
    from ddrl.telemetry import Evaluation, Event

    event = Event(1.0, 2.0, "note", "text", {"a": [1, 2], "b": None})
    evaluation = Evaluation(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7, 8.0)
    assert decode_item(encode_item(event)) == event
    assert decode_item(encode_item(evaluation)) == evaluation


def test_a_run_whose_process_was_killed_is_called_dead(tmp_path):
    record_run(tmp_path, records=3)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / "live.json").write_text(json.dumps({"pid": child, "host": os.uname().nodename}))
    (tmp_path / "status.json").unlink()  # a run of an earlier ddrl has none
    assert read_live_file(tmp_path) is not None
    with Run(tmp_path) as run:
        assert run.state == "dead"
    with pytest.raises(RunDirError, match="not running"):
        LiveReader(tmp_path)


def test_unusable_run_directories_are_refused_with_what_and_where(tmp_path):
    with pytest.raises(RunDirError, match="there is no run directory"):
        Run(tmp_path / "absent")
    with pytest.raises(RunDirError, match=r"holds no telemetry\.sqlite"):
        Run(tmp_path)
    file = tmp_path / "telemetry.sqlite"
    file.write_bytes(b"")
    with pytest.raises(RunDirError, match="half-written"):
        Run(tmp_path)
    file.write_bytes(b"not a database at all" * 100)
    with pytest.raises(RunDirError, match="cannot be read"):
        Run(tmp_path)
    file.unlink()
    record_run(tmp_path, records=2)
    db = sqlite3.connect(file)
    db.execute("PRAGMA user_version = 99")
    db.commit()
    db.close()
    with pytest.raises(RunDirError, match="layout version 99"):
        Run(tmp_path)
    db = sqlite3.connect(file)
    db.execute("PRAGMA application_id = 7")
    db.commit()
    db.close()
    with pytest.raises(RunDirError, match="another program"):
        Run(tmp_path)


@pytest.mark.parametrize("name", ["audit", "sqlitexaudit", "sqlite_audit"])
def test_a_trigger_is_never_taken_for_one_of_sqlites_own_parts(tmp_path, name):
    record_run(tmp_path, records=2)
    db = sqlite3.connect(tmp_path / "telemetry.sqlite")
    db.execute("CREATE TRIGGER audit AFTER INSERT ON series BEGIN DELETE FROM events; END")
    db.execute("PRAGMA writable_schema = 1")  # names that SQLite keeps for itself can be written so
    db.execute("UPDATE sqlite_master SET name = ?, sql = replace(sql, 'audit', ?) WHERE type = 'trigger'", (name, name))
    db.commit()
    db.close()
    with pytest.raises(RunDirError, match=r"another program|cannot be read"):
        Run(tmp_path)


def test_the_settings_of_a_run_of_another_version_are_read_as_far_as_they_are_known(tmp_path):
    record_run(tmp_path, records=1)
    path = tmp_path / "config.toml"
    text = (
        path.read_text()
        .replace("[learner]", "[learner]\nmomentum = 0.9")
        .replace("[replay]", "[reward_shaping]\nscale = 2\n\n[replay]")
    )
    path.write_text(text)
    with Run(tmp_path) as run:
        assert run.config == replace(CONFIG, slices={"reward_shaping": {"scale": 2}})
        assert run.settings["learner"]["momentum"] == 0.9
    path.write_text(text[: len(text) // 2] + "\n[[")
    with Run(tmp_path) as run, pytest.raises(RunDirError, match="half-written"):
        _ = run.config
    path.unlink()
    with Run(tmp_path) as run, pytest.raises(RunDirError, match="cannot read"):
        _ = run.settings


def test_an_unwritable_run_directory_is_refused_at_once(tmp_path):
    with pytest.raises(RunDirError, match="cannot write"):
        Recorder(tmp_path / "absent", FakeCluster().table, CONFIG)


def test_a_run_deleted_while_it_is_read_says_so(tmp_path):
    import shutil

    record_run(tmp_path / "a", records=3)
    with Run(tmp_path / "a") as run:
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "a").mkdir()
        run.series()  # the open file still answers
        run._db.close()
        with pytest.raises(RunDirError, match="being deleted"):
            run.series()


def test_a_run_that_ends_while_it_is_opened_is_read(tmp_path, monkeypatch):
    record_run(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    store = Store(tmp_path)
    store.record(Record(0, 0.0, 0.0, {}, FakeCluster().table()))
    connect = sqlite3.connect
    tries = []

    def after_the_end(*words, **options):
        if not tries:
            assert (tmp_path / f"{FILE_NAME}-wal").exists()
            store.close()
        tries.append(words)
        return connect(*words, **options)

    monkeypatch.setattr(sqlite3, "connect", after_the_end)
    with Run(tmp_path) as run:
        assert len(run.series()) == 1
    assert len(tries) == 2


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = Config(telemetry=TelemetryConfig(live_port=other.getsockname()[1]))
        with pytest.raises(RunDirError, match=r"cannot listen on .* telemetry\.live_port"):
            Recorder(tmp_path, FakeCluster().table, config)


def test_a_stream_on_which_another_program_talks_is_refused_in_plain_words(tmp_path):
    with zmq.Context() as context, context.socket(zmq.XPUB) as stranger:
        stranger.set(zmq.XPUB_VERBOSE, 1)  # every subscription counts, while the last one may not have ended yet
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        (tmp_path / "live.json").write_text(
            json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "stream": f"tcp://127.0.0.1:{port}"})
        )
        for message in ([STREAM_TOPIC, b"hello"], [STREAM_TOPIC + b"x", b"a", b"b"]):
            with LiveReader(tmp_path) as reader:
                while not stranger.recv().startswith(b"\x01"):  # until the subscription has arrived
                    pass
                stranger.send_multipart(message)
                with pytest.raises(MessageError, match="not one of ddrl"):
                    reader.receive(timeout=PATIENCE)


def test_evaluations_are_thinned_to_so_many_and_the_newest_and_the_best_stay(tmp_path):
    feed = Feed(FakeCluster(), 1)
    with Recorder(tmp_path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock) as recorder:
        for number in range(1000):
            mean = 5000.0 if number == 457 else float(number)
            recorder.record_evaluation(Judged(0, number, Returns(mean, 1.0, 20)), updates=number)
    with Run(tmp_path) as run:
        assert len(run.evaluations()) == 1000
        assert run.evaluations(points=7)["mean"].max() == 5000
        few = run.evaluations(points=30)
        assert 15 <= len(few) <= 31
        assert few["mean"][-1] == 999
        assert len(run.evaluations(since=few.cursor, points=30)) == 0
        assert run.evaluations(since=995, points=30)["mean"].tolist() == [994.0, 995.0, 996.0, 997.0, 998.0, 999.0]


def test_the_greatest_of_a_span_stays_where_rows_are_folded(tmp_path):
    """The mean of the slowest rollout's ages, or of signs of life that are missed, would hide each."""
    record_run(tmp_path, records=64)
    with Run(tmp_path) as run:
        whole = run.series(["version_age_max"])["version_age_max"][:64].reshape(16, 4)
        folded = run.series(["version_age_max"], points=20)["version_age_max"][:16]
    assert (whole.max(axis=1) != whole.mean(axis=1)).any()
    assert folded.tolist() == whole.max(axis=1).tolist()


def test_a_folded_row_has_the_moment_of_its_last_record(tmp_path):
    """Its totals are that record's, and speeds are taken between rows."""
    record_run(tmp_path, records=64)
    with Run(tmp_path) as run:
        whole = run.series([])
        folded = run.series([], points=20)
    for name in ("time", "wall_seconds"):
        assert folded[name][:16].tolist() == whole[name][3:64:4].tolist()


def test_damage_inside_the_file_is_told_in_plain_words(tmp_path):
    record_run(tmp_path, records=3)
    with Recorder(tmp_path, FakeCluster().table, CONFIG) as recorder:
        recorder.record_event("note", "said")
    db = sqlite3.connect(tmp_path / "telemetry.sqlite")
    db.execute("UPDATE events SET fields = '{'")
    db.execute("UPDATE frames SET data = x'00'")
    db.commit()
    with Run(tmp_path) as run:
        with pytest.raises(RunDirError, match="cannot be read"):
            run.events()
        with pytest.raises(RunDirError, match="is damaged"):
            run.latest()
    db.execute("UPDATE meta SET value = '['")
    db.commit()
    db.close()
    with pytest.raises(RunDirError, match="cannot be read"):
        Run(tmp_path)


def test_values_of_any_length_take_bounded_memory(tmp_path):
    record_run(tmp_path, records=3)
    insert = "INSERT INTO events (time, wall_seconds, kind, text, fields) VALUES (0, 0, 'alarm', {}, {})"
    with contextlib.closing(sqlite3.connect(tmp_path / "telemetry.sqlite")) as db:
        db.execute(
            insert.format(f"'begin' || hex(zeroblob({MAX_TEXT}))", f"json_object('x', hex(zeroblob({MAX_TEXT})))")
        )
        db.commit()
        with Run(tmp_path) as run:
            event = run.events(kinds=["alarm"])
        db.execute(insert.format(f"hex(zeroblob({MAX_VALUE // 2 + 1}))", "'{}'"))
        db.commit()
    assert event["text"][0].startswith("begin")
    assert len(event["text"][0]) == MAX_TEXT
    assert event["fields"][0] == {}
    with Run(tmp_path) as run, pytest.raises(RunDirError, match=r"cannot be read \(string or blob too big\)"):
        run.events()


def test_what_a_run_says_is_text_in_every_table(tmp_path, capsys):
    bad = tmp_path / os.fsdecode(b"b\xffad\x1b]0;title\x07\nname")
    words = "![](http://stranger.invalid/x.png) <a href='http://stranger.invalid'>x</a> \x1b[2J\r$x$"
    for place in (tmp_path / "good", bad):
        place.mkdir()
        with Recorder(place, FakeCluster().table, CONFIG) as recorder:
            recorder.record_event("error", words)
        (place / "config.toml").write_text(config_to_toml(CONFIG))
        (place / "summary.json").write_text("[1]")
    for path in (tmp_path, bad):
        assert runs.main([str(path)]) == 0
        said = capsys.readouterr()
        assert said.out.replace("\n", "").isprintable()
        assert said.err == ""
        assert runs.main([str(path), "--json"]) == 0
        assert "stranger" in capsys.readouterr().out
    assert [facts.state for facts in list_facts(tmp_path)] == ["failed"] * 2
    with Run(bad) as run:
        assert run.name.isprintable()
        assert "<a" not in panel_html(run)


def test_runs_are_found_with_the_one_begun_last_first(tmp_path):
    for name, time in (("old", 1e9), ("new", 3e9), ("middle", 2e9)):
        record_run(tmp_path / name, records=1)
        os.utime(tmp_path / name / "config.toml", (time, time))
    (tmp_path / "empty").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == ["new", "middle", "old"]
    assert find_runs(tmp_path / "absent") == []


@pytest.mark.parametrize("inner", ["experiment/seed1", "pool/tasks/a", "a/b/c/d"])
def test_runs_are_found_in_folders_of_experiments_but_not_in_runs(inner, tmp_path):
    for name in ("base", inner, f"{inner}/checkpoints/1", ".hidden/run"):
        (tmp_path / name).mkdir(parents=True)
        record_run(tmp_path / name, records=1)
    assert {str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)} == {"base", inner}


def test_encrypted_sockets_let_in_only_holders_of_the_key(tmp_path):
    import shutil

    config = Config(telemetry=TelemetryConfig(period=0.001, bind="0.0.0.0"))
    feed = Feed(FakeCluster(), 10**9)
    with Recorder(tmp_path, feed, config, clock=feed.clock, monotonic=feed.clock):
        live = read_live_file(tmp_path)
        assert live is not None
        assert live.server_key
        assert (tmp_path / "keys" / "client.secret").stat().st_mode & 0o077 == 0
        stranger = tmp_path.parent / "stranger"
        stranger.mkdir()
        shutil.copy(tmp_path / "live.json", stranger)
        with pytest.raises(RunDirError, match=r"client\.secret"):
            LiveReader(stranger)
        _key_pair(stranger, "client.secret")  # a key of one's own making
        with LiveReader(tmp_path) as friend, LiveReader(stranger) as other:
            assert friend.receive(timeout=PATIENCE)
            assert other.receive(timeout=0.2) == []

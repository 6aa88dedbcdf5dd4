import json
import os
import subprocess
import sys
import threading

from ddrl.telemetry import Recorder, Run, run_status
from ddrl.telemetry.directory import find_film, note_death
from ddrl.telemetry.series import Snapshot
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import CONFIG, Feed
from tests.waiting import PATIENCE


def wait_for_words(recorder):
    """Until the recorder's thread has handled all that was handed in."""
    handled = threading.Event()
    recorder._items.put(Mark(handled))
    assert handled.wait(PATIENCE)


class Mark(Snapshot):
    """A snapshot that says when it is written."""

    def __init__(self, handled):
        super().__init__(0.0, "mark", {})
        object.__setattr__(self, "handled", handled)

    def __getattribute__(self, name):
        if name == "fields":
            object.__getattribute__(self, "handled").set()
        return object.__getattribute__(self, name)


def states(tmp_path, *events):
    """The states that a run's events lead to, one after the other, and the last status."""
    seen = []
    feed = Feed(FakeCluster(), 1)
    with Recorder(tmp_path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock) as recorder:
        seen.append(run_status(tmp_path).state)
        for event in events:
            recorder.record_event(*event[:2], **(event[2] if len(event) > 2 else {}))
            wait_for_words(recorder)
            seen.append(run_status(tmp_path).state)
    return seen, run_status(tmp_path)


def command(name, ok=True):
    return ("command", f"{name}: done", {"command": name, "ok": ok})


def test_a_runs_state_follows_its_events_and_ends_with_its_reason(tmp_path):
    seen, status = states(
        tmp_path,
        ("start", "began"),
        command("pause"),
        command("resume"),
        command("pause", ok=False),
        ("stop", "run.max_seconds reached"),
        ("end", "run.max_seconds reached"),
    )
    assert seen == ["running", "running", "paused", "running", "running", "ending", "ending"]
    assert (status.state, status.reason) == ("ended", "run.max_seconds reached")
    assert not status.is_active


def test_a_run_that_failed_says_with_what(tmp_path):
    seen, status = states(tmp_path, ("error", "rank 3 was killed"), ("end", "never comes"))
    assert seen[-1] == "failed"
    assert (status.state, status.reason) == ("failed", "rank 3 was killed")
    with Run(tmp_path) as run:
        assert run.state == "failed"


def test_a_run_without_a_trainer_is_not_dead_while_its_keeper_lives(tmp_path):
    script = (
        "import os, sys, pathlib; from ddrl.telemetry.directory import StatusFile; "
        "StatusFile(pathlib.Path(sys.argv[1]), int(sys.argv[2])); os._exit(9)"
    )
    with subprocess.Popen(["sleep", "1000"]) as keeper:
        subprocess.run([sys.executable, "-c", script, str(tmp_path), str(keeper.pid)], check=False)
        assert run_status(tmp_path).state == "running"
        keeper.kill()
    assert run_status(tmp_path).state == "dead"


def test_a_run_whose_process_is_gone_without_a_word_is_dead_and_another_process_of_its_number_is_not_it(tmp_path):
    script = (
        "import os, sys, pathlib; from ddrl.telemetry.directory import StatusFile; "
        "StatusFile(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    status = run_status(tmp_path)
    assert status.state == "dead"
    assert str(status.pid) in status.reason
    document = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(document | {"pid": os.getpid()}))
    assert run_status(tmp_path).state == "dead"


def test_who_saw_a_process_end_says_why_where_that_did_not_say_it_itself(tmp_path):
    script = (
        "import os, sys, pathlib; from ddrl.telemetry.directory import StatusFile; "
        "StatusFile(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    dead = run_status(tmp_path)
    note_death(tmp_path, dead.pid + 1, "of another process")
    assert run_status(tmp_path) == dead
    note_death(tmp_path, dead.pid, "exited" * 1000)
    said = run_status(tmp_path)
    assert (said.state, said.pid, said.reason[:6], len(said.reason)) == ("failed", dead.pid, "exited", 2000)
    note_death(tmp_path, dead.pid, "once more")
    assert run_status(tmp_path) == said


def test_a_damaged_status_is_replaced_by_what_else_is_known(tmp_path):
    for data in (b"", b"\xff", b'{"state": "happy"}', b"[" * 100_000):
        (tmp_path / "status.json").write_bytes(data)
        assert run_status(tmp_path).state == "ended"


def test_a_film_that_is_a_link_or_no_file_is_shown_to_nobody(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "private").write_bytes(b"private")
    (run / "agent.mp4").symlink_to(tmp_path / "private")
    os.mkfifo(run / "agent.gif")
    assert find_film(run) is None
    (run / "agent.mp4").unlink()
    (run / "agent.mp4").hardlink_to(tmp_path / "private")
    assert find_film(run) is None
    (run / "agent.mp4").unlink()
    (run / "agent.mp4").write_bytes(b"")
    assert find_film(run) == run / "agent.mp4"

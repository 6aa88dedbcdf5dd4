"""Who reads a run's telemetry changes no file of its directory and makes none, whoever has written it and however that
ended."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from ddrl.core.errors import RunDirError
from ddrl.telemetry import Run
from tests.telemetry.feeding import record_run

WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode = WAL")
while True:
    db.execute(
        "INSERT INTO events (time, wall_seconds, kind, text, fields) VALUES (0, 0, 'note', 'in the log alone', '{}')"
    )
    print("written", flush=True)
    if not sys.stdin.readline():
        break
"""


@pytest.fixture
def writer(tmp_path: Path) -> Generator[subprocess.Popen[str]]:
    """Who writes a run, and writes a further event for each line that it gets; another process, as SQLite's connections
    of one share what they have mapped."""
    (tmp_path / "run").mkdir()
    record_run(tmp_path / "run", records=3)
    words = [sys.executable, "-c", WRITER, str(tmp_path / "run/telemetry.sqlite")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def written(tmp_path: Path, writer: subprocess.Popen[str]) -> Path:
    """A run whose writer lives, and whose last event is in the log."""
    return tmp_path / "run"


@pytest.fixture(params=["running", "killed", "copied without its index", "ended"])
def run(request: pytest.FixtureRequest, written: Path) -> Path:
    if request.param == "running":
        return written
    copy = written.with_name("copy")
    shutil.copytree(written, copy)
    if request.param == "copied without its index":
        (copy / "telemetry.sqlite-shm").unlink()
    elif request.param == "ended":
        sqlite3.connect(copy / "telemetry.sqlite").execute("DELETE FROM snapshots").connection.close()
        assert not (copy / "telemetry.sqlite-wal").exists()
    return copy


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir() if path.is_file()}


def test_reading_changes_nothing_and_sees_what_is_in_the_log_alone(run: Path) -> None:
    before = contents(run)
    with Run(run) as opened:
        assert opened.events()["text"][-1] == "in the log alone"
        assert len(opened.series()) > 0
        assert contents(run) == before
    assert contents(run) == before


def test_a_reader_sees_what_is_written_after_it_was_opened(written: Path, writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    assert writer.stdout is not None
    with Run(written) as opened:
        before = len(opened.events())
        print(file=writer.stdin, flush=True)
        writer.stdout.readline()
        assert len(opened.events()) == before + 1


@pytest.mark.parametrize("run", ["killed"], indirect=True)
@pytest.mark.parametrize("name", ["telemetry.sqlite-wal", "telemetry.sqlite-shm", "telemetry.sqlite-journal"])
@pytest.mark.parametrize("kind", ["a fifo", "a folder", "a link to a fifo", "a device"])
def test_a_log_or_an_index_that_is_no_file_is_refused(run: Path, name: str, kind: str) -> None:
    path = run / name
    path.unlink(missing_ok=True)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a fifo":
        os.mkfifo(path)
    else:
        os.mkfifo(run / "fifo")
        path.symlink_to("fifo")
    with pytest.raises(RunDirError, match="cannot be read"):
        Run(run)


@pytest.mark.parametrize("run", ["copied without its index"], indirect=True)
def test_no_disk_is_filled_by_the_copy_of_a_log_without_an_index(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum((run / name).stat().st_size for name in ("telemetry.sqlite", "telemetry.sqlite-wal"))
    usage = shutil.disk_usage(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2 * size - 1))
    with pytest.raises(RunDirError, match="its log has no index"):
        Run(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2 * size))
    with Run(run) as opened:
        assert opened.events()["text"][-1] == "in the log alone"

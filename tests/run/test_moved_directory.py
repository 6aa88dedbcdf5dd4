"""A run directory that is moved, removed, or taken by another process while its run goes on."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddrl.core.errors import RunDirError
from ddrl.run import task as tasks
from ddrl.run.cli import parse
from ddrl.run.directory import RunDirectory, RunLock
from ddrl.run.preparation import Preparation
from ddrl.run.serial import SerialRun
from ddrl.telemetry import Run
from tests.run.test_resume import TINY, go_on, resume, start, stop


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FOLLOW_PERIOD", 0.0)


def test_a_moved_run_continues_where_it_is_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tmp_path / "before"
    after = tmp_path / "after"
    run = start(before)
    go_on(run, 300)
    before.rename(after)
    command = parse(["--serial", *TINY, "--set", f"run.dir={before}"])
    other = SerialRun(Preparation(command, "another"))  # under the old name
    go_on(run, 300)
    go_on(other, 200)
    assert run.task.directory.now == after
    stop(run)
    stop(other)
    said = capsys.readouterr().err
    assert f"{before} was moved to {after}" in said
    for folder, steps in ((after, 600), (before, 200)):
        again = resume(folder)
        assert again.task.training.state.env_steps >= steps
        go_on(again, 10)
        stop(again)
        with Run(folder) as read:
            assert read.series()["env_steps"][-1] >= steps


def test_a_machine_without_proc_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as without:
        without.setattr(os.path, "exists", lambda path: False)
        with pytest.raises(RunDirError, match="/proc is not what Linux has there"):
            RunLock(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_removed_run_directory_is_said_and_made_anew_by_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(tmp_path / "gone")
    go_on(run, 300)
    shutil.rmtree(tmp_path / "gone")
    go_on(run, 300)
    with pytest.raises(RunDirError, match="was removed, so the checkpoint is lost"):
        stop(run)
    assert not (tmp_path / "gone").exists()
    assert capsys.readouterr().err.count("NOTHING IS SAVED any more") == 1


def test_a_lock_that_was_removed_is_taken_anew(tmp_path: Path) -> None:
    run = start(tmp_path / "unlocked")
    (tmp_path / "unlocked" / "lock").unlink()
    go_on(run, 100)
    with pytest.raises(RunDirError, match="in use by process"):
        RunDirectory.open(tmp_path / "unlocked", claim=True)
    assert (tmp_path / "unlocked" / "lock").stat().st_mode & 0o777 == 0o600
    stop(run)


def test_what_another_process_has_taken_is_written_no_more(tmp_path: Path) -> None:
    run = start(tmp_path / "taken")
    go_on(run, 300)
    assert run.task.checkpoints.save()
    lock = tmp_path / "taken" / "lock"
    lock.unlink()
    other = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(other, fcntl.LOCK_EX)
    before = sorted(path.name for path in (tmp_path / "taken" / "checkpoints").iterdir())
    go_on(run, 300)
    with pytest.raises(RunDirError, match="another process has taken it"):
        stop(run)
    os.close(other)
    assert sorted(path.name for path in (tmp_path / "taken" / "checkpoints").iterdir()) == before
    assert not (tmp_path / "taken" / "summary.json").exists()


@pytest.mark.parametrize(
    ("name", "make"),
    [("fifo", os.mkfifo), ("folder", Path.mkdir), ("link", lambda lock: lock.symlink_to("run.json"))],
)
def test_what_is_no_lock_is_not_called_another_process_s(
    name: str, make: Callable[[Path], object], tmp_path: Path
) -> None:
    run = start(tmp_path / name)
    go_on(run, 300)
    (tmp_path / name / "lock").unlink()
    make(tmp_path / name / "lock")
    go_on(run, 300)
    with pytest.raises(RunDirError, match="lock was removed, and what stands in its place cannot be locked"):
        stop(run)


def test_a_shared_lock_follows_the_directory(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    lock = RunLock(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    assert lock.descriptor is not None
    shared = RunLock.adopt(os.dup(lock.descriptor), tmp_path / "before")
    assert shared.find(tmp_path / "before") == tmp_path / "after"
    shared.release()
    lock.release()

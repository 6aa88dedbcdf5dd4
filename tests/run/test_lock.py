"""One run directory belongs to one process at a time; the others get one clear line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddrl.core.config import Config
from ddrl.core.errors import RunDirError
from ddrl.run.directory import RunDirectory, RunLock
from tests.run.launch import TINY, UNTIL_STOPPED, mpirun, wait_for_checkpoint
from tests.run.preloaded import Job, forked
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until


def start(*arguments: str) -> subprocess.Popen[str]:
    return Job(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refused(error: str, run: Path) -> None:
    lines = [line for line in error.splitlines() if line.startswith("ddrl: ")]
    assert len(lines) == 1, error
    assert str(run) in lines[0]
    assert "in use by " in lines[0], error
    assert "Traceback" not in error


def test_a_lock_is_held_by_one_and_free_after_its_release(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(RunDirError, match=f"in use by process {os.getpid()} on"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_a_lock_that_is_a_hard_link_is_held_and_changes_no_other_file(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("mine")
    private.chmod(0o644)
    (tmp_path / "lock").hardlink_to(private)
    lock = RunLock(tmp_path)
    with pytest.raises(RunDirError, match="in use by"):
        RunLock(tmp_path)
    lock.release()
    assert private.read_text() == "mine"
    assert private.stat().st_mode & 0o777 == 0o644


def test_a_directory_that_is_released_can_be_taken_again_by_the_same_process(tmp_path: Path) -> None:
    first = RunDirectory.create(Config(), "one", tmp_path / "run")
    first.release()
    second, _ = RunDirectory.open(tmp_path / "run", claim=True)
    with pytest.raises(RunDirError, match="in use by"):
        RunDirectory.open(tmp_path / "run", claim=True)
    second.release()
    RunDirectory.open(tmp_path / "run", claim=True)[0].release()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    load = "from pathlib import Path; from ddrl.run.directory import RunLock"
    code = f"{load}; lock = RunLock(Path({str(tmp_path)!r})); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment())
    wait_until(
        lambda: (tmp_path / "lock").exists() and f"process {child.pid}" in (tmp_path / "lock").read_text(),
        "the child took no lock",
    )
    with pytest.raises(RunDirError, match=f"process {child.pid}"):
        RunLock(tmp_path)
    child.kill()
    child.communicate()
    RunLock(tmp_path).release()


def test_a_living_run_is_not_started_or_resumed_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--serial", *TINY, *UNTIL_STOPPED, "--set", f"run.dir={run}"]
    both = [start(*arguments), start(*arguments)]
    try:
        wait_until(lambda: any(process.poll() is not None for process in both), "neither process ended")
        loser = next(process for process in both if process.poll() is not None)
        living = next(process for process in both if process is not loser)
        assert loser.returncode == 1
        refused(loser.communicate()[1], run)
        wait_for_checkpoint(run, living)
        refused(forked("--resume", str(run)).stderr, run)
        refused(mpirun(4, "--resume", str(run)).stderr, run)
        assert living.poll() is None
        living.send_signal(signal.SIGINT)
        living.communicate(timeout=PATIENCE)
        assert living.returncode == 130
        two = [start("--serial", "--resume", str(run)) for _ in range(2)]
        both += two
        wait_until(lambda: any(process.poll() is not None for process in two), "neither process ended")
        loser = next(process for process in two if process.poll() is not None)
        assert loser.returncode == 1
        refused(loser.communicate()[1], run)
    finally:
        for process in both:
            process.kill()
            process.communicate()


def test_two_jobs_of_mpirun_do_not_share_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    held = RunLock(_made(run))
    done = mpirun(4, *TINY, "--set", f"run.dir={run}")
    held.release()
    assert done.returncode != 0
    refused(done.stderr, run)


def _made(path: Path) -> Path:
    path.mkdir()
    return path

"""A run whose processes are killed one after the other does what it was asked to, and chaos says what it bore."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddrl.telemetry import attach
from ddrl.testing.chaos import Watch, job_of, processes_of
from tests.run.launch import TINY, UNTIL_STOPPED, segments_of, settings, summary, wait_for_checkpoint
from tests.run.preloaded import Job, forked
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

CHAOS = [sys.executable, "-m", "ddrl.testing.chaos"]


def test_a_run_bears_the_deaths_of_its_processes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = settings(f"run.dir={run}", "run.processes=2", "rollout.restarts=100")
    job = Job([*TINY, *UNTIL_STOPPED, *more])
    try:
        wait_for_checkpoint(run, job)
        words = [*CHAOS, str(run), "--every", "0.7", "--kills", "6", "--roles", "rollout,evaluator,trainer"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(" kill ddrl ") == 6
        assert job.poll() is None
        with attach(run, timeout=PATIENCE) as control:
            control.stop()
        assert job.wait(PATIENCE) == 0
    finally:
        job.terminate()
    assert summary(run)["restarts"] == 6
    assert Watch(run).verdict(60.0) == []
    assert segments_of(run) == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--roles", "rollouts"], "--roles: rollouts is none of"),
        (["--how", "nicely"], "--how: nicely is none of kill, stop, oom"),
        (["--every", "1"], "run.json"),
    ],
)
def test_what_chaos_cannot_do_is_refused(words: list[str], error: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*CHAOS, str(tmp_path), *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(),
        check=False,
    )
    assert done.returncode != 0
    assert error in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_processes_of_other_runs_are_left_alone_and_those_of_a_run_that_was_continued_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = [*TINY, *settings(f"run.dir={run}", "run.max_env_steps=600")]
    forked(*first).check_returncode()
    assert job_of(run) == ""
    words = ["--resume", str(run), *settings("run.max_env_steps=100000000")]
    job = Job(words)
    try:
        wait_until(lambda: "rollout" in {one.role for one in processes_of(job_of(run))}, "a rollout of the run")
        assert processes_of("no such run") == []
    finally:
        job.terminate()
        job.wait(PATIENCE)

"""Whichever process of a job under mpirun is killed: it is named, and no process and no segment of the job is left."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.run.launch import (
    MPI_ENVIRONMENT,
    TINY,
    UNTIL_STOPPED,
    ddrl,
    mpirun_command,
    processes_of,
    segments_of,
    settings,
    summary,
    wait_for_checkpoint,
)
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

RANKS = 6  # of two host groups: 0 and 3 relay, 1 and 2 are the slots of trainer and evaluator, 4 and 5 of rollouts
SAVED = "interrupted"  # the run's summary says so
MAX_NAME = 15  # letters of a process's name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mpirun", SAVED),
        ("ddrl keeper 0", SAVED),
        ("ddrl 1 trainer", None),
        ("ddrl keeper 1", None),
        ("slot 4", SAVED),
        ("ddrl 3 relay", SAVED),
        pytest.param("ddrl 0 relay", SAVED, marks=pytest.mark.long),
        pytest.param("ddrl 2 evaluator", None, marks=pytest.mark.long),
        pytest.param("ddrl 4 rollout", None, marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_killed_is_named_and_nothing_is_left(name: str, reason: str | None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = tmp_path / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            mpirun_command(RANKS, *TINY, *UNTIL_STOPPED, *settings("cluster.relays=2", f"run.dir={run}")),
            stdout=output,
            stderr=output,
            env=environment(**MPI_ENVIRONMENT),
        )
    wait_for_checkpoint(run, job)
    pid = job.pid if name == "mpirun" else processes_of(run)[name[:MAX_NAME]]
    os.kill(pid, signal.SIGKILL)
    assert job.wait(timeout=PATIENCE) != 0
    wait_until(lambda: not processes_of(run), f"processes outlive {name}")
    assert segments_of(run) == []
    assert any((run / "checkpoints").glob("0*"))
    if name != "mpirun":
        assert f" {pid}" in log.read_text()
    if reason is not None:
        assert summary(run)["reason"] == reason
        went_on = ddrl("--resume", str(run), *settings(f"run.max_env_steps={summary(run)['env_steps'] + 300}"))
        assert went_on.returncode == 0, went_on.stderr

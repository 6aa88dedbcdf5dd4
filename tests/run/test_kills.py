"""Whichever process of a job under mpirun is killed: it is named, and no process and no segment of the job is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddrl.run.hosts import absent_ranks
from ddrl.telemetry import Run
from ddrl.telemetry.summary import LEDGER, accounts
from tests.run.launch import (
    MPI_ENVIRONMENT,
    TINY,
    UNTIL_STOPPED,
    mpirun_command,
    processes_of,
    segments_of,
    settings,
    summary,
    wait_for_checkpoint,
)
from tests.run.preloaded import forked
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

RANKS = 6  # of two host groups: 0 and 3 relay, 1 and 2 are the slots of trainer and evaluator, 4 and 5 of rollouts
SAVED = "interrupted"  # in the summary; where a relay fails first, training ends with a checkpoint alone
MAX_NAME = 15  # letters of a process's name


def start(run: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A job, and the file of what it prints."""
    log = run.with_name("log")
    with log.open("wb") as output:
        command = mpirun_command(RANKS, *TINY, *UNTIL_STOPPED, *settings("cluster.relays=2", f"run.dir={run}"))
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment(**MPI_ENVIRONMENT)), log


def kill(name: str, job: subprocess.Popen[bytes], run: Path, log: Path) -> None:
    """Kill one process: the job ends, names it, and leaves nothing."""
    pid = job.pid if name == "mpirun" else processes_of(run)[name[:MAX_NAME]]
    os.kill(pid, signal.SIGKILL)
    assert job.wait(timeout=PATIENCE) != 0
    wait_until(lambda: not processes_of(run), f"processes outlive {name}")
    assert segments_of(run) == []
    if name != "mpirun":
        assert f" {pid}" in log.read_text()
    assert "MPI_ABORT" not in log.read_text()  # no rank has waited for another one in vain


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("mpirun", SAVED, marks=pytest.mark.long),
        ("ddrl keeper 0", None),
        ("slot 4", SAVED),
        pytest.param("ddrl 3 relay", None, marks=pytest.mark.long),
        pytest.param("ddrl 0 relay", SAVED, marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_killed_is_named_and_nothing_is_left(name: str, reason: str | None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job, log = start(run)
    wait_for_checkpoint(run, job)
    kill(name, job, run, log)
    assert any((run / "checkpoints").glob("0*"))
    with Run(run) as ended:
        entry = ended.snapshot(LEDGER)
        assert entry is not None
        assert not [str(one) for one in accounts(entry, ended.latest().values[-1]) if one.missing]
    if reason is not None:
        assert summary(run)["reason"] == reason
        went_on = forked("--resume", str(run), *settings(f"run.max_env_steps={summary(run)['env_steps'] + 300}"))
        assert went_on.returncode == 0, went_on.stderr


@pytest.mark.long
def test_so_it_is_before_anything_is_learned(tmp_path: Path) -> None:
    """The trainer still imports torch."""
    run = tmp_path / "run"
    job, log = start(run)
    wait_until(lambda: (run / "run.json").exists() and segments_of(run), "no channel was made")
    kill("ddrl keeper 0", job, run, log)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; os.kill(os.getpid(), 19)", "it is stopped"),
        pytest.param("import signal; signal.pause()", "has not loaded MPI", marks=pytest.mark.long),
    ],
    ids=["stopped", "without MPI"],
)
def test_a_rank_that_never_comes_is_named(program: str, words: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = mpirun_command(3, *TINY, *settings(f"run.dir={run}", "run.start_limit=3", "run.silence_limit=3"))
    command += [":", "-n", "1", sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=environment(**MPI_ENVIRONMENT), check=False
    )
    assert done.returncode != 0
    named = re.search(r"waits in MPI_Init for rank 3 \(process \d+ on \S+\): (.*)", done.stdout + done.stderr)
    assert named is not None, done.stderr
    assert words in named[1]
    assert not run.exists()


def test_without_open_mpis_variables_no_rank_is_named() -> None:
    with subprocess.Popen(["sleep", "1000"], env={"PMI_RANK": "0", "PMI_SIZE": "2"}) as process:
        assert absent_ranks(process.pid) == "a rank that has not come"
        process.kill()

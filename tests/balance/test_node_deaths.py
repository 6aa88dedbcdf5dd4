"""Processes of a job with gradient nodes that are killed: mpirun is told to let the others go on."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from ddrl.core.roles import Role
from ddrl.telemetry import Run
from tests.run.launch import (
    MPI_ENVIRONMENT,
    TINY,
    UNTIL_STOPPED,
    mpirun_command,
    segments_of,
    settings,
    summary,
    wait_for_checkpoint,
)
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

pytest.importorskip("mpi4py", reason="needs the extra [mpi]")


def start(run, nodes, *assignments):
    """A run with so many nodes, under an mpirun that does not end the job where one of them dies."""
    own = settings(f"learner.nodes={nodes}", "evaluation.period=0", f"run.dir={run}", *assignments)
    launcher, *words = mpirun_command(nodes + 3, *TINY, *UNTIL_STOPPED, *own)
    return subprocess.Popen(
        [launcher, "--enable-recovery", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**MPI_ENVIRONMENT),
    )


def newest(run, name):
    """The newest value of a column for each rank, and their roles."""
    with Run(run) as records:
        processes = records.processes()
    return processes.column("role")[-1], processes.column(name)[-1]


def pids(run, role):
    """Processes of a role."""
    roles, found = newest(run, "pid")
    return [int(pid) for pid in found[roles == list(Role).index(role)]]


def notes(run):
    """What the run has told its user."""
    with Run(run) as records:
        return list(records.events(kinds=["note"])["text"])


def updates(run):
    """Updates so far, as the trainer has recorded them."""
    roles, found = newest(run, "updates")
    return float(found[roles == list(Role).index(Role.TRAINER)][0])


def end_of(job):
    """The exit status and what was printed; the job is killed where it does not end."""
    try:
        text, _ = job.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        job.kill()
        raise AssertionError(f"the job went on: {job.communicate()[0][-3000:]}") from None
    return job.returncode, text


@pytest.fixture
def job_of(tmp_path):
    """Starts a job; whatever the test comes to, nothing of it is left."""
    jobs = []

    def begin(*assignments, nodes=2):
        jobs.append(start(tmp_path / "run", nodes, *assignments))
        return jobs[0]

    yield begin
    jobs[0].kill()


@pytest.mark.parametrize("how", ["in shared memory", pytest.param("by messages", marks=pytest.mark.long)])
def test_a_killed_node_changes_the_speed_and_the_run_goes_on_without_it(tmp_path, job_of, how):
    others = {"in shared memory": 1, "by messages": 2}[how]
    settings_of = {"in shared memory": [], "by messages": ["balance.first=2"]}[how]
    run, job = tmp_path / "run", job_of(*settings_of, nodes=others + 1)
    wait_for_checkpoint(run, job)
    os.kill(pids(run, Role.NODE)[1], signal.SIGKILL)
    wait_until(lambda: any("node 1 has left" in text for text in notes(run)), "nobody missed the node")
    before = updates(run)
    wait_until(lambda: updates(run) > before + 100, "nothing was learned any more")
    os.kill(pids(run, Role.TRAINER)[0], signal.SIGUSR1)  # a clean stop
    status, text = end_of(job)
    assert status == 130, text  # that of an interrupted run
    assert text.count(f"node 1 has left: its process has died; {others} continue") == 1, text
    assert summary(run)["reason"] == "interrupted"
    assert segments_of(run) == []


@pytest.mark.long
def test_a_node_that_hangs_ends_the_job_at_the_limit_and_is_named(tmp_path, job_of):
    run, job = tmp_path / "run", job_of("run.silence_limit=8")
    wait_for_checkpoint(run, job)
    pid = pids(run, Role.NODE)[1]
    os.kill(pid, signal.SIGSTOP)
    status, text = end_of(job)
    assert status == 1, text
    assert re.search(r"rank \d+ \(node of host 0\) has shown no sign of life for \d+ s \(run\.silence_limit\)", text), (
        text
    )
    assert f"process {pid} on {socket.gethostname()}: its process is stopped by a signal" in text, text
    assert "since the last checkpoint is lost" in text
    assert any((run / "checkpoints").glob("0*"))


@pytest.mark.long
def test_without_its_trainer_the_job_ends_with_one_message(tmp_path, job_of):
    run, job = tmp_path / "run", job_of()
    wait_for_checkpoint(run, job)
    os.kill(pids(run, Role.TRAINER)[0], signal.SIGKILL)
    status, text = end_of(job)
    assert status != 0
    assert text.count("the trainer's process has died") == 1, text
    assert "--resume" in text
    wait_until(lambda: segments_of(run) == [], "segments stayed")


@pytest.mark.parametrize(("options", "finalized"), [([], 3), (["--enable-recovery"], 0)])
def test_where_ranks_may_die_nobody_waits_for_them_in_mpi_finalize(options, finalized):
    launcher, *words = mpirun_command(3)
    words = [*words[: words.index("-m")], str(Path(__file__).parents[1] / "run" / "leaving_ranks.py")]
    ended = subprocess.run(
        [launcher, *options, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(**MPI_ENVIRONMENT),
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("the interpreter ends") == finalized

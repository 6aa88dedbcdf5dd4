"""The job as processes: local and under mpirun, its bytes, its end, and what happens when a part of it fails."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ddrl.distribution.plan import HEADER_BYTES, MODEL_HEADER_BYTES
from ddrl.run.process import Interrupts
from ddrl.telemetry import run_status
from tests.run.launch import (
    TINY,
    ddrl,
    mpirun,
    processes_of,
    segments_of,
    settings,
    start_mpirun,
    summary,
    wait_for_checkpoint,
)
from tests.run.preloaded import Job, forked, serial
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

WALK = ["--set", "env.id=tests.run.environments:walk"]


def test_a_local_run_trains_evaluates_and_leaves_nothing_behind(tmp_path):
    done = ddrl(*TINY, "--set", "run.processes=2", "--set", f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    written = summary(tmp_path / "run")
    assert written["env_steps"] >= 3000
    assert written["evaluation"]["episodes"] == 4
    assert segments_of(tmp_path / "run") == []
    command = [sys.executable, "-m", "ddrl.evaluate", str(tmp_path / "run"), "--episodes", "3", "--json"]
    played = subprocess.run(command, capture_output=True, text=True)
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["episodes"] == 3


def test_with_four_relays_the_root_sends_the_model_once_and_each_host_receives_it_once(tmp_path):
    options = ("cluster.relays=4", "cluster.scheme=sharded", "run.max_env_steps=4000", "evaluation.period=0")
    done = mpirun(10, *TINY, *settings(*options, f"run.dir={tmp_path / 'run'}"))
    assert done.returncode == 0, done.stderr
    assert f"go on:    mpirun -n 10 python -m ddrl.run --resume {tmp_path / 'run'}" in done.stdout
    written = summary(tmp_path / "run")
    assert written["env_steps"] >= 4000
    assert written["checksum_failures"] == 0
    hosts = {host["host"]: host for host in written["hosts"]}
    assert sorted(hosts) == [0, 1, 2, 3]
    versions = hosts[1]["versions_sealed"]
    assert versions >= 1
    shards = 3  # one for each host beside the trainer's, each a message behind a header
    nbytes = versions * (written["model_nbytes"] + MODEL_HEADER_BYTES + shards * HEADER_BYTES)
    for host in (1, 2, 3):
        assert hosts[host]["versions_sealed"] == versions, hosts
        assert hosts[host]["model_bytes_received"] == nbytes, hosts
    assert hosts[0]["model_bytes_sent"] == nbytes, hosts
    assert sum(hosts[host]["model_bytes_sent"] for host in (1, 2, 3)) == 2 * nbytes, hosts  # each serves the other two
    assert sum(figures["rows_forwarded"] for host, figures in hosts.items() if host) > 0
    assert segments_of(tmp_path / "run") == []


@pytest.mark.parametrize("mode", [pytest.param("local", marks=pytest.mark.long), "serial", "mpi"])
def test_an_exception_in_an_environment_ends_the_job_with_its_traceback_once(mode, tmp_path):
    arguments = [
        *TINY,
        *WALK,
        "--set",
        "env.kwargs={fail_at = 40}",
        "--set",
        "evaluation.period=0",
        "--set",
        f"run.dir={tmp_path / 'run'}",
    ]
    start = {
        "local": ddrl,
        "serial": serial,
        "mpi": partial(mpirun, 6, "--set", "cluster.relays=2"),
    }[mode]
    done = start(*arguments)
    assert done.returncode != 0
    assert done.stderr.count("RuntimeError: the corridor collapsed") == 1, done.stderr
    raised = 'raise RuntimeError("the corridor collapsed")'
    line = Path(__file__).with_name("environments.py").read_text().split(raised)[0].count("\n") + 1
    assert f"(environments.py, line {line}, in step: {raised}" in done.stderr
    assert segments_of(tmp_path / "run") == []


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        pytest.param([], signal.SIGINT, marks=pytest.mark.long),  # a test below sends it while members start
        (["--serial"], signal.SIGINT),
        pytest.param([], signal.SIGHUP, marks=pytest.mark.long),
        pytest.param([], signal.SIGTERM, marks=pytest.mark.long),
    ],
    ids=["local", "serial", "terminal closed", "terminated"],
)
def test_a_signal_saves_and_says_how_to_resume(mode, number, tmp_path):
    run = tmp_path / "run"
    process = Job(
        [*mode, *TINY, *settings("run.max_env_steps=100000000", f"run.dir={run}")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_checkpoint(run, process)
    process.send_signal(number)
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert f"--resume {run}" in out + errors
    stopped = summary(run)
    assert stopped["reason"] == "interrupted"
    done = forked(*mode, "--resume", str(run), "--set", f"run.max_env_steps={stopped['env_steps'] + 500}")
    assert done.returncode == 0, done.stderr
    assert summary(run)["env_steps"] >= stopped["env_steps"] + 500
    assert summary(run)["updates"] > stopped["updates"]


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        pytest.param("--serial", signal.SIGINT, marks=pytest.mark.long),
        ("", signal.SIGINT),
        pytest.param("", signal.SIGKILL, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_last_evaluation_without_an_end_is_ended_by_an_interrupt_and_by_the_keeper_s_death(mode, number, tmp_path):
    run = tmp_path / "run"
    options = settings("env.id=tests.run.environments:everlasting", "run.max_env_steps=400", f"run.dir={run}")
    with (tmp_path / "log").open("wb") as output:
        job = Job([*mode.split(), *TINY, *options], stdout=output, stderr=output)
    wait_until(
        lambda: job.poll() is not None or ((run / "status.json").exists() and run_status(run).state == "ending"),
        "the run does not end",
    )
    assert job.poll() is None, (tmp_path / "log").read_text()
    wait_until(lambda: list((run / "checkpoints").glob("[0-9]*")), "nothing is saved")
    os.kill(job.pid, number)
    status = job.wait(timeout=PATIENCE)
    wait_until(lambda: not processes_of(run), "processes outlive the run")
    if number == signal.SIGINT:
        assert status == 0, (tmp_path / "log").read_text()
        assert summary(run)["reason"] == "run.max_env_steps reached"
    assert segments_of(run) == []


def test_what_a_killed_run_left_in_shared_memory_is_swept_by_the_next_start(tmp_path):
    run = tmp_path / "run"
    process = Job([*TINY, *settings("run.max_env_steps=100000000", f"run.dir={run}")])
    wait_for_checkpoint(run, process)
    assert segments_of(tmp_path / "run")
    process.kill()
    process.wait()
    done = serial(*TINY, "--set", "run.max_env_steps=300", "--set", f"run.dir={tmp_path / 'next'}")
    assert done.returncode == 0, done.stderr
    assert segments_of(tmp_path / "run") == []


# Two: parallel kernels leave threads that no copy of the process has.
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_trainer_that_is_killed_once_it_has_copied_itself_is_saved_by_the_copy(threads, tmp_path):
    """What mpirun does at Ctrl-C, SIGTERM and soon SIGKILL, with the time between that the copy takes to be made, where
    the trainer is a rank: beside gradient nodes."""
    run = tmp_path / "run"
    process = start_mpirun(
        5,
        *TINY,
        *settings(
            "run.max_env_steps=100000000",
            f"learner.threads={threads}",
            "learner.nodes=1",
            "learner.hidden=[2048, 2048]",  # 70 MB to save, so that the copy can be seen
            "replay.samples_per_insert=0.2",  # updates of such a network take most of the test's time, and its acting
            "run.checkpoint_period=400",
            "evaluation.period=0",
            f"run.dir={run}",
        ),
    )
    wait_for_checkpoint(run, process)
    trainer = json.loads((run / "live.json").read_text())["pid"]
    os.kill(trainer, signal.SIGTERM)
    wait_until(lambda: has_a_copy(trainer), "the trainer made no copy", pause=0.001)
    os.kill(trainer, signal.SIGKILL)
    process.wait(timeout=PATIENCE)
    wait_until((run / "summary.json").exists, "nothing was saved")
    stopped = summary(run)
    assert stopped["reason"] == "interrupted"
    assert max(int(path.name) for path in (run / "checkpoints").glob("0*")) == stopped["env_steps"]
    done = forked("--resume", str(run), *settings(f"run.max_env_steps={stopped['env_steps'] + 100}", "learner.nodes=0"))
    assert done.returncode == 0, done.stderr
    assert segments_of(tmp_path / "run") == []


def has_a_copy(process: int) -> bool:
    """Whether a child of `process` runs the same command, in a session of its own."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        copies = [int(child) for child in children if Path(f"/proc/{child}/cmdline").read_bytes() == command]
        return any(os.getsid(copy) == copy for copy in copies)
    except OSError:  # one of them has ended
        return False


def test_ctrl_c_of_mpirun_loses_no_more_than_what_came_after_the_last_checkpoint(tmp_path):
    """Whether the trainer saves within the quarter of a second that mpirun leaves it is a matter of speed."""
    run = tmp_path / "run"
    process = start_mpirun(4, *TINY, *settings("run.max_env_steps=100000000", f"run.dir={run}"))
    wait_for_checkpoint(run, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE) != 0
    wait_until(lambda: not processes_of(run), "ranks stay behind")
    saved = max(int(path.name) for path in (run / "checkpoints").glob("0*"))
    done = forked("--resume", str(run), "--set", f"run.max_env_steps={saved + 500}")
    assert done.returncode == 0, done.stderr
    assert summary(run)["env_steps"] >= saved
    assert segments_of(run) == []


def test_ctrl_c_while_the_members_still_start_saves_without_a_traceback(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "ddrl.run", *TINY),
                *settings(f"run.dir={tmp_path / 'run'}", "run.max_env_steps=100_000_000"),
            ],
            stderr=output,
            stdout=output,
            env=environment(),
            start_new_session=True,
        )
    children = f"/proc/{run.pid}/task/{run.pid}/children"
    for child in wait_until(lambda: Path(children).read_text().split(), "no member started"):
        for _ in range(3):
            os.kill(int(child), signal.SIGINT)
    wait_until(lambda: "steps" in log.read_text() or run.poll() is not None, "the run did not begin")
    run.send_signal(signal.SIGINT)
    assert run.wait(PATIENCE) == 130, log.read_text()
    assert "Traceback" not in log.read_text()

"""The mode of a run follows from what MPI says; launchers that do not fit are refused in one line."""

import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ddrl.core.errors import JobFailed
from ddrl.run import ranks, slot
from ddrl.run.topology import Result
from tests.run.launch import MPI_ENVIRONMENT, UNTIL_STOPPED, mpirun_command, settings
from tests.run.preloaded import forked
from tests.sources import environment
from tests.waiting import PATIENCE

SHORT = settings(
    "run.max_env_steps=200",
    "replay.min_size=50",
    "rollout.warmup_steps=50",
    "env.num_envs=2",
    "learner.hidden=[8]",
    "learner.batch_size=8",
    "evaluation.period=0",
    "telemetry.live=false",
)
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}


def start(tmp_path, variables, *, command=(sys.executable,), mode=("--serial",)):
    words = [*mode, *SHORT, "--set", f"run.dir={tmp_path / 'run'}"]
    given = environment(**MPI_ENVIRONMENT, **variables)
    if "--serial" in mode:  # the others end before they import torch
        return forked(*words, env=given)
    command = [*command, "-m", "ddrl.run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=given)


@pytest.mark.parametrize(
    "left_over",
    [
        pytest.param({"PMI_SIZE": "1", "PMI_RANK": "0"}, marks=pytest.mark.long),
        pytest.param({"PMI_SIZE": "4", "PMI_RANK": "0"}, marks=pytest.mark.long),
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "PMI_SIZE": "1", "PMI_RANK": "0"},
        pytest.param(  # of a step that has ended
            {**STEP, "SLURM_PROCID": "0", "SLURM_TASK_PID": "4000000", "PMIX_RANK": "1"}, marks=pytest.mark.long
        ),
        pytest.param({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, marks=pytest.mark.long),  # sbatch
        pytest.param({"PMI_SIZE": "4", "PMI_RANK": "3"}, marks=pytest.mark.long),
    ],
)
def test_variables_that_a_launcher_left_over_do_not_matter(left_over, tmp_path):
    if "OMPI_COMM_WORLD_SIZE" in left_over or left_over.get("PMI_SIZE") == "4":
        pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    done = start(tmp_path, left_over)
    assert done.returncode == 0, done.stderr
    assert "run.max_env_steps reached" in done.stdout
    assert done.stderr.count("train CartPole") == 1


@pytest.mark.parametrize("variables", [{}, {"SLURM_STEP_NUM_TASKS": "2"}, {"SLURM_TASK_PID": str(os.getpid())}])
def test_srun_without_mpi_is_refused_once(variables, tmp_path):
    said = [start(tmp_path, {**STEP, **variables, "SLURM_PROCID": number}, mode=()) for number in ("0", "1")]
    assert [one.returncode for one in said] == [1, 1]
    (line,) = said[0].stderr.splitlines()
    assert "srun has started 2 tasks" in line
    assert "--mpi=pmix" in line
    assert len(line) < 300
    assert said[1].stderr == ""


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun -n 4 python -m ddrl.run"),
        ({"OMPI_COMM_WORLD_SIZE": "4", **STEP, "SLURM_PROCID": "0"}, "mpirun -n 4 python -m ddrl.run"),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", **STEP, "SLURM_PROCID": "0"}, "mpirun -n 4 python -m ddrl.run"),
        ({"PMI_SIZE": "4", **STEP, "SLURM_PROCID": "0"}, "srun -n 4 python -m ddrl.run"),
        ({**STEP, "SLURM_PROCID": "0", "SLURM_MPI_TYPE": "pmi2"}, "srun --mpi=pmi2 -n 4 python -m ddrl.run"),
        ({**STEP, "SLURM_PROCID": "0", "DDRL_LAUNCHER": "mpi_launch/local 4"}, "mpi_launch/local 4"),
    ],
)
def test_who_is_to_go_on_with_a_job_is_told_its_own_launcher(variables, command, monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("OMPI_", "MPI_LOCAL", "SLURM_", "DDRL_LAUNCHER")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert slot.command_of(4) == command


@pytest.mark.parametrize("number", ["0", "1"])
def test_an_mpirun_of_another_mpi_is_refused_with_both_numbers(number, tmp_path):
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    script = tmp_path / "mpirun"
    script.write_text('#!/bin/bash\n"$@"\nexit $?\n')
    script.chmod(0o755)
    variables = {"PMI_SIZE": "3", "PMI_RANK": number}
    done = start(tmp_path, variables, command=(str(script), sys.executable), mode=())
    assert done.returncode == 1
    refusals = [line for line in done.stderr.splitlines() if line.startswith("ddrl: ")]
    assert len(refusals) == (number == "0")
    assert all("mpirun has started 3 ranks" in line and "1 of 1" in line and len(line) < 300 for line in refusals)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_have_nothing_to_say_let_rank_0_say_why_none_can_begin(rank, monkeypatch, capfd):
    """A launcher ends all ranks where one has failed, and would end rank 0 before its line."""
    waited = []

    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr(slot, "launched", lambda: (3, rank))
    monkeypatch.setattr(slot, "_launcher_name", lambda: "mpirun")
    monkeypatch.setattr(slot, "_let_the_first_speak", lambda: waited.append(rank))
    monkeypatch.setattr(slot.os, "_exit", end)
    with pytest.raises(SystemExit, match="1"):
        slot._be_alone([], "MPICH")
    assert waited == [rank] * rank
    assert len(capfd.readouterr().err.splitlines()) == 1 - rank


def test_a_rank_that_waits_is_ended_by_its_launcher_s_signal():
    code = """
import os, signal
from ddrl.run import slot
slot.SPEAKING_SECONDS = 1e6
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
slot._let_the_first_speak()
assert signal.SIGTERM not in signal.sigpending()
"""  # in a process of one thread: another thread of the tests' would take the signal
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, env=environment())


@pytest.mark.parametrize("number", ["0", "1"])
def test_a_missing_mpi_library_is_one_message(number, tmp_path):
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": number, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = start(tmp_path, variables, mode=())
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("ddrl: mpi4py cannot load")] == (
        done.stderr.splitlines() if number == "0" else []
    )
    assert "Traceback" not in done.stderr


def memory_of(record):
    return record.split()[1]


def test_ranks_share_a_host_where_they_find_one_token(monkeypatch, tmp_path):
    monkeypatch.setattr(slot, "meeting_point", lambda: str(tmp_path / "one"))
    first = memory_of(slot.record(0))
    assert memory_of(slot.record(0)) == first
    monkeypatch.setattr(slot, "meeting_point", lambda: str(tmp_path / "two"))
    second = memory_of(slot.record(0))
    monkeypatch.setattr(slot, "meeting_point", lambda: str(tmp_path / "none" / "of them"))
    assert len({first, second, memory_of(slot.record(0)), memory_of(slot.record(0))}) == 4
    monkeypatch.setattr(slot, "meeting_point", lambda: str(tmp_path / "one"))
    slot.leave_meeting_point()
    slot.leave_meeting_point()
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (b"0.9.7 a-1 3 0 beta", r"0\.9\.7 \(rank 1 on beta\)"),
        (b"0.0.1 a-1 3 0 beta", r"0\.0\.1 \(rank 1 on beta\)"),
        (b"a-1 3 0 beta", "rank 1 has an older version"),
    ],
)
def test_ranks_with_another_version_are_refused_with_the_place(other, words):
    with pytest.raises(ranks.VersionError, match=words):
        ranks._read_records([slot.record(0), other])
    slot.leave_meeting_point()


class FakeMpi:
    """Messages that leave after some looks; to a rank that has died none leaves."""

    BYTE = None
    Exception = KeyError

    def __init__(self, looks, died=-1):
        self.left = []
        self._looks = looks
        self._died = died

    def Isend(self, buffer, rank, tag):
        looks = itertools.count()
        return SimpleNamespace(Test=lambda: self._test(rank, next(looks)))

    def _test(self, rank, looks):
        if rank == self._died:
            raise self.Exception
        if looks == self._looks:
            self.left.append(rank)
        return looks >= self._looks


def test_rank_0_ends_once_what_ends_the_slots_has_left(monkeypatch):
    """MPICH's MPI_Finalize forgets messages that have not, and their ranks would wait for ever."""
    mpi = FakeMpi(looks=3, died=2)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    mail = SimpleNamespace(world=mpi, take=lambda: None, dead=set)
    work = bytearray([slot.RELAY, slot.SLOT, slot.SLOT, slot.SLOT, 0])
    ranks._part(mail, work, Result({}), "1", [])
    assert mpi.left == [1, 3]


def test_a_copy_with_another_column_or_another_field_speaks_another_protocol(monkeypatch):
    mine = ranks.protocol()
    assert ranks.protocol() == mine
    monkeypatch.setattr(ranks, "COLUMNS", (*ranks.COLUMNS, "one_more"))
    other = ranks.protocol()
    monkeypatch.undo()
    monkeypatch.setitem(ranks.Ready.__annotations__, "more", "int")
    assert len({mine, other, ranks.protocol()}) == 3


@pytest.mark.parametrize("message", [ranks.Ready("no channel"), None])
def test_a_rank_that_dies_before_the_job_has_begun_is_not_waited_for(message, monkeypatch):
    """What it had said before is heard."""
    monkeypatch.setattr(ranks.Mail, "dead", lambda mail: {3})
    monkeypatch.setattr(ranks.Mail, "take", lambda mail, rank: None if message is None else (rank, message))
    mail = object.__new__(ranks.Mail)
    if message is None:
        with pytest.raises(JobFailed, match="rank 3 has died before the job had begun"):
            mail.wait_for(ranks.Ready, 3)
    else:
        assert mail.wait_for(ranks.Ready, 3) == message


def test_sigterm_while_a_job_starts_ends_it_with_a_line_though_mpirun_passes_nothing_more_on(tmp_path):
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    job = subprocess.Popen(
        mpirun_command(4, *SHORT, *UNTIL_STOPPED, *settings(f"run.dir={tmp_path / 'run'}")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**MPI_ENVIRONMENT),
    )
    try:
        assert job.stderr is not None
        while "train CartPole" not in (line := job.stderr.readline()):
            assert line, "it has not started"
        job.terminate()
        said = job.communicate(timeout=PATIENCE)[1]
    finally:
        job.kill()
    assert job.returncode != 0
    ends = re.findall("ended before training began|ended by SIGTERM|ended at once|ddrl: saved|interrupted after", said)
    assert ends, said

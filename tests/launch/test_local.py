"""mpi_launch/local: it prints what it runs, passes on how that ended, and turns Ctrl-C into a stop that saves."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.launch import TINY, processes_of, segments_of, summary, wait_for_checkpoint
from tests.waiting import PATIENCE, wait_until

LOCAL = Path(__file__).parents[2] / "mpi_launch" / "local"


def fake_mpirun(folder: Path, version: str, status: int = 0) -> Path:
    path = folder / "mpirun"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "{version}"; exit; }}\nprintf "%s|" "$@"\nexit {status}\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("arguments", [[], ["0"], ["-3"], ["many"], ["3.5"]])
def test_a_number_of_ranks_is_asked_for(arguments):
    done = subprocess.run([LOCAL, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: mpi_launch/local N")


def test_the_command_is_printed_as_it_is_run(tmp_path):
    fake = fake_mpirun(tmp_path, "mpirun (Open MPI) 5.0.11", status=3)
    done = subprocess.run(
        [LOCAL, "4", "pong", "--set", "env.kwargs={a = 1}"],
        capture_output=True,
        text=True,
        env={**os.environ, "MPIRUN": str(fake), "PYTHON": sys.executable},
    )
    assert done.returncode == 3
    printed, given = done.stdout.splitlines()
    given = given.strip("|").split("|")
    assert shlex.split(printed.removeprefix("+")) == [str(fake), *given]
    assert given[-6:] == [sys.executable, "-m", "ddrl.run", "pong", "--set", "env.kwargs={a = 1}"]
    assert ("--allow-run-as-root" in given) == (os.geteuid() == 0)
    assert ":OVERSUBSCRIBE" in given


def failing_mpirun(folder: Path, checkpoints: str) -> Path:
    """An mpirun that writes down its arguments, and a checkpoint named after the number of its start; it always
    fails."""
    path = folder / "mpirun"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\necho ranks "$@" >> {folder}/starts\n'
        f'echo {folder}/run > "$DDRL_RUN_FILE"; mkdir -p {folder}/run/checkpoints; cd {folder}/run/checkpoints\n'
        f"number=$(wc -l < {folder}/starts); {checkpoints}\nexit 3\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("checkpoints", "starts"),
    [("mkdir 00$number", 3), ("mkdir -p 001", 2), ("true", 1)],
    ids=["each takes one", "the second takes none", "none at all"],
)
def test_a_job_that_fails_is_kept_alive_while_each_takes_a_checkpoint(checkpoints, starts, tmp_path):
    fake = failing_mpirun(tmp_path, checkpoints)
    done = subprocess.run(
        [LOCAL, "4", "--keep-alive", "2", "pong", "--set", "run.seed=7"],
        capture_output=True,
        text=True,
        env={**os.environ, "MPIRUN": str(fake), "PYTHON": sys.executable},
    )
    assert done.returncode == 3, done.stderr
    given = [line.partition("ddrl.run ")[2] for line in (tmp_path / "starts").read_text().splitlines()]
    assert given == ["pong --set run.seed=7", *[f"--resume {tmp_path}/run"] * (starts - 1)]


@pytest.mark.parametrize("resume", [["--resume", "{}/run"], ["--resume={0}/../{1}/run"]])
def test_a_job_that_resumes_a_run_and_takes_no_newer_checkpoint_is_not_started_again(resume, tmp_path):
    (tmp_path / "run/checkpoints/001").mkdir(parents=True)
    words = [word.format(tmp_path, tmp_path.name) for word in resume]
    done = subprocess.run(
        [LOCAL, "4", "--keep-alive", "2", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "MPIRUN": str(failing_mpirun(tmp_path, "true")), "PYTHON": sys.executable},
    )
    assert done.returncode == 3, done.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


@pytest.mark.parametrize("keep_alive", [[], ["--keep-alive", "2"]])
def test_a_job_that_its_user_stopped_is_not_started_again_though_it_ends_with_an_error(keep_alive, tmp_path):
    fake = failing_mpirun(
        tmp_path,
        f'mkdir 00$number; [ $number = 1 ] || exit 3; trap "exit 3" USR1; touch {tmp_path}/ready\n'
        "while :; do sleep 0.05; done",
    )
    process = subprocess.Popen(
        [LOCAL, "4", *keep_alive, "pong"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MPIRUN": str(fake), "PYTHON": sys.executable},
    )

    def hears() -> bool:
        """Whether the script has set its trap, and the job too."""
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return (tmp_path / "ready").exists() and bool(caught >> signal.SIGTERM - 1 & 1)

    wait_until(hears, "the job did not begin")
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, errors
    assert len((tmp_path / "starts").read_text().splitlines()) == 1, errors


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddrl 3 relay", "ddrl keeper 0"])
def test_a_job_that_loses_a_rank_is_kept_alive(name, tmp_path):
    run = tmp_path / "run"
    more = ["--set", f"run.dir={run}", "--set", "cluster.relays=2", "--set", "run.max_env_steps=20000"]
    process = subprocess.Popen(
        [LOCAL, "6", "--keep-alive", "1", *TINY, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    wait_for_checkpoint(run, process)
    os.kill(processes_of(run)[name], signal.SIGKILL)
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "it is started again from" in errors
    assert out.count(f"--resume {run}") == 2  # the second start, and how to go on
    assert summary(run)["env_steps"] == 20000
    assert segments_of(run) == []


def test_another_mpi_gets_no_option_of_open_mpi(tmp_path):
    fake = fake_mpirun(tmp_path, "HYDRA build details")
    done = subprocess.run(
        [LOCAL, "4"], capture_output=True, text=True, env={**os.environ, "MPIRUN": str(fake), "PYTHON": sys.executable}
    )
    assert done.stdout.splitlines()[1] == f"-n|4|{sys.executable}|-m|ddrl.run|"


def test_each_start_has_its_own_folder_for_what_mpirun_keeps_and_leaves_nothing_among_temporary_files(tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo Open MPI; exit; }\n'
        'd=$PRTE_MCA_prte_tmpdir_base; echo "$d"; touch "$d/left"\n'
    )
    fake.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = {**os.environ, "MPIRUN": str(fake), "PRTE_MCA_prte_tmpdir_base": str(tmp_path)}
    variables["TMPDIR"] = str(temporary)
    folders = {
        Path(subprocess.run([LOCAL, "2"], capture_output=True, text=True, env=variables).stdout.splitlines()[-1])
        for _ in range(2)
    }
    assert len(folders) == 2
    assert all(folder.parent == tmp_path and not folder.exists() for folder in folders)
    assert list(temporary.iterdir()) == []


def hear_ctrl_c():
    """A shell's background job ignores Ctrl-C, and so would a script that these tests start while they run in one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_stops_the_job_saves_and_ends_with_130(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [LOCAL, "4", *TINY, "--set", "run.max_env_steps=100000000", "--set", f"run.dir={run}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHON": sys.executable},
        preexec_fn=hear_ctrl_c,
    )
    try:
        wait_for_checkpoint(run, process)
        os.kill(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 130, errors
    assert summary(run)["reason"] == "interrupted"
    assert f"--resume {run}" in out
    assert segments_of(run) == []

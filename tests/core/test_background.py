"""Work beside training is tried again whatever it raises, and nothing that a process prints can end it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddrl.core.errors import LONGEST_PAUSE, Guard
from ddrl.core.forks import Stream
from ddrl.run.topology import describe
from ddrl.telemetry.directory import run_status
from ddrl.telemetry.reading import Run
from tests.run.launch import settings
from tests.run.preloaded import Job
from tests.sources import ROOT, environment
from tests.waiting import PATIENCE


def test_a_failure_is_reported_once_and_tried_again_with_a_growing_pause() -> None:
    said: list[str] = []
    guard = Guard(said.append)
    pauses = [guard.attempt("work", lambda: 1 / 0) for _ in range(12)]
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert max(pauses) == LONGEST_PAUSE
    assert len(said) == 1
    assert "ZeroDivisionError" in said[0]
    assert guard.failing == {"work": "division by zero"}
    assert guard.attempt("work", lambda: None) == 0.0
    assert guard.failing == {}
    assert guard.attempt("work", lambda: 1 / 0) == 0.1


def test_a_report_that_fails_fails_nothing() -> None:
    def report(words: str) -> None:
        raise BrokenPipeError(words)

    guard = Guard(report)
    guard.attempt("work", lambda: 1 / 0)
    assert "could not be reported" in guard.failing["work"]


def test_a_full_pipe_is_waited_for_once_and_written_again_when_it_has_been_read() -> None:
    reading, writing = os.pipe()
    stream = Stream(writing, "ascii", patience=0.05)
    for _ in range(40):
        print("x" * 4000, file=stream)
    assert stream.lost is not None
    assert len(os.read(reading, 1 << 20)) <= 1 << 16
    print("ä\udcff", file=stream, flush=True)
    assert os.read(reading, 1 << 20).endswith(b"\\xe4\\udcff\n")
    os.close(reading)
    print("nobody reads this", file=stream, flush=True)
    os.close(writing)


TRAIN = ["--serial", "cartpole", *settings("run.max_env_steps=600", "run.dir=run")]


@pytest.mark.parametrize("streams", ["closed", "a reader that leaves", "/dev/full", "a reader that does not read"])
def test_a_run_ends_whole_whatever_becomes_of_its_output(streams: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        if streams == "closed":  # which an interpreter sees at its start
            command = ["bash", "-c", f"{sys.executable} -m ddrl.run {' '.join(TRAIN)} >&- 2>&-"]
            job = subprocess.Popen(command, cwd=tmp_path, env=environment())
        elif streams == "/dev/full":
            full = stack.enter_context(open("/dev/full", "w"))
            job = Job(TRAIN, cwd=tmp_path, stdout=full, stderr=full)
        else:
            reading, writing = os.pipe()
            job = Job(TRAIN, cwd=tmp_path, stdout=writing, stderr=writing)
            os.close(writing)
            if streams == "a reader that leaves":
                assert os.read(reading, 1)
                os.close(reading)
            else:
                fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 4096)
                stack.callback(os.close, reading)
        assert job.wait(PATIENCE) == 0
    assert run_status(tmp_path / "run").state == "ended"
    with Run(tmp_path / "run") as run:
        assert run.series()["env_steps"][-1] >= 600


def test_output_that_was_asked_for_and_cannot_be_written_is_said(tmp_path: Path) -> None:
    code = "from ddrl.core.forks import *; keep_streams(None); print('x'); import sys; sys.exit(checked_output(0))"
    for target, status in (("/dev/full", 1), ("/dev/null", 0)):
        with Path(target).open("w") as output:
            done = subprocess.run([sys.executable, "-c", code], stdout=output, stderr=subprocess.PIPE, check=False)
        assert done.returncode == status
        assert (b"No space left" in done.stderr) == (status == 1)


def test_settings_that_cannot_be_printed_are_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ddrl.run", "--print-config"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=PATIENCE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "ddrl: the output cannot be written: No space left on device\n")


def test_a_command_hears_how_its_children_end_where_its_parent_ignores_those_of_its_own() -> None:
    child = "import subprocess; print(subprocess.call('exit 7', shell=True))"
    command = [sys.executable, "-c", f"from ddrl.core.forks import keep_streams; keep_streams(); {child}"]
    begin = f"import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv({command[0]!r}, {command!r})"
    done = subprocess.run([sys.executable, "-c", begin], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "7\n"


@pytest.mark.parametrize("command", ["ddrl.notebook", "ddrl.testing.chaos"])
def test_a_command_keeps_its_streams_from_its_begin(command: str) -> None:
    program = f"""
import runpy, sys
sys.argv = ["", "--help"]
try:
    runpy.run_module({command!r}, run_name="__main__")
finally:
    print(type(sys.stdout).__module__, type(sys.stderr).__module__)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.endswith("ddrl.core.forks ddrl.core.forks\n")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("ddrl.admix.load http://127.0.0.1:9/NAME", 1),
        ("ddrl.testing.chaos NAME", 1),
        ("ddrl.notebook --copy NAME", 0),
    ],
)
def test_what_a_command_says_is_written_in_the_letters_that_its_output_has_or_left_out(
    command: str, status: int, tmp_path: Path
) -> None:
    letters = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    words = f"{sys.executable} -m {command.replace('NAME', 'Läufe')}"
    for streams in ("", ">&- 2>&-", ">/dev/full 2>&1"):
        done = subprocess.run(
            f"{words} {streams}",
            shell=True,
            cwd=tmp_path,
            env=letters,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        if not streams:
            assert "L\\xe4ufe" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "is_shortage"),
    [
        ("raise MemoryError", True),
        ("raise ImportError('libtorch_cpu.so: failed to map segment from shared object')", True),
        ("raise ImportError('no module of that name')", False),
        ("import theirs", False),
    ],
)
def test_a_command_that_ends_for_want_of_memory_says_so_in_a_line(code: str, is_shortage: bool, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("raise MemoryError\n")  # the user's own code, which is shown
    start = "from ddrl.core.forks import keep_streams\nkeep_streams()\n"
    command = [sys.executable, "-c", start + code]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    if is_shortage:
        assert done.stderr.startswith("ddrl: there is no memory left: give the process more")
        assert done.stderr.count("\n") == 1
    else:
        assert "Traceback" in done.stderr


def test_a_process_of_a_run_that_fails_for_want_of_memory_says_so_in_a_line() -> None:
    assert describe(MemoryError(), "the trainer").startswith("the trainer: there is no memory left: ")

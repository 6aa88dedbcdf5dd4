"""What a process that works is watched for, and what code of the user is left that takes too long."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from ddrl.core import forks
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

LOOK_PERIOD = 0.2  # [s]
COMMAND = """
import os, signal, sys, time
from pathlib import Path
from ddrl.core import forks

forks.END_SECONDS = forks.GRACE = 1
forks.LOOK_PERIOD = {look}

def handle(*numbers):
    for number in numbers:
        signal.signal(number, lambda number, frame: print(number, flush=True))

def wait():
    try:
        print("up", flush=True)
        while True:
            time.sleep(9)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130

def wait_for_ever():
    while True:
        try:
            wait()
        except KeyboardInterrupt:  # one that came meanwhile
            pass

def work():
    forks.note_work("Odd-v0", Path({run!r}))
    {text}
    return 3

def after(run, pid, why):
    print("after", run, why)

forks.end_process(forks.watched(work, after))
"""


def start(text, run=""):
    command = [sys.executable, "-c", COMMAND.format(text=text, run=str(run), look=LOOK_PERIOD)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("os._exit(0)", "exited with status 0"),
        ("os._exit(7)", "exited with status 7"),
        ("import ctypes; ctypes.CDLL(None).exit(0)", "exited with status 0"),
        ("signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(9)", "was killed by SIGALRM"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.abort()", "was killed by SIGABRT"),
    ],
)
def test_a_process_that_ends_before_its_work_is_done_is_said_in_one_line(text, how, tmp_path):
    out, errors = (job := start(text)).communicate(timeout=PATIENCE)
    assert job.returncode == 1
    (line,) = errors.splitlines()
    assert out == f"after . {line.removeprefix('ddrl: ')}\n"
    assert line.startswith(f"ddrl: env.id = Odd-v0: its process {how} before its work was done; take out of it")
    (tmp_path / "checkpoints" / "000000001500").mkdir(parents=True)
    (line,) = start(text, tmp_path).communicate(timeout=PATIENCE)[1].splitlines()
    assert line.endswith(f"go on from 1,500 steps: python -m ddrl.run --serial --resume {tmp_path}")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("pass", 3),
        ("import atexit; atexit.register(time.sleep, 1000)", 3),  # what holds a process whose work is done
        ("import threading; threading.Thread(target=time.sleep, args=(1000,)).start()", 3),
        ("import argparse; argparse.ArgumentParser().parse_args(['--none'])", 2),
        ("1 / 0", 1),
    ],
)
def test_work_that_is_done_has_its_own_status(text, status):
    job = start(text)
    out, errors = job.communicate(timeout=PATIENCE)
    assert "before its work was done" not in errors
    assert job.returncode == status
    assert out == ("after  \n" if "1000" in text and "atexit" in text else "")  # nothing is left by what ends in order


def is_read(pid, number):
    """Whether a process that blocks a signal has read the one that it was sent."""
    (pending,) = re.findall(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return not int(pending, 16) >> (number - 1) & 1


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["the process", "the group"])
@pytest.mark.parametrize(
    ("text", "numbers", "printed", "status"),
    [
        ("return wait()", [signal.SIGINT], "interrupted", 130),
        ("handle(signal.SIGUSR1); wait()", [signal.SIGUSR1, signal.SIGTERM], "10", 143),
        ("wait_for_ever()", [signal.SIGINT, signal.SIGINT], "interrupted", 130),
        ("wait()", [signal.SIGTERM], "", 143),
    ],
    ids=["interrupt", "user's", "second interrupt", "terminate"],
)
def test_signals_are_passed_on_once_and_a_second_interrupt_ends_what_takes_none(text, numbers, printed, status, kill):
    job = start(text)
    assert job.stdout.readline() == "up\n"
    for number in numbers:
        wait_until(partial(is_read, job.pid, number), "the first signal is read")  # two of a kind become one
        kill(job.pid, number)
        if printed and number == numbers[0]:  # handled before the next one is sent
            # The group's comes directly and passed on: it may be handled inside the printing of the first.
            assert job.stdout.readline().replace(printed, "", 1 + (kill is os.killpg)) == "\n"
            printed = ""
    out, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == status, (out, errors)
    assert ("ended at once by Ctrl-C" in errors) == (len(numbers) == 2 and numbers[1] == signal.SIGINT)


def test_a_command_that_was_stopped_for_long_goes_on():
    """As by Ctrl-Z and fg: a wait that such a stop outlasts is no signal."""
    job = start("return wait()")
    assert job.stdout.readline() == "up\n"

    def is_stopped() -> bool:
        return Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    for _ in range(3):
        job.send_signal(signal.SIGSTOP)
        wait_until(is_stopped, "it stops")
        time.sleep(3 * LOOK_PERIOD)
        job.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_stopped(), "it goes on")
    job.send_signal(signal.SIGINT)
    out, errors = job.communicate(timeout=PATIENCE)
    assert (job.returncode, out, errors) == (130, "interrupted\n", "")


def test_a_watched_process_ends_with_the_one_that_watches_it():
    job = start("wait()")
    assert job.stdout.readline() == "up\n"
    job.kill()
    assert job.communicate(timeout=PATIENCE) == ("", "")  # the other one's end of both is closed


def test_code_that_takes_too_long_is_left_with_a_line_that_names_its_place(capfd):
    with forks.limited(0.05, "env.id = X: its close does not return"):
        time.sleep(1000.0)
    assert "X: its close does not return: left after 0.05 s (test_forks.py" in capfd.readouterr().err
    before = signal.getsignal(signal.SIGALRM)
    with forks.limited(1000.0, "nothing"):
        pass
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGALRM) == before


def test_alarms_of_the_user_s_own_reach_their_handler_meanwhile(capfd):
    rung = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.set())
    try:
        with forks.limited(1000.0, "nothing"):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            assert rung.wait(PATIENCE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert capfd.readouterr().err == ""


def test_code_that_no_exception_reaches_ends_with_its_process():
    text = "with forks.limited(0.1, 'its close does not return'):\n        while True:\n            "
    text += "try: time.sleep(1000.0)\n            except BaseException: pass"
    _, errors = start(text).communicate(timeout=PATIENCE)
    assert "its close does not return, and cannot be left: its process ends here" in errors
    assert "exited with status 1" in errors

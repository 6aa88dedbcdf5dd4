"""Sweeps: which runs there are, that a mistake is said before any begins, and that one goes on where it stopped."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from ddrl import sweep
from ddrl.core.errors import ConfigError
from ddrl.telemetry import find_runs
from ddrl.telemetry.directory import run_status
from tests.run.launch import TINY, settings
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until


def test_each_choice_of_values_has_a_run_for_each_seed(tmp_path):
    points = sweep.points_of(tmp_path, ["learner.lr=1e-3,3e-4", "learner.hidden=[64,64],[8]"], 2)
    assert len(points) == 8
    assert points[0].path.name == "lr=1e-3,hidden=_64,64_,seed=1"
    assert points[0].overrides == ("learner.lr=1e-3", "learner.hidden=[64,64]", "run.seed=1")
    assert len({point.path for point in points}) == 8
    assert [point.path.name for point in sweep.points_of(tmp_path, [], 3)] == ["seed=1", "seed=2", "seed=3"]


@pytest.mark.parametrize("over", [["learner.lr"], ["learner.lr="], ["lr=1e-3"], ["learner.lr=1,1"], ["learner.lr=,"]])
def test_what_makes_no_sweep_is_refused(tmp_path, over):
    with pytest.raises(ConfigError, match="--over"):
        sweep.points_of(tmp_path, over, 1)


def test_a_typing_error_is_said_before_the_first_run_begins(tmp_path, capsys):
    assert sweep.main(["cartpole", "--over", "learner.lrr=1,2", "--folder", str(tmp_path / "s")]) == 2
    assert "learner.lrr" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_log_that_cannot_be_written_fails_its_run_alone(tmp_path, capsys):
    folder = tmp_path / "s"
    (folder / "seed=1.log").mkdir(parents=True)
    words = ["cartpole", "--folder", str(folder), "--seeds", "2", "--serial", *TINY]
    assert sweep.main([*words, *settings("run.max_env_steps=200", "evaluation.period=0")]) == 1
    said = capsys.readouterr().out
    assert "seed=1: not started, its log cannot be written:" in said
    assert "1 of 2 runs have ended, 1 failed" in said
    assert run_status(folder / "seed=2").reason == "run.max_env_steps reached"


def test_only_runs_that_have_ended_are_counted_as_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: True)  # none has been begun, and none has failed
    assert sweep.main(["cartpole", "--seeds", "3", "--folder", str(tmp_path / "s")]) == 0
    assert "0 of 3 runs have ended, 0 failed" in capsys.readouterr().out


def test_a_sweep_goes_on_where_its_lines_cannot_be_written(tmp_path):
    words = ["cartpole", "--folder", str(tmp_path), "--seeds", "1", "--serial", *TINY]
    words += settings("run.max_env_steps=200", "evaluation.period=0")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ddrl.sweep", *words]
        done = subprocess.run(command, env=environment(), stdout=full, timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert run_status(tmp_path / "seed=1").reason == "run.max_env_steps reached"


def endless(tmp_path):
    """A sweep of two runs that take minutes until the file `quick` is there, and its folder."""
    folder = tmp_path / "s"
    command = [sys.executable, "-m", "ddrl.sweep", "cartpole", "--over", "learner.lr=1e-3,2e-3"]
    command += ["--folder", str(folder), "--parallel", "2", "--serial", *TINY]
    command += settings(
        "env.id=tests.run.environments:walk",
        f"env.kwargs={{pause = 0.2, until = '{tmp_path / 'quick'}'}}",
        "run.max_env_steps=1000",
        "run.checkpoint_period=40",
        "evaluation.period=0",
    )
    return command, folder


def begun(command, folder):
    """The sweep, once both of its runs have saved a checkpoint."""
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(find_runs(folder)) == 2, "both runs")
    wait_until(lambda: all(any(run.glob("checkpoints/*")) for run in find_runs(folder)), "a checkpoint of each")
    return process


@pytest.mark.long  # of SIGTERM a test below
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_the_runs_of_a_sweep_that_is_ended_save_and_end_too(tmp_path, number):
    command, folder = endless(tmp_path)
    process = begun(command, folder)
    process.send_signal(number)
    said, _ = process.communicate(timeout=PATIENCE)
    if number == signal.SIGKILL:
        wait_until(lambda: all(run_status(path).state == "ended" for path in find_runs(folder)), "the end of both runs")
    else:
        assert process.returncode == 130
        assert "goes on with what is left" in said
    assert {(one.state, one.reason) for one in map(run_status, find_runs(folder))} == {("ended", "interrupted")}


def test_a_further_interrupt_reaches_the_runs_that_still_save(tmp_path):
    class Saving:
        """Ends at the second signal, which the user sends while the sweep waits."""

        pid = 1
        signals = 0
        has_waited = False

        def poll(self):
            if self.signals == 1 and not self.has_waited:
                self.has_waited = True
                raise KeyboardInterrupt
            return 0 if self.signals == 2 else None

        def send_signal(self, number):
            self.signals += 1

    runs = sweep.Sweep([], "cartpole", [], 1)
    runs._running.append((sweep.Point(tmp_path, ()), Saving()))
    runs._stop()
    assert not runs._alive()


def test_a_sweep_sleeps_until_a_run_ends(tmp_path):
    runs = sweep.Sweep([], "cartpole", [], 1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        runs._running.append((sweep.Point(tmp_path, ()), process))
        ending = threading.Timer(0.1, process.stdin.close)
        ending.start()
        begin = time.monotonic()
        runs._await_end(PATIENCE)
        assert time.monotonic() - begin < PATIENCE
        assert not runs._alive()
        ending.join()


def test_the_runs_of_a_sweep_that_is_terminated_save_and_it_goes_on_where_it_stopped(tmp_path):
    command, folder = endless(tmp_path)
    first = begun(command, folder)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 130, said
    assert "goes on with what is left" in said
    assert {(one.state, one.reason) for one in map(run_status, find_runs(folder))} == {("ended", "interrupted")}
    (tmp_path / "quick").touch()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goes on" in done.stdout
    for path in find_runs(folder):
        assert run_status(path).reason == "run.max_env_steps reached"
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert "begins" not in again.stdout
    assert "2 of 2 runs have ended" in again.stdout

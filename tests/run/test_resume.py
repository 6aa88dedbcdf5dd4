"""Resume is whole: the best policy, the ratio of samples to inserts, live settings and totals all go on."""

import json
import os
from pathlib import Path

import pytest

from ddrl.core.roles import Evaluation, Returns
from ddrl.notebook import learning_rate
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import SerialRun
from ddrl.run.task import Outcome, Reason
from ddrl.telemetry import Run
from tests.run.launch import TINY, settings, summary
from tests.run.preloaded import serial


def run_id(folder: Path) -> str:
    """Of this process alone: other processes run other tests at the same time."""
    return f"r{os.getpid()}{folder.name}"


def start(folder: Path, *more: str) -> SerialRun:
    return SerialRun(Preparation(parse(["--serial", *TINY, "--set", f"run.dir={folder}", *more]), run_id(folder)))


def resume(folder: Path, *more: str) -> SerialRun:
    return SerialRun(Preparation(parse(["--serial", "--resume", str(folder), *more]), run_id(folder)))


def go_on(run: SerialRun, env_steps: int) -> None:
    wanted = run.task.training.state.env_steps + env_steps
    while run.task.training.state.env_steps < wanted and run.turn() is not Outcome.DONE:
        pass


def stop(run: SerialRun) -> dict:
    run.task.end(Reason.INTERRUPTED)
    try:
        return run.finish()
    except BaseException as error:
        run.abandon(error)  # as a run does that ends with it: nothing is left in shared memory
        raise


def policy(folder: Path) -> dict:
    return json.loads((folder / "policy.json").read_text())["evaluation"]


def test_a_resumed_run_never_replaces_the_best_policy_by_a_worse_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, "--set", "evaluation.period=0")
    go_on(run, 500)
    run.task.checkpoints.write()
    run.task.accept(Evaluation(7, 500, Returns(500.0, 0.0, 20)), run.task.acting_vector())  # after the checkpoint
    stop(run)
    best = (folder / "policy.safetensors").read_bytes()
    again = resume(folder)
    again.task.accept(Evaluation(9, 900, Returns(480.0, 0.0, 20)), again.task.acting_vector() * 0)
    assert stop(again)["evaluation"]["mean"] == 500.0
    assert policy(folder)["mean"] == 500.0
    assert (folder / "policy.safetensors").read_bytes() == best
    better = resume(folder)
    better.task.accept(Evaluation(11, 1200, Returns(501.0, 0.0, 20)), better.task.acting_vector())
    stop(better)
    assert policy(folder)["mean"] == 501.0


def test_a_confirmed_policy_stands_above_a_lucky_one(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "--set", "evaluation.period=0", "--set", "run.target_return=490.0")
    task = run.task
    task.accept(Evaluation(1, 100, Returns(495.0, 1.0, 20), Returns(492.0, 1.0, 100)), task.acting_vector())
    task.accept(Evaluation(2, 200, Returns(500.0, 0.0, 20), Returns(430.0, 90.0, 100)), task.acting_vector())
    assert task.best.target_reached
    stop(run)
    assert policy(tmp_path / "run")["confirmed"]["mean"] == 492.0


def test_a_live_change_of_the_ratio_owes_nothing_after_a_resume(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "--set", "evaluation.period=0")
    go_on(run, 1500)
    handlers = run.task.steering.handlers()
    handlers["set"]("replay.samples_per_insert", 8.0)
    handlers["set"]("learner.lr", 1e-5)
    handlers["set"]("rollout.epsilon", 0.25)
    go_on(run, 500)
    updates = run.task.training.state.updates
    stop(run)
    again = resume(tmp_path / "run")
    live = again.task.training.live
    assert (live.samples_per_insert, live.lr, live.epsilon) == (8.0, 1e-5, 0.25)
    again.turn()
    assert again.task.training.state.updates - updates < 32  # what eight new steps allow
    go_on(again, 400)
    rate = (again.task.training.state.updates - updates) * 16 / 400
    assert rate == pytest.approx(8.0, rel=0.3)
    assert again.task.training.learner.lr == 1e-5
    stop(again)
    last = resume(tmp_path / "run", "--set", "learner.lr=0.5")
    assert last.task.training.live.lr is None  # what is set now comes before what was set live
    assert last.task.config.learner.lr == 0.5
    stop(last)
    with Run(tmp_path / "run") as tables:
        starts = tables.events(kinds=["start"])["fields"]
        assert [fields["live"]["lr"] for fields in starts] == [None, 1e-5, None], "what is in force from each start on"
        assert learning_rate(tables) == 0.5, "not what was set live before"
    assert "lr = 0.5" in (tmp_path / "run" / "config.toml").read_text()


def test_totals_never_fall_and_no_curve_runs_backwards(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert serial(*TINY, "--set", f"run.dir={folder}", "--set", "telemetry.period=0.05").returncode == 0
    done = serial("--resume", str(folder), "--set", "run.max_env_steps=6000")
    assert done.returncode == 0, done.stderr
    with Run(folder) as run:
        series = run.series(["env_steps", "updates", "episodes", "samples", "publishes", "rows_recorded"])
        for name in ("env_steps", "updates", "episodes", "samples", "publishes", "rows_recorded"):
            values = [value for value in series[name].tolist() if value == value]
            assert len(values) > 5
            assert values == sorted(values), name
        wall = series["wall_seconds"].tolist()
        assert wall == sorted(wall)
    for name in ("episodes", "publishes"):
        assert summary(folder)[name] == series[name][-1], "of the whole run"


def test_go_on_names_the_launcher_that_was_used(tmp_path: Path) -> None:
    """Of mpirun: tests/run/test_processes.py."""
    done = serial(*TINY, *settings("run.max_env_steps=600", f"run.dir={tmp_path / 'a'}"))
    assert f"go on:    python -m ddrl.run --serial --resume {tmp_path / 'a'}" in done.stdout


def test_a_replay_in_a_file_leaves_none_and_a_resumed_run_makes_it_anew(tmp_path: Path) -> None:
    file = tmp_path / "replay"
    for words in (
        [*TINY, *settings(f"replay.file={file}", f"run.dir={tmp_path / 'run'}", "run.max_env_steps=400")],
        ["--resume", str(tmp_path / "run"), *settings("run.max_env_steps=600")],
    ):
        done = serial(*words)
        assert done.returncode == 0, done.stderr
        assert not file.exists()
    assert summary(tmp_path / "run")["env_steps"] == 600

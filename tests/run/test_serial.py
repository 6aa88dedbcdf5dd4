"""One process: the same bits from the same seed, and across a resume."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddrl.run.serial import SerialRun
from ddrl.run.task import Outcome
from ddrl.telemetry import Run
from tests.run.launch import TINY, balances, ddrl, segments_of, settings, summary
from tests.run.preloaded import forked, serial
from tests.sources import environment
from tests.waiting import PATIENCE

KILLED = [sys.executable, "-m", "tests.run.killed_serial"]


def run(folder: Path, seed: int, *more: str, start: Any = forked) -> None:
    done = start("--serial", *TINY, "--set", f"run.seed={seed}", "--set", f"run.dir={folder}", *more)
    assert done.returncode == 0, done.stderr


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


def learned(checkpoint: Path) -> str:
    """Hash of the parameters, moments and counts that learning left."""
    digest = hashlib.sha256()
    for name, array in sorted(load_file(checkpoint / "learner.safetensors").items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def recorded(checkpoint: Path) -> str:
    """Hash of the replay snapshot."""
    return hashlib.sha256((checkpoint / "replay.snapshot").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("serial") / "first"
    run(folder, 3, start=ddrl)  # the others are forks, which must have its bits
    return folder


def test_a_run_leaves_everything_the_readme_names(first):
    assert {path.name for path in first.iterdir()} >= {
        "config.toml",
        "telemetry.sqlite",
        "checkpoints",
        "policy.onnx",
        "policy.json",
        "policy.safetensors",
        "summary.json",
    }
    written = summary(first)
    assert written["env_steps"] >= 3000
    assert written["updates"] > 100
    assert written["evaluation"]["episodes"] == 4
    assert written["policy_lag"]["p99"] >= written["policy_lag"]["p50"] >= 0
    assert segments_of(first) == []


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(first, tmp_path):
    run(tmp_path / "again", 3)
    done = serial(*TINY, *settings("run.seed=4", f"run.dir={tmp_path / 'other'}"))
    assert done.returncode == 0, done.stderr
    assert learned(newest(tmp_path / "again")) == learned(newest(first))
    assert recorded(newest(tmp_path / "again")) == recorded(newest(first))
    assert learned(newest(tmp_path / "other")) != learned(newest(first))


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(first, tmp_path):
    resumed = tmp_path / "resumed"
    shutil.copytree(first, resumed)
    checkpoints = sorted((resumed / "checkpoints").iterdir())
    assert len(checkpoints) == 3
    for later in checkpoints[1:]:
        shutil.rmtree(later)
    done = serial("--resume", str(resumed))
    assert done.returncode == 0, done.stderr
    assert newest(resumed).name == newest(first).name
    assert learned(newest(resumed)) == learned(newest(first))
    assert recorded(newest(resumed)) == recorded(newest(first))
    assert json.loads((resumed / "summary.json").read_text())["updates"] == summary(first)["updates"]


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_a_run_that_is_killed_at_random_points_ends_with_the_bits_of_an_uninterrupted_one(first, kills, tmp_path):
    done_kills = 0
    for turn in range(kills):
        killed = tmp_path / str(turn)
        done = subprocess.run(
            [*KILLED, str(killed), str(turn), "5", *TINY, "--set", "run.seed=3"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=environment(),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        done_kills += int(done.stdout.splitlines()[-1])
        assert newest(killed).name == newest(first).name
        assert learned(newest(killed)) == learned(newest(first))
        assert recorded(newest(killed)) == recorded(newest(first))
        assert balances(killed)["env_steps"] == summary(first)["env_steps"]
        assert segments_of(killed) == []
        shutil.rmtree(killed)
        if done_kills >= kills:
            return
    raise AssertionError(f"only {done_kills} parts were killed")


@pytest.mark.parametrize("mode", ["serial", "local"])
def test_updates_compute_without_denormal_numbers(mode, tmp_path):
    wanted = settings("learner.network=tests.run.networks:FlushesDenormals", f"run.dir={tmp_path / 'run'}")
    start = serial if mode == "serial" else forked
    done = start(*TINY, *wanted, *settings("run.max_env_steps=600"))
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["updates"] > 10


def test_the_last_evaluation_is_over_before_any_environment_of_the_process_is_closed(tmp_path):
    run(tmp_path / "run", 1, "--set", "env.id=tests.run.environments:Drawing", "--set", "run.max_env_steps=200")


def test_steps_without_a_look_between_them_change_no_bit(tmp_path):
    """PQN acts until a draw may be there, and makes its updates in one call; here also step by step."""
    options = ["learner.algorithm=pqn", "learner.pqn.length=24", "learner.batch_size=6", "env.num_envs=4"]
    options += ["evaluation.period=700", "run.checkpoint_period=1100", "run.max_env_steps=3001", "learner.hidden=[16]"]
    options += ["replay.samples_per_insert=0", "learner.publish_period=3", "run.target_return=1e9"]
    found = []
    for name in ("tests.run.step_by_step", "ddrl.run"):
        folder = tmp_path / name
        words = settings(*options, f"run.dir={folder}")
        done = serial(*words) if name == "ddrl.run" else ddrl("--serial", *words, module=name)
        assert done.returncode == 0, done.stderr
        written = summary(folder)
        with Run(folder) as read:
            evaluations = [read.evaluations()[name].tolist() for name in ("env_steps", "policy_version", "mean")]
        checkpoints = [(path.name, learned(path)) for path in sorted((folder / "checkpoints").iterdir())]
        found.append((written["updates"], written["publishes"], evaluations, checkpoints))
    assert found[0][0] > 50
    assert [int(name) // 1100 for name, _ in found[0][3]] == [1, 2, 2], "of both periods, and of the end"
    assert found[0] == found[1]


def test_updates_that_are_due_at_once_are_left_at_an_interrupt():
    """A first batch may owe hundreds of them, of seconds each."""
    turns = iter([True] * 1000)
    training = SimpleNamespace(
        turn=lambda: next(turns), source=SimpleNamespace(pacing=SimpleNamespace(insertable=lambda: 0)), seconds=0.0
    )
    serial = SerialRun.__new__(SerialRun)
    serial._is_interrupted = lambda: True
    serial._left = 0
    serial._next_evaluation = float("inf")
    config = SimpleNamespace(run=SimpleNamespace(max_seconds=float("inf")))
    training.state = SimpleNamespace(env_steps=0)
    serial.task = SimpleNamespace(
        training=training, steering=SimpleNamespace(paused=False), attend=lambda: True, config=config
    )
    assert serial.turn() is Outcome.DONE
    assert len(list(turns)) == 999

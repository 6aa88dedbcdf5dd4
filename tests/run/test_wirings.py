"""The same algorithm in every wiring: lanes and replay, a pool, sample areas; serial, local and under mpirun."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddrl.telemetry import Run
from tests.run.launch import TINY, mpirun, segments_of, settings, summary, wait_for_checkpoint
from tests.run.preloaded import forked, serial
from tests.run.test_serial import learned, newest
from tests.sources import environment
from tests.waiting import PATIENCE

AREAS = settings("replay.source=areas", "areas.block=50", "areas.blocks=2", "rollout.refresh=write", "replay.n_step=1")
POOL = settings("replay.source=benchmarks.admix.sources:RandomPool", "replay.capacity=1000")
SHORT = settings("run.max_env_steps=1600", "run.checkpoint_period=800", "evaluation.period=800")


@pytest.mark.parametrize("wiring", [AREAS, pytest.param(POOL, marks=pytest.mark.long)], ids=["areas", "pool"])
def test_a_serial_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(wiring: list[str], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = serial(*TINY, *SHORT, *wiring, *settings(f"run.dir={whole}"))
    assert first.returncode == 0, first.stderr
    shutil.copytree(whole, parts)
    shutil.rmtree(newest(parts))  # the end; an earlier checkpoint is left
    resumed = forked("--serial", "--resume", str(parts), "--trust")
    assert resumed.returncode == 0, resumed.stderr
    assert summary(whole)["updates"] > 50
    assert learned(newest(parts)) == learned(newest(whole))


def test_explorers_that_share_areas_teach_a_local_run_which_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    uneven = settings("run.max_env_steps=1610")  # within a block
    more = settings("run.processes=2", "learner.publish_period=5", f"run.dir={run}")
    done = forked(*TINY, *SHORT, *AREAS, *uneven, *more)
    assert done.returncode == 0, done.stderr
    first = summary(run)
    assert first["env_steps"] == 1610
    assert first["updates"] >= 10  # one look at full areas is enough, however fast explorers are
    assert first["policy_lag"]["p50"] is not None
    with Run(run) as read:
        figures = read.series(["areas_readable", "torn_batches", "replay_size"])
        assert np.nanmax(figures["areas_readable"]) >= 1
        assert np.nanmax(figures["replay_size"]) <= 2 * 3 * 50
        assert np.nanmax(figures["torn_batches"]) == 0
    assert not segments_of(run)
    resumed = forked("--resume", str(run), *settings("run.max_env_steps=3000"))
    assert resumed.returncode == 0, resumed.stderr
    assert summary(run)["updates"] > first["updates"]


def test_mpirun_on_one_host_shares_areas_and_several_hosts_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = mpirun(5, *TINY, *SHORT, *AREAS, *settings(f"run.dir={run}"))
    assert done.returncode == 0, done.stderr
    assert summary(run)["updates"] >= 10
    refused = mpirun(6, *TINY, *AREAS, *settings("cluster.relays=2", f"run.dir={tmp_path / 'two'}"))
    assert refused.returncode != 0
    assert "shared memory of one host" in refused.stderr


@pytest.mark.long
def test_an_explorer_that_dies_once_too_often_ends_the_run_with_one_message_and_leaves_no_memory(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ddrl.run", *TINY, *AREAS]
    command += settings("run.processes=2", "run.max_env_steps=100000000", "rollout.restarts=0", f"run.dir={run}")
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        wait_for_checkpoint(run, running)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        message = running.communicate(timeout=PATIENCE)[1]
    finally:
        running.kill()
    assert running.returncode != 0
    assert "killed by SIGKILL" in message
    assert "Traceback" not in message
    assert not segments_of(run)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (["learner.algorithm=r2d2", "replay.source=areas"], "trajectories or sequences"),
        (["rollout.refresh=write"], "blocks of sample areas"),
        (["replay.source=areas", "rollout.max_policy_lag=4"], "has no effect on replay.source = areas"),
        (["replay.source=areas", "areas.blocks=1"], "areas.blocks (1) must be at least 2"),
    ],
)
def test_what_areas_cannot_give_is_refused(wanted: list[str], words: str, tmp_path: Path) -> None:
    done = serial(*TINY, *settings(*wanted, f"run.dir={tmp_path / 'run'}"))
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_progress_converges_and_leaves_its_best_policy(tmp_path: Path) -> None:
    """With a step size of nothing every evaluation of the held-out episodes is the same."""
    run = tmp_path / "run"
    still = settings("run.patience=2", "learner.lr=1e-30", "evaluation.held_out=true", "evaluation.period=300")
    done = serial(*TINY, *still, *settings(f"run.dir={run}"))
    assert done.returncode == 0, done.stderr
    written = summary(run)
    assert written["reason"].startswith("run.patience evaluations")
    assert 900 <= written["env_steps"] < 3000, "it ended by itself"
    assert (run / "policy.onnx").exists() or (run / "policy.json").exists()
    with Run(run) as read:
        assert len(set(read.evaluations()["mean"].tolist())) == 1


def test_rollouts_play_environments_of_their_own(tmp_path: Path) -> None:
    """Sutton and Barto's CartPole pays nothing but the fall."""
    own = ("--set", "env.by_rollout=[{sutton_barto_reward=true}]")
    done = serial(*TINY, *own, *settings("run.max_env_steps=600", f"run.dir={tmp_path / 'run'}"))
    assert done.returncode == 0, done.stderr
    written = summary(tmp_path / "run")
    assert written["episodes"] > 0
    with Run(tmp_path / "run") as read:
        returns = read.series(["return_mean"])["return_mean"]
        assert (returns[np.isfinite(returns)] <= 0).all()
        assert read.evaluations()["mean"].min() > 0

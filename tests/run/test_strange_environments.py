"""Environments that do what Python allows: a run of them trains, or ends with one line that names the remedy."""

import os
import sys
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from ddrl.core.config import EnvConfig
from ddrl.core.errors import EnvError
from ddrl.core.settings import load_config
from ddrl.envs import make_vector_env
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation, probe_in_fork
from ddrl.run.serial import run_serial
from tests.run.environments import Walk
from tests.run.launch import TINY, settings
from tests.run.preloaded import forked

HERE = "tests.run.test_strange_environments"
SHORT = [*TINY, "--serial", *settings("run.max_env_steps=400", "evaluation.period=0")]


class OneNumber(Walk):
    """Its action is a number without an axis."""

    action_space = gymnasium.spaces.Box(-2.0, 2.0, (), np.float32)

    def step(self, action):
        assert np.shape(action) == ()
        return super().step(float(action) > 0)


class WithoutSeed(Walk):
    def reset(self):
        return super().reset()


class LeavesAtOnce(Walk):
    def __init__(self) -> None:
        sys.exit("no licence")


class ClosesOnce(Walk):
    """Its server, one of the process, is gone once one of them was closed."""

    connected = True

    def close(self) -> None:
        if not ClosesOnce.connected:
            raise RuntimeError("not connected")
        ClosesOnce.connected = False


class Leaves(Walk):
    def step(self, action):
        if self.steps == 40:
            sys.exit(3)
        return super().step(action)


class LeavesAThread(Walk):
    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, name="listener").start()


class Opponent(Walk):
    """Computes by torch in its own way, as one that plays against a network."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)

    def reset(self, *, seed=None, options=None):
        self.compute()
        return super().reset(seed=seed)

    def step(self, action):
        self.compute()
        return super().step(action)

    def compute(self) -> None:
        import torch

        computed = torch.nn.functional.linear(torch.ones(1), torch.ones(1, 1).requires_grad_()).numpy()
        assert computed.dtype == np.float64


@pytest.mark.parametrize("period", [0, 200])
def test_torch_as_an_environment_sets_it_is_its_own_beside_a_learner(period: int, tmp_path: Path) -> None:
    import torch

    given = settings(f"run.dir={tmp_path / 'run'}", f"env.id={HERE}:Opponent", f"evaluation.period={period}")
    try:
        summary = run_serial(Preparation(parse([*SHORT, *given]), f"opponent{os.getpid()}"))
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    assert summary["updates"] > 0


@pytest.mark.parametrize("algorithm", ["td3", "d4pg"])
def test_an_action_without_an_axis_is_learned(algorithm: str, tmp_path: Path) -> None:
    given = settings(f"run.dir={tmp_path / 'run'}", f"env.id={HERE}:OneNumber", f"learner.algorithm={algorithm}")
    summary = run_serial(Preparation(parse([*SHORT, *given]), f"strange{os.getpid()}"))
    assert summary["updates"] > 0


def test_a_reset_without_a_seed_is_refused_by_what_to_define() -> None:
    with pytest.raises(EnvError, match=r"'seed': define reset\(self, \*, seed=None, options=None\)"):
        make_vector_env(EnvConfig(id=f"{HERE}:WithoutSeed"), 1).reset(0)


def test_an_environment_that_exits_ends_the_run_with_its_line(tmp_path: Path) -> None:
    done = forked(*SHORT, *settings(f"run.dir={tmp_path / 'run'}", f"env.id={HERE}:Leaves"))
    assert done.returncode == 1
    assert "SystemExit: 3 (test_strange_environments.py, line" in done.stderr


def test_an_environment_that_exits_before_the_run_is_refused_with_its_line() -> None:
    with pytest.raises(EnvError, match=r"SystemExit: no licence \(test_strange_environments.py, line"):
        probe_in_fork(load_config(None, [f"env.id={HERE}:LeavesAtOnce"]))


def test_an_environment_whose_close_fails_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = settings(f"run.dir={tmp_path / 'run'}", f"env.id={HERE}:ClosesOnce", "evaluation.period=200")
    summary = run_serial(Preparation(parse([*SHORT, *given]), f"closes{os.getpid()}"))
    assert summary["reason"] == "run.max_env_steps reached"
    said = capsys.readouterr().err
    words = "its close fails, which ends nothing: RuntimeError: not connected (test_strange_environments.py, line"
    assert f"ddrl: env.id = {HERE}:ClosesOnce: {words}" in said


@pytest.mark.parametrize("serial", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_thread_that_an_environment_leaves_does_not_keep_the_process(serial: bool, tmp_path: Path) -> None:
    mode = ["--serial"] if serial else settings("run.processes=1")
    given = settings("run.max_env_steps=400", f"run.dir={tmp_path / 'run'}", f"env.id={HERE}:LeavesAThread")
    done = forked(*TINY, *mode, *given, limit=120)
    assert done.returncode == 0
    assert "threads of the environment still run, and end now: listener" in done.stderr

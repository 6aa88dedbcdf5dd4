"""A run that begins with another run's weights (learner.init)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddrl.acting.policy_file import load_policy
from ddrl.core.errors import CheckpointError
from ddrl.core.plugins import foreign_code
from ddrl.learner.export import read_state
from ddrl.run.checkpoint import LEARNER, newest_checkpoint
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import run_serial
from tests.run.launch import TINY, settings


def train(run: Path, *given: str) -> Path:
    run_serial(
        Preparation(parse(["--serial", *TINY, *settings("run.max_env_steps=600", f"run.dir={run}", *given)]), "id")
    )
    return run


def weights(run: Path) -> dict[str, np.ndarray]:
    state = read_state(newest_checkpoint(run / "checkpoints").path / LEARNER, algorithm="dqn")
    return {name: array for name, array in state.items() if ".online." in name}


def test_the_first_weights_are_those_of_the_other_run_and_counts_begin_anew(tmp_path: Path) -> None:
    first = train(tmp_path / "first")
    second = train(tmp_path / "second", f"learner.init={first}", "learner.lr=1e-30", "run.seed=9")
    for name, array in weights(first).items():
        np.testing.assert_array_equal(weights(second)[name], array)
    assert load_policy(second).evaluation


def test_what_does_not_fit_is_refused_before_anything_is_learned(tmp_path: Path) -> None:
    first = train(tmp_path / "first")
    with pytest.raises(CheckpointError, match="written for another network"):
        train(tmp_path / "wider", f"learner.init={first}", "learner.hidden=[9]")
    with pytest.raises(CheckpointError, match="holds dqn"):
        train(tmp_path / "other", f"learner.init={first}", "learner.algorithm=c51")
    with pytest.raises(CheckpointError, match="nosuch: there is no checkpoint"):
        train(tmp_path / "none", f"learner.init={tmp_path / 'nosuch'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]  # and no directory of a run is left


def test_a_run_from_elsewhere_that_names_another_folder_asks_for_consent(tmp_path: Path) -> None:
    tree = {"learner": {"init": "/somewhere/else"}}
    assert foreign_code(tree, tmp_path) == {"learner.init": "/somewhere/else"}

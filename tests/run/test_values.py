"""The snapshot of predicted distributions: by algorithm, of a whole run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ddrl.evaluate import MetStates
from ddrl.run.task import values_of
from ddrl.telemetry import Run
from tests.run.launch import TINY, settings
from tests.run.preloaded import serial

SHORT = settings("run.max_env_steps=1200", "run.checkpoint_period=0", "learner.discount=0.9")
TWO_NUMBERS = settings(
    "env.id=ddrl.admix:generated", "env.num_envs=2", "learner.algorithm=d4pg", "learner.d4pg.atoms=7",
    'env.kwargs={requests=300, contracts=2, bids=2, regions=2, ages=1, mode="bonuses", repeat=10, relative=true, '
    'reward_by="contract"}', "rollout.epsilon_start=0.5", "learner.d4pg.actor_anchor=0", "rollout.epsilon_end=0.5",
)  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "form", "numbers", "lines", "atoms"),
    [
        pytest.param(
            settings("learner.algorithm=c51", "learner.c51.atoms=11"), "probability", 1, 2, 11, marks=pytest.mark.long
        ),
        (settings("learner.algorithm=qrdqn", "learner.qrdqn.quantiles=8"), "quantile", 1, 2, 8),
        (TWO_NUMBERS, "probability", 2, 2, 7),
    ],
    ids=["c51", "qrdqn", "d4pg"],
)
def test_a_run_leaves_what_its_critic_predicted_beside_the_returns_that_followed(
    chosen: list[str], form: str, numbers: int, lines: int, atoms: int, tmp_path: Path
) -> None:
    done = serial(*TINY, *SHORT, *chosen, *settings(f"run.dir={tmp_path / 'run'}"))
    assert done.returncode == 0, done.stderr
    with Run(tmp_path / "run") as run:
        values = run.snapshot("values")
    assert values is not None
    predicted, state = np.array(values["predicted"]), np.array(values["state"])
    assert values["form"] == form
    assert predicted.shape == (4, numbers, atoms)
    assert state.shape == (4, lines, atoms)
    assert len(values["atoms"]) == atoms
    if form == "probability":
        np.testing.assert_allclose(predicted.sum(2), 1, atol=1e-5)
    else:
        assert (np.diff(predicted, axis=2) >= 0).all()
    assert values["returns"][0][0]
    if values["discrete"]:
        assert set(values["taken"]) <= {0, 1}
        assert max(values["returns"][0][0]) <= 10  # 1 a step, discounted by 0.9


def test_a_run_without_distributions_leaves_none(tmp_path: Path) -> None:
    done = serial(*TINY, *SHORT, *settings(f"run.dir={tmp_path / 'run'}"))
    assert done.returncode == 0, done.stderr
    with Run(tmp_path / "run") as run:
        assert run.snapshot("values") is None


def test_the_state_that_is_shown_is_the_first_environments_and_so_is_the_action_taken_in_it() -> None:
    chosen = np.array([[1, 0, 0], [0, 1, 1]])  # by moment and environment
    quantile = np.zeros((6, 2, 4))  # of each met state and action
    quantile[np.arange(6), chosen.ravel()] = np.arange(1.0, 7)[:, None]
    seen = SimpleNamespace(num_actions=2)
    learner: Any = SimpleNamespace(spec=seen, inspect=lambda states: {"quantile": quantile, "q": quantile.mean(2)})
    returns = np.array([[[1.0], [np.nan], [3.0]], [[4.0], [5.0], [6.0]]])
    values = values_of(learner, MetStates(np.zeros((2, 3, 1)), np.array([0, 9]), returns))
    assert values["taken"].tolist() == [1, 0]
    assert values["state"].tolist() == [[[0] * 4, [1] * 4], [[4] * 4, [0] * 4]]
    assert values["predicted"].shape == (2, 1, 4)
    assert [values["predicted"][moment, 0, [0, -1]].tolist() for moment in (0, 1)] == [[1.0, 3.0], [4.0, 6.0]]
    assert values["returns"] == [[[1.0, 3.0]], [[4.0, 5.0, 6.0]]]

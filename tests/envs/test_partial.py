"""Environments that show part of their observation."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest

import ddrl
from ddrl.core.errors import EnvError
from ddrl.core.settings import load_config
from ddrl.envs.making import make_vector_env, partly_observed

TASK = Path(ddrl.__file__).parent / "tasks" / "cartpole_positions.toml"


def test_the_kept_entries_are_those_of_the_whole_environment() -> None:
    whole, part = gymnasium.make("CartPole-v1"), partly_observed("CartPole-v1", [2, 0])
    (seen, _), (kept, _) = whole.reset(seed=3), part.reset(seed=3)
    for turn in range(8):
        np.testing.assert_array_equal(kept, seen[[2, 0]])
        (seen, *_), (kept, *_) = whole.step(turn % 2), part.step(turn % 2)
    assert part.observation_space.contains(kept)


def test_the_task_hides_velocities() -> None:
    assert make_vector_env(load_config(TASK).env, 2).spec.observation.shape == (2,)


@pytest.mark.parametrize("keep", [[], [4], [-1]])
def test_entries_that_are_not_there_are_refused(keep: list[int]) -> None:
    with pytest.raises(EnvError, match="must name entries 0 to 3 of CartPole-v1"):
        partly_observed("CartPole-v1", keep)


def test_only_vectors_have_parts() -> None:
    with pytest.raises(EnvError, match="name an environment that observes a vector"):
        partly_observed("FrozenLake-v1", [0])

"""Environments that draw from the generators of the process are reproduced by run.seed, and evaluations disturb no
training."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from ddrl.core.forks import Generators, generators_kept, seed_generators
from ddrl.envs.spaces import environment_seeds
from ddrl.envs.vectors import LoopVectorEnv
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import run_serial
from tests.run.launch import TINY
from tests.run.test_serial import learned, newest
from tests.run.test_turns import run_in_turns

SOURCES = {
    "numpy": lambda env: np.random.rand(),
    "python": lambda env: random.random(),
    "torch": lambda env: float(torch.rand(())),
    "action_space": lambda env: env.action_space.sample(),
    "observation_space": lambda env: env.observation_space.sample()[0],
}


class Drawing(gymnasium.Env[Any, Any]):
    """Observes what it draws, from spaces that all of its kind share."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, source: str) -> None:
        self.draw = SOURCES[source]

    def look(self) -> np.ndarray:
        return np.array([self.steps / 10, self.draw(self)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        return self.look(), float(action), False, self.steps == 10, {}


def prepare(folder: Path, source: str, period: int, seed: int = 1) -> Preparation:
    arguments = [
        *TINY,
        *("--set", f"env.id={__name__}:Drawing", "--set", f"env.kwargs.source={source}"),
        *("--set", "run.max_env_steps=700", "--set", "run.checkpoint_period=400"),
        *("--set", f"evaluation.period={period}", "--set", f"run.seed={seed}", "--set", f"run.dir={folder}"),
        "--serial",
    ]
    return Preparation(parse(arguments), f"draws{os.getpid()}{folder.name}")


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_is_the_same_by_its_seed_and_with_evaluations(source: str, tmp_path: Path) -> None:
    for index, period in enumerate((0, 0, 200)):
        np.random.rand(index)  # whatever the process has drawn before
        torch.rand(index)
        random.seed(index)
        run_serial(prepare(tmp_path / f"run{index}", source, period))
    assert len({learned(newest(tmp_path / f"run{index}")) for index in range(3)}) == 1


def test_runs_in_turns_draw_what_they_draw_alone(tmp_path: Path) -> None:
    for seed in (1, 2):
        run_serial(prepare(tmp_path / f"alone{seed}", "numpy", 300, seed))
    run_in_turns([prepare(tmp_path / f"together{seed}", "numpy", 300, seed) for seed in (1, 2)])
    for seed in (1, 2):
        assert learned(newest(tmp_path / f"together{seed}")) == learned(newest(tmp_path / f"alone{seed}"))


@generators_kept()
def _draw_and_fail() -> None:
    drawn()
    raise ZeroDivisionError


def drawn() -> tuple[float, float, float]:
    return float(np.random.rand()), random.random(), float(torch.rand(()))


def test_a_seed_gives_one_stream_and_other_seeds_give_others() -> None:
    with generators_kept():
        streams = []
        for seed in (5, 5, 6):
            seed_generators(seed)
            streams.append(drawn())
    assert streams[0] == streams[1]
    assert not set(streams[0]) & set(streams[2])


def test_what_is_kept_is_drawn_again_even_after_an_error() -> None:
    before = Generators()
    expected = drawn()
    before.restore()
    with pytest.raises(ZeroDivisionError):
        _draw_and_fail()
    assert drawn() == expected


def test_environments_of_one_class_sample_streams_of_their_own() -> None:
    first, second = (LoopVectorEnv("drawing", [Drawing("action_space") for _ in range(3)]) for _ in range(2))
    shared = Drawing.action_space
    first.reset(7)
    seen = [[env.action_space.sample() for _ in range(40)] for env in first._environments]
    second.reset(7)
    assert seen == [[env.action_space.sample() for _ in range(40)] for env in second._environments]
    assert seen[0] != seen[1]
    assert all(env.action_space is not shared for env in first._environments)
    assert len(set(environment_seeds(7, 3))) == 3

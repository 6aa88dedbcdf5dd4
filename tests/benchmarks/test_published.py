"""The comparison with a plain loop finds equal numbers, other numbers, and numbers that no seed reproduces."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tests import published


class Levels(gymnasium.Env[Any, Any]):
    """Nested integers and a mask; five steps an episode."""

    unseeded = 0

    def __init__(self, drawn: bool = False) -> None:
        part = spaces.Tuple((spaces.Discrete(3), spaces.Box(-4, 6, (2,), np.int32)))
        mask = spaces.Box(0, 1, (2,), np.int8)
        self.observation_space = spaces.Dict(part=part, byte=spaces.Box(0, 255, (2,), np.uint8), action_mask=mask)
        self.action_space = spaces.Discrete(2, start=5)
        self.drawn = drawn

    def seen(self) -> dict[str, Any]:
        Levels.unseeded += 1
        level = Levels.unseeded % 7 if self.drawn else self.np_random.integers(-4, 7)
        part = (self.t % 3, np.array([level, 1], np.int32))
        byte = self.np_random.integers(0, 256, 2, np.uint8)
        return {"part": part, "byte": byte, "action_mask": np.array([1, self.t % 2], np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def step(self, action: int) -> Any:
        self.t += 1
        return self.seen(), float(action), self.t == 5, False, {}


def row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["published", *words, "--train", "0"])
    return published.main(), capsys.readouterr().out


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", f"{__name__}:Levels"])
def test_equal_numbers_are_said(env_id: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = row(capsys, monkeypatch, env_id)
    assert status == 0, text
    assert "as in a plain loop" in text


def test_other_numbers_are_found(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = row(capsys, monkeypatch, f"{__name__}:Levels", "--set", "env.scale=none")
    assert status == 1
    assert "OTHER NUMBERS than a plain loop at step 0" in text


@pytest.mark.parametrize(
    "other",
    [
        published.Step(np.array([1.0, 2.1]), 0.5, False, False),
        published.Step(np.array([1.0, 2.0, 3.0]), 0.5, False, False),
        published.Step(np.array([1.0, 2.0]), 0.25, False, False),
        published.Step(np.array([1.0, 2.0]), 0.5, True, False),
        published.Step(np.array([1.0, 2.0]), 0.5, False, True),
    ],
    ids=["another value", "another shape", "another reward", "terminated", "truncated"],
)
def test_whatever_a_step_has_other_than_the_plain_loop_is_a_difference(other: published.Step) -> None:
    step = published.Step(np.array([1.0, 2.0]), 0.5, False, False)
    assert published.first_difference([step] * 3, [step] * 3) == -1
    assert published.first_difference([step] * 3, [step, other, step]) == 1


def test_what_no_seed_reproduces_is_not_compared(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = row(capsys, monkeypatch, f"{__name__}:Levels", "--set", "env.kwargs={drawn=true}")
    assert status == 0
    assert "two plain loops of one seed differ at step 0" in text


def test_a_refusal_is_one_row(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = row(capsys, monkeypatch, "CartPole-v7")
    assert status == 0
    assert text.count("\n") == 1
    assert "refused: env.id = CartPole-v7" in text

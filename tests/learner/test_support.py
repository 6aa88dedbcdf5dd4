"""How much of the targets' probability lies beyond the support of C51 and D4PG, and that a run says so."""

from __future__ import annotations

import pytest
import torch

from ddrl.learner.losses import Support
from tests.run.launch import TINY
from tests.run.preloaded import serial


def share(reward: float, discount: float, favorite: int) -> float:
    support = Support(-10.0, 10.0, 21)
    logits = torch.full((1, 1, 21), -30.0)
    logits[..., favorite] = 30.0
    given = support.clipped(logits, logits, torch.tensor([reward]), torch.tensor([discount]))
    return float(given)


@pytest.mark.parametrize(
    ("reward", "discount", "favorite", "expected"),
    [
        (0.0, 1.0, 20, 0.0),  # a return at the end itself is inside
        (1.0, 1.0, 20, 1.0),
        (-1.0, 1.0, 0, 1.0),
        (-1.0, 1.0, 20, 0.0),
        (25.0, 0.0, 10, 1.0),
        (0.4, 1.0, 20, 0.0),  # less than half an atom
        (-0.4, 1.0, 0, 0.0),
        (0.6, 1.0, 20, 1.0),
        (-0.6, 1.0, 0, 1.0),
    ],
)
def test_what_lies_beyond_the_ends_is_counted(reward: float, discount: float, favorite: int, expected: float) -> None:
    assert share(reward, discount, favorite) == pytest.approx(expected, abs=1e-6)


def test_the_share_is_that_of_the_probability_moved_out() -> None:
    support = Support(0.0, 4.0, 5)
    logits = torch.zeros(1, 1, 5)
    reward, discount = torch.tensor([2.0]), torch.tensor([1.0])  # 2 3 4 5 6
    assert float(support.clipped(logits, logits, reward, discount)) == pytest.approx(0.4)


@pytest.mark.parametrize(("v_max", "said"), [(10, True), (200, False)])
def test_a_run_says_once_that_returns_lie_outside(v_max: int, said: bool, tmp_path: object) -> None:
    settings = ["learner.algorithm=c51", f"learner.c51.v_max={v_max}", "learner.c51.v_min=0", "evaluation.period=0"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    done = serial(*TINY, *arguments, "--set", f"run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("returns lie outside the support") == int(said)

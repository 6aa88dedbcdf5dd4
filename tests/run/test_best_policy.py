"""Which policy is kept as the best, and when the target counts as reached."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ddrl.acting.policy_file import load_policy
from ddrl.core.config import Config, EnvConfig, RunConfig
from ddrl.core.roles import Evaluation, Returns
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.run.checkpoint import BestPolicy
from ddrl.run.directory import Disk, RunDirectory
from tests.acting.networks import make_mlp, random_vector

MODEL = make_mlp(EnvSpec("test", ArraySpec((2,), "float32"), 2))
TARGET = 10.0


def open_best(path: Path, **env: Any) -> BestPolicy:
    topology: Any = SimpleNamespace(config=Config(run=RunConfig(target_return=TARGET), env=EnvConfig(**env)))
    return BestPolicy(path, topology, MODEL, Disk(RunDirectory(path)), bytes)


def evaluation(version: int, mean: float, confirmed: float | None = None) -> Evaluation:
    further = None if confirmed is None else Returns(confirmed, 1.0, 20)
    return Evaluation(version, 100 * version, Returns(mean, 1.0, 4), further)


def vector(version: int) -> np.ndarray:
    return random_vector(MODEL.layout, version)


def kept(best: BestPolicy, path: Path) -> int:
    """The version whose parameters lie on disk; the object says the same."""
    assert best.evaluation is not None
    np.testing.assert_array_equal(load_policy(path).vector, best.vector())
    np.testing.assert_array_equal(best.vector(), vector(best.evaluation.policy_version))
    return best.evaluation.policy_version


def test_the_best_of_all_evaluations_is_kept_on_disk_and_of_equal_ones_the_last(tmp_path: Path) -> None:
    best, seen = open_best(tmp_path), []
    for version, mean in enumerate([5.0, 3.0, 7.0, 6.9, 7.0]):
        best.consider(evaluation(version, mean), vector(version))
        seen.append((kept(best, tmp_path), best.worse_since))
    assert seen == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 2)]  # one that equals the best is no improvement
    assert not best.target_reached


def test_the_target_is_reached_where_the_evaluation_and_its_confirmation_reach_it(tmp_path: Path) -> None:
    best = open_best(tmp_path)
    best.consider(evaluation(1, 12.0, confirmed=9.0), vector(1))
    assert not best.target_reached
    best.consider(evaluation(2, 9.5), vector(2))
    assert kept(best, tmp_path) == 2  # 9.5 of a few episodes is more than 9.0 confirmed
    best.consider(evaluation(3, 11.0, confirmed=10.0), vector(3))
    assert best.target_reached
    best.consider(evaluation(4, 30.0, confirmed=5.0), vector(4))
    assert kept(best, tmp_path) == 3
    assert best.target_reached  # once reached, it stays so


def test_a_confirmation_that_comes_later_counts_in_place_of_the_evaluation(tmp_path: Path) -> None:
    best = open_best(tmp_path)
    best.consider(evaluation(1, 9.0), vector(1))
    best.confirm(Returns(4.0, 1.0, 50))
    assert load_policy(tmp_path).evaluation["confirmed"] == {"mean": 4.0, "std": 1.0, "episodes": 50}
    best.consider(evaluation(2, 5.0), vector(2))
    assert kept(best, tmp_path) == 2


def test_a_later_part_of_the_run_goes_on_with_what_was_kept(tmp_path: Path) -> None:
    open_best(tmp_path).consider(evaluation(1, 8.0), vector(1))
    best = open_best(tmp_path)
    best.consider(evaluation(2, 7.0), vector(2))
    best.save_unjudged(vector(3))
    assert kept(best, tmp_path) == 1


def test_a_policy_that_was_judged_in_another_environment_is_no_best(tmp_path: Path, capsys: Any) -> None:
    open_best(tmp_path, kwargs={"log": "may"}).consider(evaluation(1, 9.0), vector(1))
    again = open_best(tmp_path, kwargs={"log": "may"})
    again.consider(evaluation(2, 5.0), vector(2))
    assert kept(again, tmp_path) == 1
    other = open_best(tmp_path, kwargs={"log": "june"})
    assert other.evaluation is None
    assert "env.kwargs = {'log': 'may'}, not in this environment: the next evaluation begins a new best" in str(
        capsys.readouterr()
    )
    other.consider(evaluation(3, 5.0), vector(3))
    assert kept(other, tmp_path) == 3

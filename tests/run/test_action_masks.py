"""Actions that an environment forbids are never taken, at random or greedily, and count in no target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ddrl.acting.choosers import chooser_class
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.core.config import Config, EnvConfig, LearnerConfig
from ddrl.core.errors import ConfigError, EnvError
from ddrl.core.specs import ACTION_MASK, FORBIDDEN, ArraySpec, EnvSpec, allowed_actions
from ddrl.envs.making import make_vector_env
from ddrl.envs.vectors import LoopVectorEnv
from ddrl.evaluate import evaluate
from ddrl.learner import Learner, describe
from ddrl.learner.networks import masked
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import run_serial
from tests.run.launch import TINY

COUNT = 5
BOX = spaces.Box(-1, 1, (2,), np.float32)


class Ordered(gymnasium.Env[Any, Any]):
    """Pays more for larger actions; which are allowed changes from step to step, and the largest never is."""

    forbidden: ClassVar[list[int]] = []
    action_space = spaces.Discrete(COUNT)
    observation_space: Any = BOX

    def mask(self) -> np.ndarray:
        allowed = np.zeros(COUNT, np.int8)
        allowed[[self.steps % 4, (self.steps + 1) % 4]] = 1
        return allowed

    def look(self) -> Any:
        return np.array([self.steps / 10, 1], np.float32)

    def info(self) -> dict[str, Any]:
        return {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), self.info()

    def step(self, action: int) -> Any:
        if not self.mask()[action]:
            Ordered.forbidden.append(int(action))
        self.steps += 1
        return self.look(), float(action), self.steps == 8, False, self.info()


class ByEntry(Ordered):
    observation_space = spaces.Dict(action_mask=spaces.MultiBinary(COUNT), x=BOX)

    def look(self) -> Any:
        return {"action_mask": self.mask(), "x": super().look()}


class ByInfo(Ordered):
    def info(self) -> dict[str, Any]:
        return {"action_mask": self.mask().astype(bool)}


class ByInfoOfSteps(ByInfo):
    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**given)[0], {}


class ByMethod(Ordered):
    def action_masks(self) -> np.ndarray:
        return self.mask()


class ByWrongEntry(ByEntry):
    def mask(self) -> np.ndarray:
        return np.full(COUNT, 2, np.int8)


class ByShortInfo(ByInfo):
    def mask(self) -> np.ndarray:
        return np.ones(COUNT - 1, np.int8)


def run(folder: Path, *settings: str) -> None:
    arguments = [*TINY, "--set", f"run.dir={folder}", "--set", "run.max_env_steps=700", "--serial"]
    for setting in settings:
        arguments += ["--set", setting]
    run_serial(Preparation(parse(arguments), f"masks{os.getpid()}{folder.name}"))


SOURCES = [
    (["env.id=tests.run.test_action_masks:ByEntry"], "flat"),
    (["env.id=tests.run.test_action_masks:ByEntry", "env.observation=named"], "named"),
    (["env.id=tests.run.test_action_masks:ByInfo", "env.action_mask=info"], "flat"),
    (["env.id=tests.run.test_action_masks:ByMethod"], "flat"),
]


@pytest.mark.parametrize(("settings", "form"), SOURCES)
def test_no_forbidden_action_is_taken_whoever_names_them(settings: list[str], form: str, tmp_path: Path) -> None:
    Ordered.forbidden.clear()
    run(tmp_path / "run", *settings, "evaluation.period=300")
    assert Ordered.forbidden == []
    fields = [name for name, _ in load_policy(tmp_path / "run").model.spec.observation.fields]
    assert fields == ["x" if form == "named" else "observation", ACTION_MASK]


@pytest.mark.parametrize(
    ("algorithm", "chooser"),
    [
        pytest.param(algorithm, chooser, marks=() if algorithm == "dqn" or chooser == "boltzmann" else pytest.mark.long)
        for algorithm in ("c51", "qrdqn", "iqn", "r2d2", "dqn")
        for chooser in ("epsilon_greedy", "ez_greedy", "boltzmann")
    ],
)
def test_every_algorithm_and_chooser_keeps_to_the_mask(algorithm: str, chooser: str, tmp_path: Path) -> None:
    Ordered.forbidden.clear()
    settings = [f"learner.algorithm={algorithm}", f"rollout.chooser={chooser}", "evaluation.period=0"]
    run(tmp_path / "run", "env.id=tests.run.test_action_masks:ByEntry", *settings)
    assert Ordered.forbidden == []


def test_masks_can_be_left_out(tmp_path: Path) -> None:
    Ordered.forbidden.clear()
    run(tmp_path / "run", "env.id=tests.run.test_action_masks:ByEntry", "env.action_mask=none", "evaluation.period=0")
    assert Ordered.forbidden
    spec = make_vector_env(EnvConfig(id=f"{__name__}:ByEntry", num_envs=1, action_mask="none")).spec
    assert spec.observation == ArraySpec((COUNT + 2,), "float32")


@pytest.mark.parametrize(
    ("factory", "how", "words"),
    [
        ("ByInfo", "auto", "set env.action_mask = info"),
        ("ByInfoOfSteps", "auto", "set env.action_mask = info"),
        ("ByWrongEntry", "auto", "must be 5 numbers 0 or 1"),
        ("ByShortInfo", "info", "must be 5 numbers 0 or 1"),
        ("Ordered", "info", "a NoneType"),
    ],
)
def test_masks_that_are_not_read_or_wrong_are_named(factory: str, how: str, words: str) -> None:
    env = make_vector_env(EnvConfig(id=f"{__name__}:{factory}", num_envs=2, action_mask=how))
    with pytest.raises(EnvError, match=words) as refusal:
        (env.reset(1), env.step(np.zeros(2, np.int64)))
    assert len(str(refusal.value)) < 300


def test_pqn_says_that_it_reads_no_masks() -> None:
    spec = LoopVectorEnv("ordered", [ByEntry()]).spec
    with pytest.raises(ConfigError, match="which PQN does not read"):
        describe(Config(learner=LearnerConfig(algorithm="pqn")), spec)


# ---- Targets ----

SPEC = EnvSpec("masked", ArraySpec((3,), "float32"), 4).with_mask()


def observations(masks: np.ndarray) -> dict[str, torch.Tensor]:
    return {"observation": torch.randn(len(masks), 3), ACTION_MASK: torch.from_numpy(masks)}


@pytest.mark.parametrize("algorithm", ["dqn", "c51", "qrdqn", "iqn", "r2d2"])
def test_the_best_action_of_a_network_and_its_target_is_an_allowed_one(algorithm: str) -> None:
    config = Config(learner=LearnerConfig(algorithm=algorithm, hidden=[8], device="cpu"))
    learner = Learner.of(config, SPEC)
    masks = np.random.default_rng(0).random((200, 4)) < 0.4
    masks[0] = False
    seen = observations(masks)
    with torch.no_grad():
        q = learner.algorithm.inspect(seen)["q"]
    best = q.argmax(1).numpy()
    allowed = allowed_actions(masks)
    assert allowed[np.arange(200), best].all()
    assert len(set(best.tolist())) == 4
    assert allowed[0].all()


def test_a_mask_that_allows_nothing_allows_all_in_its_own_row_alone() -> None:
    masks = np.array([[True, False, False], [False, False, False], [False, True, True]])
    assert allowed_actions(masks).tolist() == [[True, False, False], [True, True, True], [False, True, True]]


def test_values_of_allowed_actions_are_those_of_the_network_alone() -> None:
    network = torch.nn.Linear(3, 4)
    masks = np.array([[True, False, True, False]])
    seen = observations(masks)
    values = masked(network, SPEC)(seen)
    torch.testing.assert_close(values[:, [0, 2]], network(seen["observation"])[:, [0, 2]])
    assert (values[:, [1, 3]] == FORBIDDEN).all()
    values.sum().backward()
    assert (network.bias.grad == torch.tensor([1.0, 0.0, 1.0, 0.0])).all()


def test_a_saved_policy_keeps_to_masks_that_it_has_not_seen(tmp_path: Path) -> None:
    run(tmp_path / "run", "env.id=tests.run.test_action_masks:ByMethod", "evaluation.period=0")
    saved = load_policy(tmp_path / "run")
    seen = np.zeros(COUNT, saved.model.spec.observation.numpy)
    seen[ACTION_MASK] = np.eye(COUNT, dtype=bool)
    policy = ActingPolicy(saved.model)
    assert policy.greedy(seen, saved.vector).tolist() == list(range(COUNT))


# ---- Choosers ----


@pytest.mark.parametrize("name", ["epsilon_greedy", "ez_greedy", "boltzmann", "categorical"])
def test_random_actions_are_uniform_over_those_allowed(name: str) -> None:
    count = 30_000
    chooser = chooser_class(name)(SPEC, count, 3, {})
    seen = np.zeros(count, SPEC.observation.numpy)
    seen[ACTION_MASK] = [True, False, True, True]
    seen[ACTION_MASK][: count // 2] = [False, True, False, False]
    action, columns = chooser.random(seen)
    assert (action[: count // 2] == 1).all()
    share = np.bincount(action[count // 2 :], minlength=4) / (count // 2)
    assert share == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3], abs=0.02)
    if name == "categorical":
        assert columns["log_prob"][-1] == pytest.approx(-np.log(3), rel=1e-5)


class Careless(chooser_class("epsilon_greedy")):  # type: ignore[misc]
    """Does not look at the mask."""

    name = "careless"

    def random(self, observation: Any) -> Any:
        return np.full(len(observation), 4), {}


def test_a_chooser_of_the_users_that_ignores_masks_is_refused(tmp_path: Path) -> None:
    settings = ["env.id=tests.run.test_action_masks:ByEntry", "rollout.chooser=tests.run.test_action_masks:Careless"]
    with pytest.raises(ConfigError, match=r"observation\['action_mask'\] forbids"):
        run(tmp_path / "run", *settings)


class ByParts(Ordered):
    """Two parts of 2 and 3 values; a combination is allowed where both of its values are."""

    action_space = spaces.MultiDiscrete([2, 3], start=np.array([0, 5]))
    taken: ClassVar[list[tuple[int, int]]] = []

    def action_masks(self) -> np.ndarray:
        return np.array([1, 1, 0, 1, 1], np.int8)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.taken.append(tuple(action.tolist()))
        self.steps += 1
        return self.look(), float(action.sum()), self.steps == 8, False, self.info()


def test_a_multidiscrete_action_is_one_of_its_allowed_combinations(tmp_path: Path) -> None:
    ByParts.taken.clear()
    run(tmp_path / "run", f"env.id={__name__}:ByParts", "evaluation.period=300")
    assert set(ByParts.taken) == {(0, 6), (0, 7), (1, 6), (1, 7)}
    saved = load_policy(tmp_path / "run")
    assert saved.model.spec.num_actions == 6
    assert 8 * 6 <= evaluate(saved, 2, 0).mean <= 8 * 8

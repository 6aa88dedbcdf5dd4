"""What tells one environment of a run from another, what of info becomes a figure, and torch beside rollouts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ddrl.core.config import Config, EnvConfig
from ddrl.core.errors import ConfigError, EnvError, NetworkError
from ddrl.core.forks import forbid_torch
from ddrl.core.metrics import columns, info_figure
from ddrl.core.roles import Assignment, Role
from ddrl.envs.making import make_vector_env, probe_spec
from ddrl.learner import describe
from ddrl.run.members import MAX_EVALUATION_ENVS, make_rollout_env


class Numbered(gymnasium.Env[Any, Any]):
    """Knows its number; three steps an episode, with figures in info."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    made: ClassVar[list[int | None]] = []

    def __init__(self, env_index: int | None = None, info: Any = None, *, limit: bool = False) -> None:
        self.made.append(env_index)
        self.limit = limit  # whether a time limit ends the episodes
        self.info = info or (lambda episode: {"is_success": episode % 2 == 0, "Own score": float(episode)})
        self.episode = -1

    def reset(self, **_: Any) -> Any:
        self.episode += 1
        self.left = 3
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        over = self.left == 0
        info = self.info(self.episode) if over else {}
        return np.zeros(2, np.float32), 1.0, over and not self.limit, over and self.limit, info


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Numbered.made.clear()


def any_keywords(**kwargs: Any) -> Numbered:
    return Numbered(kwargs["env_index"])


def hands_on(**kwargs: Any) -> Any:
    Numbered.made.append(-1)
    return gymnasium.make("CartPole-v1", **kwargs)


def takes_none() -> Numbered:
    return Numbered()


def fails(**kwargs: Any) -> Numbered:
    raise RuntimeError("no licence")


def with_info(kind: str, limit: bool = False) -> Numbered:
    infos: dict[str, Callable[[int], dict[str, Any]]] = {
        "word": lambda episode: {"is_success": "yes"},
        "several": lambda episode: {"is_success": np.zeros(3)},
        "none": lambda episode: {},
        "array": lambda episode: {"is_success": np.array([0.25])},
    }
    return Numbered(info=infos[kind], limit=limit)


def own(factory: str, **settings: Any) -> EnvConfig:
    return EnvConfig(**{"id": f"{__name__}:{factory}", "num_envs": 2, **settings})


@pytest.mark.parametrize("factory", ["Numbered", "any_keywords"])
def test_each_environment_is_told_a_number_of_its_own(factory: str) -> None:
    make_vector_env(own(factory), first_index=7)
    assert Numbered.made == [7, 8]


def test_evaluators_and_rollouts_share_no_number() -> None:
    config = Config(env=own("Numbered", by_rollout=[{}, {}]))
    make_vector_env(config.env, MAX_EVALUATION_ENVS)
    for index in range(3):
        make_rollout_env(config, Assignment(index + 2, Role.ROLLOUT, 0, index))
    assert sorted(Numbered.made) == list(range(MAX_EVALUATION_ENVS + 6))


def test_a_factory_is_given_no_number_that_it_does_not_take() -> None:
    make_vector_env(own("takes_none"))
    assert Numbered.made == [None, None]
    make_vector_env(own("Numbered", kwargs={"env_index": 3}))
    assert Numbered.made[2:] == [3, 3]
    assert make_vector_env(own("hands_on")).spec.num_actions == 2
    with pytest.raises(RuntimeError, match="no licence"):
        make_vector_env(own("fails"))


def play(config: EnvConfig, steps: int = 12) -> Any:
    env: Any = make_vector_env(config)
    env.reset(0)
    for _ in range(steps):
        env.step(np.zeros(2, np.int64))
    return env


def test_numbers_in_info_at_the_end_of_episodes_become_figures() -> None:
    env = play(own("Numbered", figures=["is_success", "Own score"]))  # 3 episodes each
    assert env.figures == {"info_is_success": pytest.approx(2 / 3), "info_own_score": 1.0}
    assert play(own("with_info", kwargs={"kind": "array"}, figures=["is_success"])).figures == {"info_is_success": 0.25}
    assert play(own("with_info", kwargs={"kind": "none"}, figures=["is_success"])).figures == {}
    assert play(own("Numbered")).figures == {}
    cut = play(own("with_info", kwargs={"kind": "array", "limit": True}, figures=["is_success"]))
    assert cut.figures == {"info_is_success": 0.25}, "a time limit ends episodes too"


@pytest.mark.parametrize("kind", ["word", "several"])
def test_what_is_no_number_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(EnvError, match=r"info\['is_success'\].*not one number: leave is_success out of env.figures"):
        play(own("with_info", kwargs={"kind": kind}, figures=["is_success"]))


def test_figures_are_columns_of_the_run_and_names_must_differ() -> None:
    config = Config(env=own("Numbered", figures=["is_success"]))
    declared = describe(config, probe_spec(config.env)).figures
    assert "info_is_success" in columns(declared)
    with pytest.raises(ConfigError, match="info_a_b"):
        columns((info_figure("a b"), info_figure("A_B")))


def test_figures_of_vectors_are_refused_and_single_environments_are_taken_instead() -> None:
    assert make_vector_env(EnvConfig(id="CartPole-v1", num_envs=2, figures=["is_success"])).figures == {}  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match=r"env\.figures .* ALE/Pong-v5"):
        make_vector_env(EnvConfig(id="ALE/Pong-v5", num_envs=1, figures=["is_success"]))


def test_torch_beside_rollouts_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(NetworkError, match=r"--set rollout\.torch=true"):
        forbid_torch()
    forbid_torch(allowed=True)

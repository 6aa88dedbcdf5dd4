"""Environments as people publish them: the algorithm follows the actions where none is named, and pictures go through
convolutions whatever their axes, by themselves and inside a Dict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.core.config import LearnerConfig
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.specs import ArraySpec, EnvSpec, Image
from ddrl.envs.making import make_vector_env
from ddrl.envs.spaces import describe
from ddrl.learner.algorithm import image_of, linear_widths, network_kind
from ddrl.learner.networks import CNN, PicturesAndVector, make_network
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import RANKS, run_serial
from tests.run.launch import TINY

SIDE = 40


class Looking(gymnasium.Env[Any, Any]):
    """Pays where the action is the corner that is white in the picture; `ready` is a number beside it."""

    observation_space = spaces.Dict(
        screen=spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8), ready=spaces.Box(0, 1, (2,), np.float32)
    )
    action_space = spaces.Discrete(2)

    def look(self) -> dict[str, np.ndarray]:
        self.corner = int(self.np_random.integers(2))
        screen = np.zeros((SIDE, SIDE, 3), np.uint8)
        screen[:, : SIDE // 2] = 255 * (1 - self.corner)
        screen[:, SIDE // 2 :] = 255 * self.corner
        return {"screen": screen, "ready": np.ones(2, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.look(), {}

    def step(self, action: int) -> Any:
        paid = float(action == self.corner)
        return self.look(), paid, True, False, {}


class Steering(gymnasium.Env[Any, Any]):
    """Continuous actions."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, low: float = -1, high: float = 1) -> None:
        self.action_space = spaces.Box(low, high, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, True, False, {}


def prepare(folder: Path, *settings: str) -> Preparation:
    arguments = [*TINY, "--set", f"run.dir={folder}", "--set", "evaluation.period=0", "--serial"]
    for setting in settings:
        arguments += ["--set", setting]
    return Preparation(parse(arguments), f"published{os.getpid()}{folder.name}")


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ([f"env.id={__name__}:Steering"], "td3"),
        (["env.id=MountainCarContinuous-v0"], "td3"),
        (["env.id=CartPole-v1"], "dqn"),
        (["env.id=Pendulum-v1", "learner.algorithm=d4pg"], "d4pg"),
        (["learner.algorithm=c51"], "c51"),
    ],
)
def test_the_algorithm_follows_the_actions_where_none_is_named(
    settings: list[str], algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = prepare(tmp_path / "run", *settings).topology(RANKS)
    assert topology.config.learner.algorithm == algorithm
    assert topology.declaration.algorithm == algorithm
    assert ("learner.algorithm = td3: actions are continuous" in capsys.readouterr().err) == (algorithm == "td3")


def test_an_algorithm_that_is_named_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has continuous actions"):
        prepare(tmp_path / "run", "env.id=Pendulum-v1", "learner.algorithm=dqn").topology(RANKS)


@pytest.mark.parametrize(
    ("shape", "image"),
    [
        ((4, 84, 84), Image(4, 84, 84)),
        ((84, 84, 3), Image(3, 84, 84, channels_last=True)),
        ((84, 84, 12), Image(12, 84, 84, channels_last=True)),
        ((96, 96, 48), Image(48, 96, 96, channels_last=True)),
        ((48, 64, 96), Image(48, 64, 96)),
        ((64, 48), Image(1, 64, 48, add_channel=True)),
        ((4, 84, 90, 3), Image(12, 84, 90, stacked=True)),
    ],
)
def test_the_smallest_axis_of_a_picture_holds_its_channels(shape: tuple[int, ...], image: Image) -> None:
    array = ArraySpec(shape, "uint8")
    assert image_of("nature_cnn", array) == image
    assert network_kind("auto", array) == "nature_cnn"
    generator = np.random.default_rng(0)
    given = generator.integers(0, 256, (2, *shape), np.uint8)
    axes = {"channels_last": (0, 3, 1, 2), "stacked": (0, 1, 4, 2, 3)}
    form = next((name for name in axes if getattr(image, name)), "")
    first = given.transpose(axes[form]) if form else given
    first = np.ascontiguousarray(first).reshape(2, image.channels, image.height, image.width)
    networks = []
    for each in (array, ArraySpec(first.shape[1:], "uint8")):
        torch.manual_seed(0)
        networks.append(CNN(each, 3, "mean"))
    torch.testing.assert_close(networks[0](torch.from_numpy(given)), networks[1](torch.from_numpy(first)))


@pytest.mark.parametrize("shape", [(7,), (20, 20, 3), (2, 3, 4, 5), (3, 500, 2)])
def test_what_has_not_the_shape_of_a_picture_is_none(shape: tuple[int, ...]) -> None:
    assert network_kind("auto", ArraySpec(shape, "uint8")) == "mlp"


@pytest.mark.parametrize(
    ("how", "fields"), [("auto", ["screen", "ready"]), ("named", ["screen", "ready"]), ("flat", [])]
)
def test_a_dict_with_a_picture_gives_named_arrays_unless_it_is_told_to_be_flat(how: str, fields: list[str]) -> None:
    from ddrl.core.config import EnvConfig

    spec = make_vector_env(EnvConfig(id=f"{__name__}:Looking", observation=how, num_envs=1)).spec
    assert [name for name, _ in spec.observation.fields] == fields
    network = make_network(LearnerConfig(hidden=[8]), spec)
    assert isinstance(network, PicturesAndVector) == bool(fields)


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (spaces.Dict(eyes=spaces.Dict(left=spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8))), "eyes.left"),
        (spaces.Tuple((spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8), spaces.Discrete(2))), "0"),
        (spaces.Dict(eyes=spaces.Tuple((spaces.Box(0, 1, (SIDE, SIDE), np.float32),))), "eyes.0"),
    ],
)
def test_a_picture_that_becomes_a_part_of_a_vector_is_said(space: Any, name: str) -> None:
    [note] = [note for note in describe("deep", space, spaces.Discrete(2)).notes if "without convolutions" in note]
    assert note.startswith(f"the picture {name} becomes a part of one vector")


def test_a_run_learns_what_is_in_the_picture_of_a_dict(tmp_path: Path) -> None:
    learning = ["run.max_env_steps=1200", "learner.network=small_cnn", "learner.discount=0.0", "learner.batch_size=32"]
    run_serial(prepare(tmp_path / "run", f"env.id={__name__}:Looking", *learning))
    saved = load_policy(tmp_path / "run")
    env = Looking()
    env.reset(seed=3)
    seen = np.zeros(20, saved.model.spec.observation.numpy)
    corners = []
    for row in seen:
        for name, array in env.look().items():
            row[name] = array
        corners.append(env.corner)
    assert ActingPolicy(saved.model).greedy(seen, saved.vector).tolist() == corners


def test_noisy_layers_beside_pictures_are_refused() -> None:
    record = ArraySpec.record({"screen": ArraySpec((3, 40, 40), "uint8"), "x": ArraySpec((2,), "float32")})
    with pytest.raises(NetworkError, match=r"set learner\.c51\.sigma = 0"):
        linear_widths(LearnerConfig(), EnvSpec("two", record, 2))

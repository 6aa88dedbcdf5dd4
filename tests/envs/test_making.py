"""Environments are made from settings, and what cannot be made says why."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ddrl.core.config import EnvConfig
from ddrl.core.errors import EnvError, MissingExtraError
from ddrl.core.specs import ArraySpec, EnvSpec, EnvStep
from ddrl.envs import make_vector_env, probe_spec
from ddrl.envs.atari import AtariVectorEnv
from ddrl.envs.making import every_id
from ddrl.envs.vectors import LoopVectorEnv, NativeVectorEnv

HERE = __name__
FIRST_MISSING = "flax" if importlib.util.find_spec("jax") else "jax"  # of what gymnasium's phys2d imports


class Counting(gymnasium.Env):
    """Ends after `length` steps; what it observes and gives can be broken on purpose."""

    def __init__(
        self, length: int = 3, observation: Any = None, reward: Any = 1.0, result_size: int = 5, fail: bool = False
    ) -> None:
        self.observation_space = spaces.Box(0, 100, (2,), np.float32)
        self.action_space = spaces.Discrete(2, start=5)
        self.length, self.given, self.reward, self.result_size, self.fail = (
            length,
            observation,
            reward,
            result_size,
            fail,
        )
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.fail:
            raise ZeroDivisionError("the simulator broke")
        self.taken.append(action)
        self.steps += 1
        observation = np.full(2, self.steps, np.float32) if self.given is None else self.given
        return (observation, self.reward, False, self.steps == self.length, {})[: self.result_size]


class Twins:
    """A vector of the user's own, in ddrl's protocol."""

    def __init__(self, num_envs: int, broken: bool = False) -> None:
        self.num_envs, self.broken = num_envs, broken
        self.spec = EnvSpec("twins", ArraySpec((3,), "float32"), 2)

    def reset(self, seed: int) -> np.ndarray:
        return np.zeros((self.num_envs, 3), np.float32)

    def step(self, action: np.ndarray) -> EnvStep:
        n, dtype = self.num_envs, np.float64 if self.broken else np.float32
        return EnvStep(
            np.zeros((n, 3), dtype), np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool), np.zeros(n)
        )

    def close(self) -> None:
        pass


SHARED = Counting()


def shared_environment() -> Counting:
    return SHARED


def make_nothing() -> None:
    return None


def same_step_vector() -> gymnasium.vector.VectorEnv:
    return gymnasium.vector.SyncVectorEnv([Counting], autoreset_mode="SameStep")


def next_step_vector(num_envs: int) -> gymnasium.vector.VectorEnv:
    return gymnasium.vector.SyncVectorEnv([Counting] * num_envs)


def many_actions() -> gymnasium.Env:
    env = Counting()
    env.action_space = spaces.MultiDiscrete([100, 100])
    return env


def fixed_action() -> gymnasium.Env:
    env = Counting()
    env.action_space = spaces.Box(np.array([-1, 2], np.float32), np.array([1, 2], np.float32))
    return env


def no_numbers() -> gymnasium.Env:
    env = Counting()
    env.observation_space = spaces.Box(0, 1, (0,), np.float32)
    return env


def endless_observations() -> gymnasium.Env:
    env = Counting()
    env.observation_space = spaces.Sequence(spaces.Discrete(2))
    return env


def own(factory: str, **kwargs: Any) -> EnvConfig:
    return EnvConfig(id=f"{HERE}:{factory}", kwargs=kwargs, num_envs=2)


@pytest.mark.parametrize(
    ("env_id", "kind", "observation", "num_actions", "action"),
    [
        ("CartPole-v1", NativeVectorEnv, ArraySpec((4,), "float32"), 2, ArraySpec((), "int64")),
        ("LunarLander-v3", LoopVectorEnv, ArraySpec((8,), "float32"), 4, ArraySpec((), "int64")),
        ("Pendulum-v1", LoopVectorEnv, ArraySpec((3,), "float32"), 0, ArraySpec((1,), "float32")),
        ("FrozenLake-v1", LoopVectorEnv, ArraySpec((16,), "float32"), 4, ArraySpec((), "int64")),
        ("Blackjack-v1", LoopVectorEnv, ArraySpec((45,), "float32"), 2, ArraySpec((), "int64")),
        ("gymnasium:CartPole-v1", NativeVectorEnv, ArraySpec((4,), "float32"), 2, ArraySpec((), "int64")),
        ("ALE/Pong-v5", AtariVectorEnv, ArraySpec((4, 84, 84), "uint8"), 6, ArraySpec((), "int64")),
    ],
)
def test_an_id_gives_its_vector_and_its_spec(
    env_id: str, kind: type, observation: ArraySpec, num_actions: int, action: ArraySpec
) -> None:
    env = make_vector_env(EnvConfig(id=env_id), 3)
    assert isinstance(env, kind)
    assert (env.spec.observation, env.spec.num_actions, env.spec.action) == (observation, num_actions, action)
    assert probe_spec(EnvConfig(id=env_id)) == env.spec
    first = env.reset(1)
    step = env.step(np.zeros((3, *action.shape), action.dtype))
    for value in (first, step.observation):
        assert (value.shape, value.dtype, value.flags.c_contiguous) == (
            (3, *observation.shape),
            np.dtype(observation.dtype),
            True,
        )
    assert (step.reward.dtype, step.raw_reward.dtype, step.terminated.dtype) == (np.float32, np.float64, np.bool_)
    env.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EnvConfig(id="CartPol-v1"), "did you mean 'CartPole-v1'?"),
        (EnvConfig(id="cartpole"), "did you mean 'CartPole-v1'?"),
        (EnvConfig(kwargs={"gravty": 1}), "unexpected keyword argument 'gravty'"),
        (EnvConfig(id="phys2d/CartPole-v1"), f"needs the package '{FIRST_MISSING}', which is not installed"),
        (EnvConfig(id="no_such_module:factory"), "there is no module 'no_such_module'"),
        (EnvConfig(id="ALE/Pong-v5", kwargs={"frameskip": 4}), "set env.frame_skip instead"),
        (EnvConfig(id="ALE/Pong-v5", kwargs={"continuous": True}), "continuous actions"),
        (own("Countin"), "did you mean 'Counting'?"),
        (own("HERE"), "is a str, not what makes an environment"),
        (own("Counting", size=3), "unexpected keyword argument 'size'"),
        (own("make_nothing"), "returned a NoneType"),
        (own("shared_environment"), "the same environment twice"),
        (own("same_step_vector"), "needs autoreset mode NEXT_STEP"),
        (own("Twins", num_envs=7), "made 7 environments where 2 are wanted"),
        (own("fixed_action"), "number 1 of the action can only be 2, by the bounds of"),
        (own("no_numbers"), "holds no number: give it at least one"),
        (own("many_actions"), "actions of MultiDiscrete([100 100]) have more than 4,096 combinations: wrap"),
        (own("endless_observations"), "have no fixed size"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line_that_says_why(config: EnvConfig, words: str) -> None:
    with pytest.raises(EnvError) as refusal:
        make_vector_env(config)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [({}, "'table'.*: give it there, or let a factory"), ({"size": 3}, "'size'.*: leave it out, or")],
)
def test_an_argument_is_to_be_given_where_it_is_missing_and_left_out_where_it_is_not_taken(
    kwargs: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs(table: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setitem(gymnasium.registry, "Needs-v0", gymnasium.envs.registration.EnvSpec("Needs-v0", needs))
    with pytest.raises(EnvError, match=words):
        make_vector_env(EnvConfig(id="Needs-v0", kwargs=kwargs))


@pytest.mark.parametrize(
    ("env_id", "module", "extra"),
    [
        ("LunarLander-v3", "Box2D", "box2d"),
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("PongNoFrameskip-v4", "ale_py", "atari"),
        ("ALE/Pong-v5", "cv2", "atari"),
    ],
)
def test_a_missing_package_names_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, env_id: str, module: str, extra: str
) -> None:
    for loaded in [
        name for name in sys.modules if name.startswith("gymnasium.envs.box2d") or name == "ddrl.envs.atari"
    ]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    if module == "ale_py":
        for known in [name for name in gymnasium.registry if name.startswith("ALE/") or "NoFrameskip" in name]:
            monkeypatch.delitem(gymnasium.registry, known)
    with pytest.raises(MissingExtraError, match=rf"ddrl\[{extra}\]"):
        make_vector_env(EnvConfig(id=env_id), 1)


@pytest.mark.parametrize("factory", ["Counting", "next_step_vector"])
def test_an_environment_of_the_users_own_is_stepped_with_the_actions_its_space_names(factory: str) -> None:
    env = make_vector_env(own(factory))
    env.reset(1)
    action = np.array([0, 1])
    observed = [env.step(action) for _ in range(5)]
    assert [step.observation[0, 0] for step in observed] == [1, 2, 3, 0, 1]
    assert [bool(step.truncated[0]) for step in observed] == [False, False, True, False, False]
    assert [step.reward[0] for step in observed] == [1, 1, 1, 0, 1]
    inner = env._environments if factory == "Counting" else env._vector.envs
    assert [set(one.taken) for one in inner] == [{5}, {6}]


def test_a_vector_of_the_users_own_is_used_as_it_is_and_checked() -> None:
    env = make_vector_env(own("Twins"))
    assert env.reset(0).shape == (2, 3)
    assert env.step(np.zeros(2, np.int64)).reward.shape == (2,)
    broken = make_vector_env(own("Twins", broken=True))
    broken.reset(0)
    with pytest.raises(
        EnvError, match=r"observation must be a C-contiguous float32 array \(2, 3\) by its spec, not float64 \(2, 3\)"
    ):
        broken.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            {"observation": np.ones(3, np.float32)},
            "float32 (3,) but its observation_space declares an array of float32 (2,)",
        ),
        ({"observation": np.zeros(2, np.float64)}, "gave an observation of float64 (2,)"),
        ({"observation": [0.0, 1.0]}, "gave an observation of a list"),
        ({"reward": "high"}, "step gave the reward 'high' (a str), not one number"),
        ({"result_size": 4}, "step returned 4 values"),
    ],
)
def test_a_step_that_breaks_the_contract_is_refused_at_once(broken: dict[str, Any], words: str) -> None:
    env = make_vector_env(own("Counting", **broken))
    env.reset(1)
    with pytest.raises(EnvError) as refusal:
        env.step(np.zeros(2, np.int64))
    assert words in str(refusal.value)


def test_an_exception_in_an_environment_passes_through_with_its_traceback() -> None:
    env = make_vector_env(own("Counting", fail=True))
    env.reset(1)
    with pytest.raises(ZeroDivisionError, match="the simulator broke") as failure:
        env.step(np.zeros(2, np.int64))
    assert Path(failure.traceback[-1].path) == Path(__file__)


def test_a_module_that_cannot_import_something_shows_its_own_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_simulator\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_simulator"):
        make_vector_env(EnvConfig(id="half_installed:make"))


LATE = """
import gymnasium
def register_envs():
    gymnasium.register("Late/Corridor-v0", "tests.envs.test_making:Counting")
class LateEnv: ...
"""


def test_ids_are_looked_up_after_a_package_has_registered_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_package.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(EnvError, match=r"has no 'Late/Corridr-v0'; its import registers no such id"):
            make_vector_env(EnvConfig(id="late_package:Late/Corridr-v0"))
        make_vector_env(EnvConfig(id="late_package:Late/Corridor-v0"), 2).close()
    finally:
        gymnasium.registry.pop("Late/Corridor-v0", None)


def test_ids_that_only_a_package_s_installer_knows_how_to_register_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As minatar's, whose `register_envs` is in another module than the one that people name."""
    (tmp_path / "told_package").mkdir()
    (tmp_path / "told_package" / "__init__.py").write_text("")
    (tmp_path / "told_package" / "gym.py").write_text(LATE.replace("Late/", "Told/"))
    (tmp_path / "told_package-1.0.dist-info").mkdir()
    points = "[gymnasium.envs]\nTold = told_package.gym:register_envs\n"
    (tmp_path / "told_package-1.0.dist-info" / "entry_points.txt").write_text(points)
    (tmp_path / "told_package-1.0.dist-info" / "METADATA").write_text("Name: told_package\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        make_vector_env(EnvConfig(id="told_package:Told/Corridor-v0"), 2).close()
        gymnasium.registry.pop("Told/Corridor-v0")
        ids = every_id()
    finally:
        gymnasium.registry.pop("Told/Corridor-v0", None)
    assert {"told_package:Told/Corridor-v0", "CartPole-v1", "ALE/Pong-v5"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert "PongNoFrameskip-v4" not in ids  # the same game, by another name


@pytest.mark.parametrize("attribute", ["env_specs", ""])
def test_an_id_of_the_old_package_gym_is_named_as_such(
    attribute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"Brothers-1-1-v0": None}
    registry = SimpleNamespace(env_specs=ids) if attribute else ids
    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace(envs=SimpleNamespace(registry=registry)))
    (tmp_path / "old_brothers.py").write_text("class BrothersEnv: ...")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvError, match=r"registered with the old package gym.*shimmy"):
        make_vector_env(EnvConfig(id="old_brothers:Brothers-1-1-v0"))
    with pytest.raises(EnvError, match=r"registers no such id"):
        make_vector_env(EnvConfig(id="old_brothers:Brothers-9-9-v0"))


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("gym:CartPole-v1", "CartPole-v1"),
        ("gym:Cartpole-v1", "CartPole-v1"),
        ("gym/CartPole-v1", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("Cartpole_v1", "CartPole-v1"),
        ("CartPole", "CartPole-v1"),
        ("CartPole-v2", "CartPole-v1"),
        ("CartPole-v1 ", "CartPole-v1"),
        ("LunarLander-v2", "LunarLander-v3"),
        ("lunar_lander", "LunarLander-v3"),
        ("Taxi-v3", "Taxi-v4"),
        ("MountainCarContinous-v0", "MountainCarContinuous-v0"),
        ("HalfCheetah-v3", "HalfCheetah-v5"),
        ("hopper-v3", "Hopper-v5"),
        ("Walker2D-v5", "Walker2d-v5"),
        ("Pong-v5", "ALE/Pong-v5"),
        ("ALE/pong-v5", "ALE/Pong-v5"),
        ("ale_py:Pong-v5", "ALE/Pong-v5"),
        ("breakout", "ALE/Breakout-v5"),
        ("PongNoFrameskip-v5", "PongNoFrameskip-v4"),
        ("MiniGrid-Empty-5x5-v0", "minigrid:MiniGrid-Empty-5x5-v0"),
        ("gym_minigrid:MiniGrid-Empty-5x5-v0", "minigrid:MiniGrid-Empty-5x5-v0"),
        ("MinAtar/Breakout-v1", "minatar:MinAtar/Breakout-v1"),
        ("highway-v0", "highway_env:highway-v0"),
        ("FetchReach-v3", "gymnasium_robotics:FetchReach-v3"),
        ("my_env.py:MyEnv", "my_env:MyEnv"),
        ("envs/my_env.py:MyEnv", "my_env:MyEnv"),
        ("tests.Counting", "tests:Counting"),
        ("nonsense", ""),
        ("gymnasium:Pong-v5", "ALE/Pong-v5"),
        ("gymnasium:CartPole", "CartPole-v1"),
        ("gym:Pong-v5", "ALE/Pong-v5"),
        ("dm_control/cartpole-swingup-v0", "shimmy:dm_control/cartpole-swingup-v0 (pip install 'shimmy[dm-control]')"),
        ("procgen-coinrun-v0", "procgen_gym:procgen_gym/procgen-coinrun-v0 (pip install procgen-gym)"),
        ("procgen:procgen-coinrun-v0", "procgen_gym:procgen_gym/procgen-coinrun-v0 (pip install procgen-gym)"),
        ("procgen_gym/procgen-coinrun-v0", "procgen_gym:procgen_gym/procgen-coinrun-v0 (pip install procgen-gym)"),
        ("gymnasium:BabyAI-GoToLocal-v0", "minigrid:BabyAI-GoToLocal-v0 (pip install minigrid)"),
        ("cartpole:nothing", ""),
    ],
)
def test_an_id_as_people_type_it_is_refused_with_the_one_that_is_meant(
    typed: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("gym", "gym_minigrid", "minigrid", "procgen", "procgen_gym", "shimmy"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvError) as refusal:
        make_vector_env(EnvConfig(id=typed))
    text = str(refusal.value)
    assert text.startswith(f"env.id = {typed}: ")
    wanted_id, bracket, install = wanted.partition(" (")
    assert (f"did you mean '{wanted_id}'{bracket}{install}" in text) if wanted else ("did you mean" not in text)
    assert len(text) < 300
    assert "\n" not in text


@pytest.mark.parametrize(
    ("typed", "package"),
    [
        ("minigrid:MiniGrid-Empty-5x5-v0", "minigrid"),
        ("shimmy:dm_control/cartpole-swingup-v0", "'shimmy[dm-control]'"),
        ("procgen_gym:procgen_gym/procgen-coinrun-v0", "procgen-gym"),
    ],
)
def test_the_right_id_of_a_package_that_is_not_there_is_refused_with_what_to_install(
    typed: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = typed.partition(":")[0]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvError, match=re.escape(f"there is no module '{module}'; pip install {package}") + "$"):
        make_vector_env(EnvConfig(id=typed))


def test_of_a_package_that_is_there_the_nearest_id_is_meant_or_the_rest_of_it_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "shimmy", ModuleType("shimmy"))  # without dm_control it registers none of its ids
    monkeypatch.setitem(sys.modules, "minigrid", ModuleType("minigrid"))
    sys.modules["minigrid"].__spec__ = ModuleSpec("minigrid", None)
    with pytest.raises(EnvError, match=r"the module shimmy has no .*; pip install 'shimmy\[dm-control\]'$"):
        make_vector_env(EnvConfig(id="shimmy:dm_control/cartpole-swingup-v0"))
    with pytest.raises(EnvError, match=r"did you mean 'minigrid:MiniGrid-Emty-v0'\? "):
        make_vector_env(EnvConfig(id="MiniGrid-Emty-v0"))
    try:
        gymnasium.register("MiniGrid-Empty-v0", "minigrid.envs:EmptyEnv")
        with pytest.raises(EnvError, match="did you mean 'MiniGrid-Empty-v0'"):
            make_vector_env(EnvConfig(id="minigrid:MiniGrid-Emty-v0"))
    finally:
        gymnasium.registry.pop("MiniGrid-Empty-v0")


def test_a_function_of_gymnasium_s_is_a_factory_as_any_other() -> None:
    make_vector_env(EnvConfig(id="gymnasium:make", kwargs={"id": "CartPole-v1"}), 2).close()


def test_a_namespace_that_nothing_registers_is_not_guessed_at() -> None:
    with pytest.raises(EnvError) as refusal:
        make_vector_env(EnvConfig(id="no_such_space/cartpole-swingup-v0"))
    assert "did you mean" not in str(refusal.value)
    assert "package:Id" in str(refusal.value)

"""One check of what environments give: the same rule for an observation, an entry of a Dict or Tuple, and a vector, and
each refusal says in one short line what is wrong, where, with which value, and what to do."""

from __future__ import annotations

import os
import struct
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ddrl.core.config import Config, EnvConfig, LearnerConfig
from ddrl.core.errors import DdrlError, EnvError, NetworkError, user_error, user_frame
from ddrl.core.roles import Assignment, Role
from ddrl.core.specs import ACTION_MASK, ArraySpec, EnvSpec, EnvStep
from ddrl.envs import vectors
from ddrl.envs.atari import AtariVectorEnv
from ddrl.envs.making import make_vector_env, probe_spec, read_states
from ddrl.envs.spaces import environment_seeds
from ddrl.envs.vectors import LoopVectorEnv, NativeVectorEnv, OwnVectorEnv
from ddrl.evaluate import evaluation_envs
from ddrl.learner.own_networks import own_network
from ddrl.run.members import make_rollout_env
from ddrl.run.topology import describe
from tests.learner.learner_cases import VECTOR

MAX_MESSAGE = 300
ZEROS = np.zeros(2, np.float32)
FLOATS = spaces.Box(-1, 1, (2,), np.float32)
LEVELS = spaces.Box(2, 5, (3,), np.int64)
BYTES = spaces.Box(0, 3, (2, 2), np.uint8)
ABOVE = np.nextafter(np.float32(1), np.float32(2))


class Given(gymnasium.Env[Any, Any]):
    """Gives one observation of `space` and one reward, again and again."""

    def __init__(self, space: Any, value: Any, reward: Any = 1.0, action: Any = None) -> None:
        self.observation_space = space
        self.action_space = spaces.Discrete(2) if action is None else action
        self.value = value
        self.reward = reward

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self.value, {}

    def step(self, action: Any) -> Any:
        return self.value, self.reward, False, False, {}


def wrapped_in(form: str, space: Any, value: Any) -> Any:
    """A vector of two environments that observe `value` by itself, as an entry, or natively."""
    if form == "plain":
        return LoopVectorEnv("given", [Given(space, value), Given(space, value)])
    if form == "native":
        batch = np.stack([value, value]) if isinstance(value, np.ndarray) else [value, value]
        vector = gymnasium.vector.SyncVectorEnv([lambda: Given(space, value)] * 2)
        vector.reset = lambda **_: (batch, {})  # type: ignore[method-assign]
        return NativeVectorEnv("given", vector)
    if form == "tuple":
        whole: Any = spaces.Tuple((spaces.Discrete(2), space))
        return LoopVectorEnv("given", [Given(whole, (1, value)), Given(whole, (1, value))])
    whole = spaces.Dict({"deep": spaces.Dict({"part": space}), "other": spaces.Discrete(2)})
    observed = {"deep": {"part": value}, "other": 1}
    return LoopVectorEnv("given", [Given(whole, observed), Given(whole, observed)], named=form == "named")


FORMS = ("plain", "flat", "named", "tuple", "native")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("space", "value", "words"),
    [
        (FLOATS, np.zeros(2, np.float32), ""),
        (FLOATS, np.full(2, ABOVE), ""),
        (FLOATS, np.full(2, -7, np.float32), ""),
        (FLOATS, np.zeros(2), "float64 (2,)"),
        (FLOATS, np.zeros(3, np.float32), "float32 (3,)"),
        (FLOATS, [0.0, 0.0], "a list"),
        (FLOATS, None, "a NoneType"),
        (LEVELS, np.array([2, 5, 3]), ""),
        (LEVELS, np.array([2, 6, 3]), "int64 with 6 in it"),
        (LEVELS, np.array([1, 5, 3]), "integers from 2 to 5"),
        (LEVELS, np.array([2.0, 5.0, 3.0]), "float64 (3,)"),
        (BYTES, np.full((2, 2), 3, np.uint8), ""),
        (BYTES, np.full((2, 2), 4, np.uint8), "uint8 with 4 in it"),
        (BYTES, np.full((2, 2), 3, np.int64), "int64 (2, 2)"),
    ],
)
def test_the_same_rule_holds_wherever_an_array_is(form: str, space: Any, value: Any, words: str) -> None:
    env = wrapped_in(form, space, value)
    if not words:
        seen = env.reset(1)
        expected = env.spec.observation
        assert (seen.shape, seen.dtype) == ((2, *expected.shape), expected.numpy)
        return
    with pytest.raises(EnvError) as refusal:
        env.reset(1)
    text = str(refusal.value)
    given = words if form != "native" or "in it" in words or "integers" in words else text
    assert given in text
    assert "make them agree" in text
    assert len(text) < MAX_MESSAGE
    assert "\n" not in text
    entry = {"flat": "entry deep.part", "tuple": "entry 1", "named": "entry deep.part"}.get(form, "an observation")
    assert entry in text


@pytest.mark.parametrize("form", ["plain", "flat", "tuple"])
@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Discrete(3, start=1), 3, 4),
        (spaces.MultiDiscrete([3, 2]), np.array([2, 1]), np.array([3, 1])),
        (spaces.MultiBinary(4), np.array([0, 1, 1, 0], np.int8), np.array([0, 2, 0, 0], np.int8)),
    ],
)
def test_numbers_that_become_one_hot_lie_within_their_space(form: str, space: Any, good: Any, bad: Any) -> None:
    seen = wrapped_in(form, space, good).reset(1)
    assert set(np.unique(seen)) <= {0.0, 1.0}
    with pytest.raises(EnvError, match="make them agree"):
        wrapped_in(form, space, bad).reset(1)


def test_a_dict_gives_the_vector_that_gymnasium_flattens_it_to() -> None:
    space = spaces.Dict(
        z=spaces.Box(0, 1, (2, 2), np.float32),
        a=spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 3]))),
        m=spaces.Dict(b=spaces.MultiBinary(3), c=spaces.Box(-9, 9, (), np.float32)),
    )
    space.seed(3)
    for _ in range(20):
        value = space.sample()
        env = LoopVectorEnv("given", [Given(space, value)])
        np.testing.assert_array_equal(env.reset(1)[0], spaces.flatten(space, value).astype(np.float32))
    assert [name for name, _ in env.spec.entries] == ["z", "a.0", "a.1", "m.b", "m.c"]
    owners = [name for name, count in env.spec.entries for _ in range(count)]
    for place, owner in enumerate(owners):  # each number is said to be its own entry's, those at the ends too
        broken = np.zeros((2, len(owners)), np.float32)
        broken[1, place] = np.nan
        assert f"entry {owner} of" in env.spec.nonfinite_entry(np.zeros_like(broken), broken)


@pytest.mark.parametrize("reward", [np.array([1.5]), np.float32(1.5), np.array(1.5), np.array([[1.5]])])
def test_a_reward_of_one_number_counts_in_whatever_array_it_is(reward: Any) -> None:
    env = LoopVectorEnv(
        "given", [Given(FLOATS, np.zeros(2, np.float32), reward), Given(FLOATS, np.zeros(2, np.float32))]
    )
    env.reset(1)
    step = env.step(np.zeros(2, np.int64))
    assert step.reward.tolist() == [1.5, 1.0]
    assert (step.reward.dtype, step.raw_reward.dtype) == (np.float32, np.float64)


@pytest.mark.parametrize(
    "reward", [np.array([1.0, 2.0]), "much", "1.0", None, {"a": 1.0}, [1.0, 2.0, 3.0], 1j, 10**400]
)
def test_a_reward_that_is_no_number_is_named_with_its_value(reward: Any) -> None:
    env = LoopVectorEnv("given", [Given(FLOATS, np.zeros(2, np.float32), reward)])
    env.reset(1)
    with pytest.raises(EnvError, match="not one number: give one; ") as refusal:
        env.step(np.zeros(1, np.int64))
    assert repr(reward)[:20] in str(refusal.value)
    assert len(str(refusal.value)) < MAX_MESSAGE


@pytest.mark.parametrize("name", ["", "entry"])
@pytest.mark.parametrize(("number", "seen"), [(1e-50, 0.0), (-1e-42, np.float32(-1e-42)), (1e60, np.inf)])
def test_what_numpy_does_at_errors_is_the_environment_s_choice_and_nothing_of_ddrl_s(
    name: str, number: float, seen: float
) -> None:
    """Simulators let numpy raise at underflow for the whole process; float64 becomes float32 all the same."""
    space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    value = np.full(2, number)
    given = Given(spaces.Dict({name: space}), {name: value}, number) if name else Given(space, value, number)
    env = LoopVectorEnv("given", [given])
    with np.errstate(all="raise"), warnings.catch_warnings(action="error"):
        assert (env.reset(1) == seen).all()
        step = env.step(np.zeros(1, np.int64))
        assert np.geterr()["under"] == "raise"
    assert (step.observation == seen).all()
    assert (step.reward == seen).all()
    assert step.raw_reward.tolist() == [number]


class NoSpace(Given):
    def __init__(self) -> None:
        super().__init__(None, None)


class OldReset(Given):
    def reset(self, **_: Any) -> Any:
        return self.value


class BeginsWith(Given):
    """Gives what it is made with as the info of reset."""

    def __init__(self, info: Any) -> None:
        super().__init__(FLOATS, np.zeros(2, np.float32))
        self.begin = info

    def reset(self, **_: Any) -> Any:
        return self.value, self.begin


class SmallSeeds(Given):
    """Its simulator takes seeds of a signed integer."""

    def __init__(self, check: Callable[[int], Any]) -> None:
        super().__init__(FLOATS, np.zeros(2, np.float32))
        self.check = check
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, **_: Any) -> Any:
        if seed is not None:
            self.check(seed)
        self.seeds.append(seed)
        return self.value, {}


@pytest.mark.parametrize(
    "check", [np.int32, lambda seed: struct.pack("i", seed), lambda seed: range(2**31).index(seed)]
)
def test_a_simulator_that_takes_signed_seeds_is_given_such(check: Callable[[int], Any]) -> None:
    environments = [SmallSeeds(check) for _ in range(20)]
    LoopVectorEnv("given", environments).reset(1)
    wanted = environment_seeds(1, 20)
    assert max(wanted) >= 2**31  # some are too large
    assert [env.seeds for env in environments] == [[seed % 2**31] for seed in wanted]


def test_what_a_reset_raises_for_another_reason_is_raised() -> None:
    environments = [SmallSeeds(lambda seed: int("x")) for _ in range(20)]
    with pytest.raises(ValueError, match="invalid literal"):
        LoopVectorEnv("given", environments).reset(1)


class NeedsOptions(Given):
    def reset(self, *, seed: int | None = None, options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.value, {}


class TakesNothing(Given):
    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.value, {}


class NeedsSeeds(Given):
    """Which the first reset of all gives, and no other."""

    def reset(self, seed: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.value, {}

    def step(self, action: Any) -> Any:
        return self.value, 1.0, True, False, {}


class OldStep(Given):
    def step(self, action: Any) -> Any:
        return self.value, 1.0, False, {}


class Ends(Given):
    """Gives what it is made with for the last three values of a step."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(FLOATS, np.zeros(2, np.float32))
        self.ends = ends

    def step(self, action: Any) -> Any:
        return self.value, 1.0, *self.ends


class Words(spaces.Space[str]):
    """A space that implements only a part of Gymnasium's interface."""

    @property
    def is_np_flattenable(self) -> bool:
        raise NotImplementedError


ZEROS = np.zeros(2, np.float32)


def play(env: Any, steps: int = 2) -> None:
    env.reset(1)
    for _ in range(steps):
        env.step(np.zeros(env.num_envs, np.int64))


def play_made(make: Callable[[], Any]) -> None:
    play(LoopVectorEnv("package.module:Long", [make()]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (NoSpace, "observation_space is None before reset"),
        (lambda: Given("Box(2)", ZEROS), "observation_space is a builtins.str"),
        (lambda: Given(FLOATS, ZEROS, action="two"), "action_space is a builtins.str"),
        (lambda: Given(spaces.Dict(a=FLOATS, w=Words(None, None)), {}), "the entry w of the observation"),
        (lambda: Given(spaces.Dict(s=spaces.Sequence(FLOATS)), {}), "env.max_lengths.s"),
        (lambda: Given(spaces.Dict(deep=spaces.Dict(s=spaces.Sequence(FLOATS))), {}), "size; let a factory give it"),
        (lambda: Given(spaces.Tuple((spaces.Sequence(FLOATS),)), ()), "size; let a factory give it beside"),
        (lambda: OldReset(FLOATS, ZEROS), "reset returned float32 (2,)"),
        (lambda: BeginsWith(None), "reset gave info = None (a NoneType): return (observation, {})"),
        (lambda: BeginsWith(3), "reset gave info = 3"),
        (lambda: Given(FLOATS, ZEROS.astype(float)), "agree, as by np.asarray(observation, np.float32)"),
        (lambda: Given(FLOATS, [0.0, 0.0]), "agree, as by np.asarray(observation, np.float32)"),
        (lambda: Given(spaces.Dict(a=LEVELS), {"a": (2, 3, 3)}), "agree, as by np.asarray(observation, np.int64)"),
        (lambda: NeedsOptions(FLOATS, ZEROS), "argument: 'options': define reset(self, *, seed=None, options=None)"),
        (lambda: TakesNothing(FLOATS, ZEROS), "argument 'seed': define reset(self, *, seed=None, options=None)"),
        (lambda: NeedsSeeds(FLOATS, ZEROS), "argument: 'seed': define reset(self, *, seed=None, options=None)"),
        (lambda: OldStep(FLOATS, ZEROS), "step returned 4 values"),
        (lambda: Given(spaces.Dict(a=FLOATS, b=FLOATS), {"a": ZEROS}), "a dict without b"),
        (lambda: Given(spaces.Dict(a=FLOATS), {"a": ZEROS, "c": ZEROS}), "a dict with c too"),
        (lambda: Given(spaces.Dict(a=FLOATS), ZEROS), "float32 (2,)"),
        (lambda: Given(spaces.Dict(), {}), "the observation of Dict() holds no number"),
        (lambda: Given(spaces.Dict(a=spaces.Box(0, 1, (0,))), {}), "holds no number"),
        (lambda: Given(FLOATS, ZEROS, action=spaces.MultiBinary(300)), "more than 4,096 combinations"),
        (lambda: Ends(None, False, {}), "terminated = None (a NoneType): give True or False"),
        (lambda: Ends(False, "no", {}), "truncated = 'no'"),
        (lambda: Ends(0.5, False, {}), "terminated = 0.5"),
        (lambda: Ends(np.array([True, False]), False, {}), "terminated = array([ True, False])"),
        (lambda: Ends(False, False, None), "info = None (a NoneType): give a dict"),
        (lambda: Ends(True, False, ["x"]), "info = ['x']"),
    ],
)
def test_what_an_environment_lacks_is_said_in_one_line(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(EnvError) as refusal:
        play_made(make)
    text = str(refusal.value)
    assert words in text
    assert len(text) < MAX_MESSAGE
    assert "\n" not in text


@pytest.mark.parametrize("end", [True, 1, 1.0, np.True_, np.array([True]), np.array(1)])
def test_an_end_counts_in_whatever_type_says_yes_or_no(end: Any) -> None:
    env = LoopVectorEnv("given", [Ends(end, False, {}), Ends(False, np.False_, {})])
    env.reset(1)
    step = env.step(np.zeros(2, np.int64))
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True, False], [False, False])
    assert step.terminated.dtype == step.truncated.dtype == np.bool_


# ---- Vectors ----


class Chain:
    """A vector of the user's own: a state counts up to 3; how it keeps memory and resets can be chosen."""

    def __init__(self, num_envs: int = 2, memory: str = "own", resets: str = "next") -> None:
        self.num_envs = num_envs
        self.spec = EnvSpec("chain", ArraySpec((4,), "float32"), 2)
        self.memory = memory
        self.resets = resets
        self.seen = np.zeros((num_envs, 4), np.float32)

    def look(self) -> np.ndarray:
        self.seen[:] = 0
        self.seen[:, self.at] = 1
        return (
            self.seen[:, :4].copy()
            if self.memory == "own"
            else np.ascontiguousarray(self.seen.reshape(-1)[:8]).reshape(2, 4)
        )

    def reset(self, seed: int) -> np.ndarray:
        self.at = 0
        self.over = False
        return self.look()

    def step(self, action: np.ndarray) -> EnvStep:
        action[...] = 1  # vectors may write into what they are given
        paid = 1.0 if not self.over or self.resets == "same" else 0.0
        self.at = 0 if self.over else self.at + 1
        self.over = self.at == 3
        end = np.full(self.num_envs, self.over)
        reward = np.full(self.num_envs, paid, np.float32)
        return EnvStep(self.look(), reward, end, np.zeros(self.num_envs, bool), reward.astype(np.float64))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("memory", ["own", "reused"])
def test_observations_of_a_vector_stay_as_they_were_given(memory: str) -> None:
    env = OwnVectorEnv(Chain(memory=memory), "chain")
    seen = env.reset(0)
    for _ in range(300):
        kept = seen.copy()
        action = np.zeros(2, np.int64)
        following = env.step(action).observation
        np.testing.assert_array_equal(seen, kept)
        assert not action.any()
        seen = following


def test_a_vector_with_memory_of_its_own_is_not_copied_for_ever() -> None:
    inner = Chain()
    env = OwnVectorEnv(inner, "chain")
    env.reset(0)
    for _ in range(150):
        env.step(np.zeros(2, np.int64))
    given = EnvStep(np.ones((2, 4), np.float32), *([np.zeros(2, kind) for kind in ("f4", "?", "?", "f8")]))
    inner.step = lambda action: given  # type: ignore[method-assign]
    assert env.step(np.zeros(2, np.int64)).observation is given.observation


def test_a_vector_that_takes_a_step_where_it_should_reset_is_found_out() -> None:
    with pytest.raises(EnvError, match=r"right after an episode's end.*NEXT_STEP"):
        play(OwnVectorEnv(Chain(resets="same"), "chain"), 5)


class Doubling(gymnasium.Env[Any, Any]):
    """Works on the action that it is given, as Pendulum's authors may."""

    observation_space = FLOATS
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    metadata: ClassVar[dict[str, Any]] = {}

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return ZEROS, {}

    def step(self, action: Any) -> Any:
        action *= 2
        return ZEROS, 0.0, False, False, {}


@pytest.mark.parametrize("native", [False, True])
def test_an_action_that_an_environment_writes_into_stays_what_was_chosen(native: bool) -> None:
    vector = gymnasium.vector.SyncVectorEnv([Doubling, Doubling])
    env: Any = NativeVectorEnv("doubling", vector) if native else LoopVectorEnv("doubling", [Doubling(), Doubling()])
    env.reset(1)
    action = np.full((2, 2), 0.25, np.float32)
    env.step(action)
    assert (action == 0.25).all()


class Registered(gymnasium.vector.SyncVectorEnv):
    """A vector that a package registers: its rewards are of several numbers."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([Doubling] * num_envs)

    def step(self, actions: Any) -> Any:
        observation, reward, *rest = super().step(actions)
        return (observation, np.stack([reward, reward], 1), *rest)


def test_a_vector_that_a_package_registers_is_checked_and_gymnasium_s_own_is_not() -> None:
    gymnasium.register("Registered-v0", Doubling, vector_entry_point=Registered)
    try:
        env = make_vector_env(EnvConfig(id="Registered-v0"), 2)
        env.reset(1)
        with pytest.raises(EnvError, match="reward"):
            env.step(np.zeros((2, 2), np.float32))
    finally:
        del gymnasium.registry["Registered-v0"]
    assert make_vector_env(EnvConfig(id="CartPole-v1"), 2)._trusted


class OfSeveralAgents:
    possible_agents: ClassVar[list[str]] = ["a", "b"]


class OfDmEnv:
    def action_spec(self) -> None: ...

    def step(self, action: Any) -> None: ...


class OfNoBase:
    def step(self, action: Any) -> None: ...


class CallsItselfOne(Given):
    num_envs = 4


class Unspeakable(Exception):
    def __str__(self) -> str:
        return self.words  # type: ignore[attr-defined]


def test_an_error_without_words_or_that_cannot_give_them_is_called_by_its_name() -> None:
    assert [user_error(one) for one in (Unspeakable(), AssertionError())] == ["Unspeakable", "AssertionError"]


class HasAnyAttribute(Given):
    """As proxies of an environment in another process or language."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return HasAnyAttribute.Answer()

    class Answer:
        mean = var = count = property(lambda self: HasAnyAttribute.Answer())

        def __call__(self, *args: Any, **kwargs: Any) -> None: ...


class HasMasksToo(HasAnyAttribute):
    def action_masks(self) -> Any:
        return [1, 1]


class IsOnlyAProxy:
    def __getattr__(self, name: str) -> Any:
        return None


def gives_a_class() -> type[Given]:
    return Given


class WithoutSingleSpaces:
    num_envs = 4
    metadata: ClassVar[dict[str, Any]] = {}


OldGym = type("OldGym", (), {"__module__": "gym.envs.classic"})


@pytest.mark.parametrize("factory", ["HasAnyAttribute", "HasMasksToo"])
def test_an_environment_that_has_any_attribute_is_no_vector_and_has_the_masks_and_states_of_its_class(
    factory: str,
) -> None:
    env = make_vector_env(EnvConfig(id=f"{__name__}:{factory}", kwargs={"space": FLOATS, "value": ZEROS}, num_envs=3))
    assert env.num_envs == 3
    assert (ACTION_MASK in dict(env.spec.observation.fields)) == (factory == "HasMasksToo")
    env.reset(1)
    assert read_states(env) == b""


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("CallsItselfOne", "needs autoreset mode NEXT_STEP"),
        ("WithoutSingleSpaces", "single_observation_space is None"),
        ("OldGym", "old package gym"),
        ("OfSeveralAgents", "several agents"),
        ("OfDmEnv", "dm_env's interface"),
        ("OfNoBase", "no gymnasium.Env"),
        ("IsOnlyAProxy", "IsOnlyAProxy; it must return a gymnasium.Env"),
        ("gives_a_class", r"returned the class Given: return one of its objects, Given\(...\)"),
    ],
)
def test_what_a_factory_returns_is_known_by_name(factory: str, words: str) -> None:
    kwargs = {"space": FLOATS, "value": ZEROS} if factory == "CallsItselfOne" else {}
    with pytest.raises(EnvError, match=words) as refusal:
        make_vector_env(EnvConfig(id=f"{__name__}:{factory}", kwargs=kwargs))
    assert len(str(refusal.value)) < MAX_MESSAGE


class Foreign:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array


@pytest.mark.parametrize("form", ["plain", "flat", "tuple"])
def test_arrays_of_other_libraries_are_taken_by_the_same_rule(form: str) -> None:
    seen = wrapped_in(form, FLOATS, Foreign(np.full(2, 0.5, np.float32))).reset(1)
    assert (seen == 0.5).sum() == 4
    with pytest.raises(EnvError, match="make them agree"):
        wrapped_in(form, FLOATS, Foreign(np.zeros(3, np.float32))).reset(1)


class UnwrapsToAnother(Given):
    """As wrappers of simulators of another interface: what it unwraps to has no spaces."""

    @property
    def unwrapped(self) -> Any:
        return Foreign(ZEROS)


def test_a_wrapper_of_another_interface_is_stepped() -> None:
    play(LoopVectorEnv("another", [UnwrapsToAnother(FLOATS, ZEROS)]), 3)


class OnceInAProcess(Given):
    living = 0

    def __init__(self) -> None:
        type(self).living += 1
        if self.living > 1:
            raise RuntimeError("one emulator a process")
        super().__init__(FLOATS, ZEROS)

    def close(self) -> None:
        type(self).living -= 1


def test_a_simulator_that_may_exist_once_in_a_process_is_made_once() -> None:
    config = EnvConfig(id=f"{__name__}:OnceInAProcess", num_envs=1)
    for episodes in (1, 7):
        env = make_vector_env(config, evaluation_envs(config, episodes))
        assert env.num_envs == 1
        env.close()
    assert evaluation_envs(EnvConfig(num_envs=2), 7) == 7
    with pytest.raises(EnvError, match=r"one emulator a process .*; .* env.num_envs = 1") as refusal:
        make_vector_env(config, 2)
    assert len(str(refusal.value)) < MAX_MESSAGE
    OnceInAProcess.living = 0


class NeverCloses(Given):
    def close(self) -> None:
        threading.Event().wait(60)


def own_vector(games: list[Any]) -> OwnVectorEnv:
    vector: Any = Chain()
    vector.close = games[0].close
    return OwnVectorEnv(vector, "stuck")


def atari_vector(games: list[Any]) -> AtariVectorEnv:
    for game in games:
        game.actions = [0]
    return AtariVectorEnv(games, EnvConfig(id="stuck"))


@pytest.mark.parametrize("vector", [partial(LoopVectorEnv, "stuck"), own_vector, atari_vector])
def test_a_close_that_does_not_return_is_left_with_its_place(
    vector: Callable[[list[Any]], Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vectors, "CLOSE_SECONDS", 0.05)
    vector([NeverCloses(FLOATS, ZEROS) for _ in range(3)]).close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ddrl: env.id = stuck: its close does not return, which ends nothing: left after 0.05 s (")
    assert "in close: threading.Event().wait(60))" in line


class ForksOnce(Given):
    """Its first step forks, and both processes return."""

    fork = -1

    def step(self, action: Any) -> Any:
        if self.fork < 0:
            self.fork = os.fork()
        return super().step(action)


def test_a_fork_of_an_environment_s_process_that_returns_steps_no_further(capfd: pytest.CaptureFixture[str]) -> None:
    env = ForksOnce(FLOATS, ZEROS)
    vector = LoopVectorEnv("forks", [env])
    vector.reset(0)
    process = os.getpid()
    vector.step(np.zeros(1, np.int64))
    if os.getpid() != process:
        os._exit(0)  # which is not to happen
    assert os.waitstatus_to_exitcode(os.waitpid(env.fork, 0)[1]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ddrl: env.id = forks: a fork that its step has made returns too, and ends here")
    vector.step(np.zeros(1, np.int64))


class Drawn(Given):
    """Draws what it is when it is made."""

    def __init__(self) -> None:
        super().__init__(FLOATS, np.random.rand(2).astype(np.float32))


def test_what_constructors_draw_follows_from_the_seed_of_the_run() -> None:
    config = Config(env=EnvConfig(id=f"{__name__}:Drawn", num_envs=2))
    first, again, other = (
        make_rollout_env(config, Assignment(1, Role.ROLLOUT, 0, index)).reset(1) for index in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    assert (first[0] != first[1]).all()


# ---- Some steps before there is a run ----


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Given(FLOATS, ZEROS, np.zeros(2)), "not one number"),
        (lambda: OldStep(FLOATS, ZEROS), "step returned 4 values"),
        (lambda: OldReset(FLOATS, ZEROS), "reset returned float32"),
        (lambda: Given(LEVELS, np.array([2, 6, 3])), "int64 with 6 in it"),
    ],
)
def test_what_would_end_a_run_in_its_first_steps_is_refused_before(
    make: Callable[[], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "made", make)
    with pytest.raises(EnvError, match=words):
        probe_spec(EnvConfig(id=f"{__name__}:made"))


def test_steps_before_a_run_take_allowed_actions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Masked(Given):
        def __init__(self) -> None:
            super().__init__(FLOATS, ZEROS, action=spaces.Discrete(5))
            self.taken = taken

        def action_masks(self) -> Any:
            return np.array([0, 0, 1, 0, 1], bool)

        def step(self, action: Any) -> Any:
            self.taken.append(action)
            return super().step(action)

    taken: list[int] = []
    monkeypatch.setitem(globals(), "made", Masked)
    probe_spec(EnvConfig(id=f"{__name__}:made"))
    assert set(taken) == {2, 4}


@pytest.mark.parametrize(
    ("space", "value", "words"),
    [
        (spaces.Box(0, 255, (5,), np.uint8), np.eye(5, dtype=np.uint8)[2], "observations: bytes were at most 1 of 255"),
        (spaces.Box(0, 255, (7, 7, 3), np.uint8), np.full((7, 7, 3), 10, np.uint8), "at most 10 of 255"),
        (spaces.Box(0, 1, (5,), np.uint8), np.eye(5, dtype=np.uint8)[2], ""),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([200, 0], np.uint8), ""),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), np.array([-442, 0], np.float32), "numbers reached 442"),
        (FLOATS, ZEROS, ""),
        (
            spaces.Dict(a=spaces.Box(0, 255, (2,), np.uint8), b=FLOATS),
            {"a": np.array([3, 1], np.uint8), "b": ZEROS},
            "bytes were at most 3 of 255",
        ),
    ],
)
def test_numbers_that_will_hardly_be_learned_from_are_named(
    space: Any, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "made", lambda: Given(space, value))
    notes = [note for note in probe_spec(EnvConfig(id=f"{__name__}:made")).notes if "env.scale = auto" not in note]
    assert [words in note for note in notes] == [True] * bool(words)
    assert all(len(note) < MAX_MESSAGE for note in notes)


# ---- Exceptions in the user's code ----


class Breaks(Given):
    def step(self, action: Any) -> Any:
        return np.zeros(3) @ np.zeros(2)


class BreaksDeeper(Given):
    def step(self, action: Any) -> Any:
        return self.solve()

    def solve(self) -> Any:
        raise ValueError("no solution\nof many lines " + "x" * 500)


@pytest.mark.parametrize(
    ("kind", "frame"),
    [(Breaks, "in step"), (BreaksDeeper, "in solve")],
)
def test_an_exception_in_an_environment_is_one_line_with_the_users_frame(kind: Any, frame: str) -> None:
    env = LoopVectorEnv("breaks", [kind(FLOATS, ZEROS)])
    env.reset(1)
    with pytest.raises(ValueError, match=r".") as failure:
        env.step(np.zeros(1, np.int64))
    text = describe(failure.value, "rank 1")
    assert frame in text
    assert "ValueError" in text
    assert "\n" not in text
    assert len(text) < MAX_MESSAGE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def step(:\n", "(half_written.py, line 1: def step(:)"),
        ("x = 1\ny = z\n", "(half_written.py, line 2, in <module>: y = z)"),
        ("import absent_simulator\n", "(half_written.py, line 1, in <module>: import absent_simulator)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line_with_the_users_frame(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_written.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=r".") as failure:
        make_vector_env(EnvConfig(id="half_written:make"))
    assert words in describe(failure.value, "env.id")
    config = Config(learner=LearnerConfig(network="half_written:Net"))
    with pytest.raises(NetworkError, match="cannot import half_written: ") as refusal:
        own_network(config.learner, VECTOR, {}, [(3,)])
    assert words in str(refusal.value)


def test_an_exception_of_the_library_itself_keeps_its_traceback() -> None:
    with pytest.raises(KeyError) as failure:
        exec("raise KeyError('inside')", {})
    failure.value.__traceback__ = failure.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert user_frame(failure.value) == ""
    assert "Traceback" in describe(failure.value, "rank 1")
    assert describe(DdrlError("words"), "rank 1") == "rank 1: words"

"""The three vectors of environments in ddrl's protocol (`ddrl.core.specs.VectorEnv`): a loop over single ones, an
adapter of Gymnasium's vectors, and one of a user's own. `CheckedVectorEnv` is what they share: the check of each step.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import gymnasium
import numpy as np

from ddrl.core.errors import EnvError, first_line, user_error
from ddrl.core.forks import limited
from ddrl.core.metrics import info_figure
from ddrl.core.specs import ACTION_MASK, Array, EnvSpec, EnvStep, Flags, Floats, Floats32, VectorEnv
from ddrl.envs.spaces import (
    MaskReader,
    action_table,
    as_number,
    batched,
    describe,
    describe_action,
    describe_named,
    environment_seeds,
    flags_of_each,
    is_array,
    is_box,
    is_dict,
    is_discrete,
    is_mapping,
    kind_of,
    named_writer,
    observation_writer,
    own_spaces,
    require_space,
    seed_spaces,
    shown,
    with_action_ranges,
    without_check,
)

CLOSE_SECONDS = 10.0  # for the environments of a vector to close
FIGURE_EPISODES = 100  # that a figure of info is a mean of
SIGNED = 2**31  # seeds are smaller than twice as much, and those of many simulators than this
_SIGNATURE = re.compile(r"\breset\(\) (got an unexpected|missing|takes) ")  # how Python says that arguments do not fit
REUSE_STEPS = 100  # in which a vector is found out that returns the same array again


def close_all(where: str, holders: list[Any]) -> None:
    """Close each of `holders` once, also where they are closed again. What one raises there is said, and ends nothing:
    what was learned is whole. Nor does one that never returns: it, and those after it, end with the process."""
    with limited(CLOSE_SECONDS, f"{where}: its close does not return, which ends nothing"):
        while holders:
            env = holders.pop(0)
            try:
                env.close()
            except Exception as error:
                words = user_error(error, f"{where}: its close fails, which ends nothing: ")
                print(f"ddrl: {words}", file=sys.stderr, flush=True)


class CheckedVectorEnv:
    """N environments in ddrl's protocol, and the check of each step that is the same for all kinds: a subclass takes
    the step and copies its observations, by `observation_writer`, which checks them.

    What is not checked here: that numbers are finite, which the rollout's StepWriter sees as it records them."""

    def __init__(
        self, env_id: str, num_envs: int, spec: EnvSpec, actions: Array | None = None, reward_clip: bool = False
    ) -> None:
        """`actions`: what the environments call each action, where they have other numbers (`action_table`)."""
        self.num_envs = num_envs
        self.spec = spec
        self.holders: list[Any] = []  # the environments, which may keep a state between episodes
        self._where = f"env.id = {env_id}"
        self._actions = actions
        self._reward_clip = reward_clip
        self._over: Flags | None = None  # episodes that the last step ended; None before the first reset
        self._process = 0  # that has reset it

    def reset(self, seed: int) -> Array:
        """Begin new episodes everywhere. Returns [N, *observation.shape]."""
        self._over = np.zeros(self.num_envs, np.bool_)
        self._process = os.getpid()
        return self._begin_all(seed)

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N, *action.shape]; an environment whose episode has ended begins the next one instead."""
        over = self._over
        if over is None:
            raise EnvError(f"{self._where}: step before reset; call reset(seed) first")
        # Environments may write into what they are given, and the row keeps what was chosen.
        step = self._take(action.copy() if self._actions is None else self._actions[action], over)
        if os.getpid() != self._process:
            self._end_fork()
        if np.count_nonzero(over):
            self._check_resets(step, over)
        self._over = step.terminated | step.truncated
        return step

    def close(self) -> None:
        """Close every environment (`close_all`)."""
        close_all(self._where, self.holders)

    def _end_fork(self) -> NoReturn:
        """A copy of the process in which an environment's step has returned would train as well."""
        words = f"{self._where}: a fork that its step has made returns too, and ends here: os._exit(0) ends it there"
        print(f"ddrl: {words}", file=sys.stderr, flush=True)
        os._exit(1)

    def _begin_all(self, seed: int) -> Array:
        raise NotImplementedError

    def _take(self, action: Array, over: Flags) -> EnvStep:
        """The step with `action`, an array of its own; `over`: environments that only reset."""
        raise NotImplementedError

    def _rewards(self, given: Any) -> tuple[Floats, Floats32]:
        """The rewards as they are, and as the learner sees them."""
        try:
            raw = np.array(given)
        except (TypeError, ValueError):
            raw = None
        if raw is None or raw.shape != (self.num_envs,) or raw.dtype.kind not in "biuf":  # None is no number
            raw = np.array([self._one_number(reward) for reward in given])
        raw = raw.astype(np.float64, copy=False)
        return raw, self._learned(raw)

    def _learned(self, raw: Floats) -> Floats32:
        with np.errstate(over="ignore", under="ignore"):  # which the environment may have set to raise
            return self._cast(raw)

    def _cast(self, raw: Floats) -> Floats32:
        return (np.clip(raw, -1.0, 1.0) if self._reward_clip else raw).astype(np.float32)

    def _flags(self, given: Any, name: str) -> Flags:
        """`given` as an array of its own."""
        flags = np.array(given)
        if flags.shape != (self.num_envs,) or flags.dtype.kind not in "biu":
            raise EnvError(
                f"{self._where}: {name} is {kind_of(given)}: it must be {self.num_envs} bools, one an environment"
            )
        return flags.astype(np.bool_, copy=False)

    def _check_resets(self, step: EnvStep, over: Flags) -> None:
        reward = step.reward.reshape(self.num_envs, -1)
        moved = over & (step.terminated | step.truncated | (reward != 0).any(1))
        if moved.any():
            index = int(moved.argmax())
            raise EnvError(
                f"{self._where}: environment {index} gave the reward {shown(step.reward[index].tolist())} or an end "
                "right after an episode's end; that step must only reset it and give 0 (autoreset mode NEXT_STEP)"
            )

    def _one_number(self, reward: Any) -> float:
        number = as_number(reward)
        if number is None:
            raise EnvError(
                f"{self._where}: step gave the reward {shown(reward)} ({kind_of(reward)}), not one number: give one; "
                "a wrapper adds several up (or a VectorEnv with spec.reward_shape gives them)"
            )
        return number


class LoopVectorEnv(CheckedVectorEnv):
    """`environments` of one kind, stepped one after the other: for every environment that brings no vector of its own.

    Lean where Gymnasium's SyncVectorEnv is general: it carries no info dicts, concatenates nothing, and copies each
    observation once, into the array it returns. An exception in an environment passes through with its traceback."""

    def __init__(
        self,
        env_id: str,
        environments: Sequence[gymnasium.Env[Any, Any]],
        reward_clip: bool = False,
        *,
        named: bool = False,
        max_lengths: Mapping[str, int] | None = None,
        action_mask: str = "auto",
        figures: Sequence[str] = (),
    ) -> None:
        """Take over `environments`; EnvError where their spaces differ or are not supported. `named`: a Dict of
        observations is a record of named arrays, its Sequences padded to `max_lengths`. `action_mask`,
        `figures`: as in `ddrl.core.config.EnvConfig`."""
        first = environments[0]
        require_space(env_id, first, "observation_space")
        require_space(env_id, first, "action_space")
        if len({id(env) for env in environments}) != len(environments):
            raise EnvError(
                f"env.id = {env_id}: its factory returned the same environment twice; make a new one at each call"
            )
        space: Any = first.observation_space
        describe_action(env_id, first.action_space)  # refuses too many combinations, which a mask would list
        self._mask = MaskReader.of(env_id, first, action_mask)
        self._looks_for_masks = action_mask == "auto" and is_discrete(first.action_space)
        if self._mask is not None:
            space = self._mask.rest(space)
        lengths = max_lengths or {}
        as_record = named and is_dict(space)
        record = describe_named(env_id, space, lengths) if as_record else None
        spec = describe(env_id, space, first.action_space, record)
        if self._mask is not None:
            spec = spec.with_mask()
        super().__init__(env_id, len(environments), spec, action_table(first.action_space), reward_clip)
        for other in environments[1:]:
            if other.observation_space != first.observation_space or other.action_space != first.action_space:
                raise EnvError(
                    f"env.id = {env_id}: its environments differ ({shown(first.observation_space)}, "
                    f"{shown(first.action_space)} and {shown(other.observation_space)}, {shown(other.action_space)}); "
                    "all of one run must have the same spaces"
                )
        for env in environments:
            own_spaces(env)
        self.place: tuple[int, int] = (
            0,
            len(environments),
        )  # of the first environment, among so many of the vector that it is part of
        self._environments = list(environments)
        self.holders = self._environments
        self._write = named_writer(env_id, space, lengths) if as_record else observation_writer(env_id, space)
        if self._mask is not None:
            self._write_masked = self._mask.writer(self._write, named=as_record)
        self._recent = {key: deque[float](maxlen=FIGURE_EPISODES) for key in figures}

    @property
    def figures(self) -> dict[str, float]:
        """By the name of its metric: the mean of an entry of info at the ends of recent episodes."""
        return {info_figure(key).name: sum(recent) / len(recent) for key, recent in self._recent.items() if recent}

    def _begin_all(self, seed: int) -> Array:
        observation = self._empty()
        first, total = self.place
        seeds = environment_seeds(seed, total)[first : first + self.num_envs]
        for env, env_seed, row in zip(self._environments, seeds, observation, strict=True):
            seed_spaces(env, env_seed)
            result = self._reset(env, env_seed)
            self._begin(env, result, row)
        return observation

    def _take(self, action: Array, over: Flags) -> EnvStep:
        actions: Any = action.tolist() if self.spec.discrete and action.ndim == 1 else action
        write = self._write
        masked = self._mask is not None
        resets = over.tolist()
        observation = self._empty()
        rewards: list[Any] = [0.0] * self.num_envs
        terminations: list[Any] = [False] * self.num_envs
        truncations: list[Any] = [False] * self.num_envs
        for index, (env, row) in enumerate(zip(self._environments, observation, strict=True)):
            if resets[index]:
                self._begin(env, self._reset(env), row)
                continue
            result = env.step(actions[index])
            try:
                state, reward, terminated, truncated, info = result
            except (TypeError, ValueError):
                self._refuse_result(result)
            if masked:
                self._write_masked(env, state, info, row)
            else:
                write(state, row)
            rewards[index] = reward
            terminations[index] = terminated
            truncations[index] = truncated
            if type(info) is not dict and not is_mapping(info):
                self._refuse_info("step", info, "give a dict")
            if not masked and self._looks_for_masks and ACTION_MASK in info:
                self._refuse_mask_of_info()
            if self._recent and (terminated or truncated):
                self._keep_figures(info)
        raw, learned = self._rewards(rewards)
        terminated = flags_of_each(self._where, terminations, "terminated")
        truncated = flags_of_each(self._where, truncations, "truncated")
        return EnvStep(observation, learned, terminated, truncated, raw)

    def render(self) -> Any:
        """A picture of the first environment, uint8 [height, width, 3]; None where it draws none."""
        return self._environments[0].render()

    def _keep_figures(self, info: Any) -> None:
        for key, recent in self._recent.items():
            if key not in info:
                continue
            number = as_number(info[key])
            if number is None:
                raise EnvError(
                    f"{self._where}: env.figures names info[{key!r}], which is {shown(info[key])} "
                    f"({kind_of(info[key])}), not one number: leave {key} out of env.figures"
                )
            recent.append(number)

    def _empty(self) -> Array:
        return np.empty((self.num_envs, *self.spec.observation.shape), self.spec.observation.numpy)

    def _reset(self, env: Any, seed: int | None = None) -> Any:
        try:
            return env.reset() if seed is None else env.reset(seed=seed)
        except (OverflowError, ValueError, struct.error):
            if seed is None or seed < SIGNED:
                raise
            return env.reset(seed=seed - SIGNED)  # its simulator takes seeds of a signed integer
        except TypeError as error:
            if not _SIGNATURE.search(str(error)):
                raise
            raise EnvError(
                f"{self._where}: {first_line(error)}: define reset(self, *, seed=None, options=None), which calls "
                "super().reset(seed=seed)"
            ) from error

    def _begin(self, env: Any, result: Any, row: Array) -> None:
        """Write the observation of what reset returned."""
        if isinstance(cast(object, result), tuple) and len(result) == 2:
            observation, info = result
            if not is_mapping(info):
                self._refuse_info("reset", info, "return (observation, {})")
            if self._mask is not None:
                self._write_masked(env, observation, info, row)
                return
            if self._looks_for_masks and ACTION_MASK in info:
                self._refuse_mask_of_info()
            self._write(observation, row)
            return
        given = "a tuple" if isinstance(result, tuple) else kind_of(result)
        raise EnvError(
            f"{self._where}: reset returned {given}, but Gymnasium's reset returns (observation, info); "
            "an environment of the old package gym needs a wrapper, such as shimmy's"
        )

    def _refuse_info(self, method: str, info: Any, remedy: str) -> NoReturn:
        raise EnvError(f"{self._where}: {method} gave info = {shown(info)} ({kind_of(info)}): {remedy}")

    def _refuse_mask_of_info(self) -> NoReturn:
        raise EnvError(
            f"{self._where}: info has an action_mask: set env.action_mask = info, so that only allowed actions are "
            "taken (reset and step must give it), or none, to ignore it"
        )

    def _refuse_result(self, result: Any) -> NoReturn:
        given = f"{len(cast(Any, result))} values" if isinstance(result, tuple) else kind_of(result)
        raise EnvError(
            f"{self._where}: step returned {given}, but Gymnasium's step returns the 5 values "
            "(observation, reward, terminated, truncated, info); an environment of the old package gym returns 4"
        ) from None


def speaks_our_protocol(vector: Any) -> bool:
    """Whether a vector resets on the next step and gives arrays (a Box), so that NativeVectorEnv can adapt it."""
    mode = cast(dict[str, Any], vector.metadata or {}).get("autoreset_mode")
    return mode is gymnasium.vector.AutoresetMode.NEXT_STEP and is_box(
        getattr(vector, "single_observation_space", None)
    )


class NativeVectorEnv(CheckedVectorEnv):
    """A Gymnasium vector environment in ddrl's protocol: environments that bring their own vector form (CartPole-v1).

    One call steps all of them, several times faster than a loop. Only vectors that reset on the next step fit
    (`speaks_our_protocol`); `making` takes the loop for others."""

    def __init__(
        self,
        env_id: str,
        vector: Any,
        reward_clip: bool = False,
        *,
        trusted: bool = False,
    ) -> None:
        """Take over `vector`, a gymnasium.vector.VectorEnv for which `speaks_our_protocol` holds; `trusted`: one of
        Gymnasium's own, with actions that ddrl chose."""
        space = vector.single_observation_space
        actions = vector.single_action_space
        assert is_box(space)
        super().__init__(env_id, vector.num_envs, describe(env_id, space, actions), action_table(actions), reward_clip)
        self._vector = vector
        self.holders = [vector]
        self._write = observation_writer(env_id, batched(space, self.num_envs))
        self._out_shape = (self.num_envs, *self.spec.observation.shape)
        self._out_dtype = np.dtype(self.spec.observation.dtype)
        self._trusted = trusted
        if trusted:
            vector.action_space = without_check(vector.action_space)

    def _begin_all(self, seed: int) -> Array:
        (own_seed,) = environment_seeds(seed, 1)
        if not self._trusted:
            seed_spaces(self._vector, own_seed)
        observation, info = self._vector.reset(seed=own_seed)
        if ACTION_MASK in info:
            raise EnvError(
                f"{self._where}: masks of a Gymnasium vector are not read: let the factory return one environment"
            )
        return self._own(observation)

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N, *action.shape]; an environment whose episode has ended begins the next one instead."""
        if not self._trusted:
            return super().step(action)
        if self._actions is not None:  # the checks, and numpy's state at errors, would take a tenth of CartPole's step
            action = self._actions[action]
        observation, reward, terminated, truncated, _ = self._vector.step(action)
        raw = reward.astype(np.float64)
        own = np.empty(self._out_shape, self._out_dtype)
        own[...] = observation
        return EnvStep(own, self._cast(raw), terminated.copy(), truncated.copy(), raw)

    def _take(self, action: Array, over: Flags) -> EnvStep:
        observation, reward, terminated, truncated, _ = self._vector.step(action)
        raw, learned = self._rewards(reward)
        terminated = self._flags(terminated, "terminated")
        truncated = self._flags(truncated, "truncated")
        return EnvStep(self._own(observation), learned, terminated, truncated, raw)

    def render(self) -> Any:
        """A picture of the first environment, uint8 [height, width, 3]; None where it draws none."""
        pictures = self._vector.render()
        return pictures[0] if pictures else None

    def _own(self, observation: Any) -> Array:
        """A C-contiguous copy: vectors may reuse their buffers, and CartPole's array is transposed."""
        own = np.empty(self._out_shape, self._out_dtype)
        self._write(observation, own)
        return own


class OwnVectorEnv(CheckedVectorEnv):
    """A user's own VectorEnv, checked at every step: what breaks its spec is refused before it reaches a lane or a
    network. Where it returns memory again that it has returned before, its observations are copied."""

    def __init__(self, env: VectorEnv, env_id: str) -> None:
        super().__init__(env_id, env.num_envs, with_action_ranges(env.spec))
        self._env = env
        self.holders = [env]
        n = (env.num_envs,)
        self._expected: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...] = (
            ("observation", (*n, *env.spec.observation.shape), env.spec.observation.numpy),
            ("reward", (*n, *env.spec.reward_shape), np.dtype(np.float32)),
            ("terminated", n, np.dtype(np.bool_)),
            ("truncated", n, np.dtype(np.bool_)),
            ("raw_reward", n, np.dtype(np.float64)),
        )
        self._copies = False
        self._watched = REUSE_STEPS  # vector steps whose memory is still compared
        self._before: Array | None = None
        self._columns = {column.name: ((*n, *column.shape), np.dtype(column.dtype)) for column in env.spec.columns}

    def _begin_all(self, seed: int) -> Array:
        observation = self._env.reset(seed)
        self._check(observation, *self._expected[0])
        return self._own(observation)

    def _take(self, action: Array, over: Flags) -> EnvStep:
        step = self._env.step(action)
        try:
            step = EnvStep(*step)
        except TypeError:
            raise EnvError(
                f"{self._where}: step must return an EnvStep (ddrl.core.specs), not {type(step).__name__}"
            ) from None
        for value, expected in zip(step[:-1], self._expected, strict=True):
            self._check(value, *expected)
        if step.columns.keys() != self._columns.keys():
            raise EnvError(
                f"{self._where}: EnvStep.columns must hold {', '.join(self._columns) or 'nothing'} by its spec, "
                f"not {', '.join(step.columns) or 'nothing'}"
            )
        for name, (shape, dtype) in self._columns.items():
            self._check(step.columns[name], name, shape, dtype)
        if self._copies or self._watched:
            step = step._replace(observation=self._own(step.observation))
        return step

    def _own(self, observation: Array) -> Array:
        """A copy while it is not known whether the vector writes into this array again, and where it does."""
        if self._watched:
            self._watched -= 1
            self._copies = self._copies or (self._before is not None and np.may_share_memory(self._before, observation))
            self._before = observation if self._watched else None
        elif not self._copies:
            return observation
        return observation.copy()

    def _check(self, value: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if not is_array(value) or value.shape != shape or value.dtype != dtype or not value.flags.c_contiguous:
            raise EnvError(
                f"{self._where}: {name} must be a C-contiguous {dtype} array {shape} by its spec, not {kind_of(value)}"
            )

"""The three vectors of environments in ddrl's protocol (`ddrl.core.specs.VectorEnv`): a loop over single ones, an
adapter of Gymnasium's vectors, and the check of a user's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from ddrl.core.errors import EnvError
from ddrl.core.specs import Array, EnvSpec, EnvStep, VectorEnv
from ddrl.envs.spaces import (
    broken_observation,
    describe,
    describe_named,
    first_action,
    is_array,
    is_box,
    named_writer,
    observation_writer,
)


def environment_seeds(seed: int, count: int) -> list[int]:
    """Seeds of `count` environments that share no episode with those of another `seed` (seed, seed + 1, ... would)."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count, np.uint32)]


class LoopVectorEnv:
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
    ) -> None:
        """Take over `environments`; EnvError where their spaces differ or are not supported. `named`: a Dict of
        observations is a record of named arrays, its Sequences padded to `max_lengths`."""
        first = environments[0]
        self.num_envs = len(environments)
        if len({id(env) for env in environments}) != self.num_envs:
            raise EnvError(
                f"env.id = {env_id}: its factory returned the same environment twice; make a new one at each call"
            )
        space: Any = first.observation_space
        lengths = max_lengths or {}
        as_record = named and _is_dict(space)
        record = describe_named(env_id, space, lengths) if as_record else None
        self.spec: EnvSpec = describe(env_id, space, first.action_space, record)
        for other in environments[1:]:
            if other.observation_space != first.observation_space or other.action_space != first.action_space:
                raise EnvError(
                    f"env.id = {env_id}: its environments differ ({first.observation_space}, {first.action_space} and "
                    f"{other.observation_space}, {other.action_space}); all of one run must have the same spaces"
                )
        self._environments = list(environments)
        self._write = named_writer(env_id, space, lengths) if as_record else observation_writer(env_id, space)
        self._first_action = first_action(first.action_space)
        self._reward_clip = reward_clip
        self._over = [True] * self.num_envs
        self._started = False

    def reset(self, seed: int) -> Array:
        """Begin new episodes everywhere. Returns [N, *observation.shape]."""
        observation = self._empty()
        for env, env_seed, row in zip(
            self._environments, environment_seeds(seed, self.num_envs), observation, strict=True
        ):
            self._write(env.reset(seed=env_seed)[0], row)
        self._over = [False] * self.num_envs
        self._started = True
        return observation

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N, *action.shape]; an environment whose episode has ended begins the next one instead."""
        if not self._started:
            raise EnvError(f"env.id = {self.spec.env_id}: step before reset; call reset(seed) first")
        if not self.spec.discrete:
            actions: Any = action
        elif self._first_action:
            actions = (action + self._first_action).tolist()
        else:
            actions = action.tolist()
        write = self._write
        over = self._over
        observation = self._empty()
        rewards = [0.0] * self.num_envs
        terminations = [False] * self.num_envs
        truncations = [False] * self.num_envs
        for index, (env, row) in enumerate(zip(self._environments, observation, strict=True)):
            if over[index]:
                write(env.reset()[0], row)
                over[index] = False
                continue
            result = env.step(actions[index])
            try:
                state, reward, terminated, truncated, _ = result
            except (TypeError, ValueError):
                self._refuse_result(result)
            write(state, row)
            rewards[index] = reward  # type: ignore[call-overload]
            if terminated or truncated:
                over[index] = True
                terminations[index] = bool(terminated)
                truncations[index] = bool(truncated)
        try:
            raw = np.array(rewards, np.float64)
        except (TypeError, ValueError):
            raise EnvError(f"env.id = {self.spec.env_id}: the rewards {rewards} are not one number each") from None
        reward32 = (np.clip(raw, -1.0, 1.0) if self._reward_clip else raw).astype(np.float32)
        return EnvStep(observation, reward32, np.array(terminations), np.array(truncations), raw)

    def render(self) -> Any:
        """A picture of the first environment, uint8 [height, width, 3]; None where it draws none."""
        return self._environments[0].render()

    def close(self) -> None:
        """Close every environment."""
        for env in self._environments:
            env.close()

    def _empty(self) -> Array:
        return np.empty((self.num_envs, *self.spec.observation.shape), self.spec.observation.numpy)

    def _refuse_result(self, result: Any) -> NoReturn:
        given = f"{len(cast(Any, result))} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise EnvError(
            f"env.id = {self.spec.env_id}: step returned {given}, but Gymnasium's step returns the 5 values "
            "(observation, reward, terminated, truncated, info)"
        ) from None


def _is_dict(space: object) -> bool:
    return isinstance(space, spaces.Dict)


def speaks_our_protocol(vector: Any) -> bool:
    """Whether a vector resets on the next step and gives arrays (a Box), so that NativeVectorEnv can adapt it."""
    return vector.metadata.get("autoreset_mode") == gymnasium.vector.AutoresetMode.NEXT_STEP and isinstance(
        vector.single_observation_space, spaces.Box
    )


class NativeVectorEnv:
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
        self.num_envs = vector.num_envs
        self.spec: EnvSpec = describe(env_id, space, actions)
        self._vector = vector
        self._shape = (self.num_envs, *space.shape)
        self._dtype = space.dtype
        self._out_shape = (self.num_envs, *self.spec.observation.shape)
        self._out_dtype = np.dtype(self.spec.observation.dtype)
        self._first_action = first_action(actions)
        self._reward_clip = reward_clip
        self._same_shape = self._shape == self._out_shape
        if trusted:
            vector.action_space = _without_check(vector.action_space)

    def reset(self, seed: int) -> Array:
        """Begin new episodes everywhere. Returns [N, *observation.shape]."""
        return self._own(self._vector.reset(seed=environment_seeds(seed, 1)[0])[0])

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N, *action.shape]; an environment whose episode has ended begins the next one instead."""
        if self._first_action:
            action = action + self._first_action
        observation, reward, terminated, truncated, _ = self._vector.step(action)
        raw = reward.astype(np.float64)
        learned = np.clip(raw, -1.0, 1.0).astype(np.float32) if self._reward_clip else reward.astype(np.float32)
        return EnvStep(self._own(observation), learned, terminated.copy(), truncated.copy(), raw)

    def render(self) -> Any:
        """A picture of the first environment, uint8 [height, width, 3]; None where it draws none."""
        pictures = self._vector.render()
        return pictures[0] if pictures else None

    def close(self) -> None:
        """Close the vector."""
        self._vector.close()

    def _own(self, observation: Any) -> Array:
        """A C-contiguous copy: vectors may reuse their buffers, and CartPole's array is transposed."""
        if not is_array(observation) or observation.shape != self._shape or observation.dtype != self._dtype:
            raise broken_observation(self.spec.env_id, observation, self._shape, self._dtype)
        own = observation.astype(self._out_dtype, "C")
        return own if self._same_shape else own.reshape(self._out_shape)


def _without_check(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """`space`, which contains every action: CartPole checks each action in each step, a sixth of the step's time."""
    trusting = copy.copy(space)
    trusting.contains = lambda x: True  # type: ignore[method-assign]
    return trusting


class CheckedVectorEnv:
    """A user's own VectorEnv, checked at every step: what breaks its spec is refused before it reaches a lane or a
    network."""

    def __init__(self, env: VectorEnv, env_id: str) -> None:
        self.num_envs = env.num_envs
        self.spec = env.spec
        self._env = env
        self._id = env_id
        n = (env.num_envs,)
        self._expected: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...] = (
            ("observation", (*n, *env.spec.observation.shape), env.spec.observation.numpy),
            ("reward", (*n, *env.spec.reward_shape), np.dtype(np.float32)),
            ("terminated", n, np.dtype(np.bool_)),
            ("truncated", n, np.dtype(np.bool_)),
            ("raw_reward", n, np.dtype(np.float64)),
        )
        self._columns = {column.name: ((*n, *column.shape), np.dtype(column.dtype)) for column in env.spec.columns}

    def reset(self, seed: int) -> Array:
        """Begin new episodes everywhere. Returns [N, *observation.shape]."""
        observation = self._env.reset(seed)
        self._check(observation, *self._expected[0])
        return observation

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N, *action.shape]."""
        step = self._env.step(action)
        try:
            step = EnvStep(*step)
        except TypeError:
            raise EnvError(
                f"env.id = {self._id}: step must return an EnvStep (ddrl.core.specs), not {type(step).__name__}"
            ) from None
        for value, expected in zip(step[:-1], self._expected, strict=True):
            self._check(value, *expected)
        if step.columns.keys() != self._columns.keys():
            raise EnvError(
                f"env.id = {self._id}: EnvStep.columns must hold {', '.join(self._columns) or 'nothing'} by its spec, "
                f"not {', '.join(step.columns) or 'nothing'}"
            )
        for name, (shape, dtype) in self._columns.items():
            self._check(step.columns[name], name, shape, dtype)
        return step

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _check(self, value: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if not is_array(value) or value.shape != shape or value.dtype != dtype or not value.flags.c_contiguous:
            given = f"{value.dtype} {value.shape}" if is_array(value) else f"a {type(value).__name__}"
            raise EnvError(
                f"env.id = {self._id}: {name} must be a C-contiguous {dtype} array {shape} by its spec, not {given}"
            )

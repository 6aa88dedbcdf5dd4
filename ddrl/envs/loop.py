"""Many environments stepped one after the other: the vector for every environment that brings none of its own.

Follows `ddrl.core.specs.VectorEnv`. Lean where Gymnasium's SyncVectorEnv is general: it carries no info dicts,
concatenates nothing, and copies each observation once, into the array it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ddrl.core.errors import EnvError
from ddrl.core.specs import EnvSpec, EnvStep
from ddrl.envs.named import describe_named, named_writer
from ddrl.envs.seeds import environment_seeds
from ddrl.envs.spaces import describe, first_action, observation_writer


class LoopVectorEnv:
    """`environments` of one kind, in turn. An exception in one of them passes through with its traceback."""

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

    def reset(self, seed: int) -> NDArray[Any]:
        """Begin new episodes everywhere. Returns [N, *observation.shape]."""
        observation = self._empty()
        for env, env_seed, row in zip(
            self._environments, environment_seeds(seed, self.num_envs), observation, strict=True
        ):
            self._write(env.reset(seed=env_seed)[0], row)
        self._over = [False] * self.num_envs
        self._started = True
        return observation

    def step(self, action: NDArray[Any]) -> EnvStep:
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

    def _empty(self) -> NDArray[Any]:
        return np.empty((self.num_envs, *self.spec.observation.shape), self.spec.observation.numpy)

    def _refuse_result(self, result: Any) -> NoReturn:
        given = f"{len(cast(Any, result))} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise EnvError(
            f"env.id = {self.spec.env_id}: step returned {given}, but Gymnasium's step returns the 5 values "
            "(observation, reward, terminated, truncated, info)"
        ) from None


def _is_dict(space: object) -> bool:
    return isinstance(space, spaces.Dict)

"""Action masks: which discrete actions an environment allows, read from where it says so and written into the array
ACTION_MASK of its observations, which lanes, replay, networks and saved policies carry as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from ddrl.core.errors import EnvError
from ddrl.core.specs import ACTION_MASK, Array
from ddrl.envs.spaces import is_dict, is_discrete, is_mapping, kind_of, shown


class MaskReader:
    """Where a single environment says which of its discrete actions are allowed: an entry of its observation, its info,
    or its method action_masks()."""

    def __init__(self, env_id: str, source: str, num_actions: int) -> None:
        self._env_id = env_id
        self._source = source
        self._shape = (num_actions,)

    @classmethod
    def of(cls, env_id: str, env: Any, how: str) -> MaskReader | None:
        """By env.action_mask = `how`; None where the environment says nothing of allowed actions."""
        if how == "none" or not is_discrete(env.action_space):
            return None
        count = int(env.action_space.n)
        if how == "info":
            return cls(env_id, "info", count)
        space = env.observation_space
        entry: Any = space.spaces.get(ACTION_MASK) if is_dict(space) else None
        if entry is not None and len(space.spaces) > 1 and entry.shape == (count,):
            return cls(env_id, "observation", count)
        return cls(env_id, "method", count) if callable(getattr(env.unwrapped, "action_masks", None)) else None

    def rest(self, space: Any) -> Any:
        """The space of what the networks see."""
        if self._source != "observation":
            return space
        return spaces.Dict({name: entry for name, entry in space.spaces.items() if name != ACTION_MASK})

    def writer(self, write: Callable[[Any, Array], None], *, named: bool) -> Callable[[Any, Any, Any, Array], None]:
        """A function (environment, observation, info, row) that writes both into a row of the record; `write` writes
        the rest."""
        inside = self._source == "observation"

        def write_both(env: Any, observation: Any, info: Any, row: Array) -> None:
            if inside:
                given = observation.get(ACTION_MASK) if is_mapping(observation) else None
                observation = {name: value for name, value in observation.items() if name != ACTION_MASK}
            else:
                given = info.get(ACTION_MASK) if self._source == "info" else env.unwrapped.action_masks()
            mask = np.asarray(given)
            if mask.shape != self._shape or not ((mask == 0) | (mask == 1)).all():
                raise EnvError(
                    f"env.id = {self._env_id}: the action_mask of {self._source} is {shown(given)} ({kind_of(given)}), "
                    f"not {self._shape[0]} numbers 0 or 1, one for each action; env.action_mask = none ignores it"
                )
            write(observation, row if named else row["observation"])
            row[ACTION_MASK] = mask

        return write_both

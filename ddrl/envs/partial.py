"""Environments that show part of their observation: tasks that need a memory, made of tasks that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation

from ddrl.core.errors import EnvError
from ddrl.core.specs import Array
from ddrl.envs.spaces import shown


def partly_observed(id: str, keep: Sequence[int], **kwargs: Any) -> gymnasium.Env[Array, Any]:
    """The registered environment `id` with the entries `keep` of its observation alone (a vector).

    CartPole-v1 without velocities: env.kwargs = {id = "CartPole-v1", keep = [0, 2]}. EnvError where it does not fit."""
    env: gymnasium.Env[Any, Any] = gymnasium.make(id, **kwargs)
    kept = np.array(keep, np.int64)
    box = cast(Any, env).observation_space  # the bounds of a Box have no types
    if type(box) is not spaces.Box or len(box.shape) != 1:
        raise EnvError(f"env.kwargs: {id} observes {shown(box)}: name an environment that observes a vector")
    if not (len(kept) and ((kept >= 0) & (kept < box.shape[0])).all()):
        raise EnvError(
            f"env.kwargs: keep = {list(keep)} must name entries 0 to {box.shape[0] - 1} of {id}'s observation"
        )
    part = spaces.Box(box.low[kept], box.high[kept], dtype=np.float32)
    return TransformObservation(env, lambda observation: np.asarray(observation)[kept], part)

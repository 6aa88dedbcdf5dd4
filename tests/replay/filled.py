"""A replay filled with episodes of known content, for the tests beside this file: state = [handle, position], reward =
position."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay

STATE, ACTION = ArraySpec((2,), "float32"), ArraySpec((), "int64")


def make_replay(capacity: int = 1000, **options: Any) -> ExperienceReplay:
    return ExperienceReplay(STATE, ACTION, capacity, **options)


def add_episode(
    replay: ExperienceReplay, steps: int, *, final: bool = True, truncated: bool = False, version: int = 0
) -> int:
    handle = replay.new_episode()
    states = np.stack([np.full(steps + 1, handle), np.arange(steps + 1)], axis=1).astype(np.float32)
    return replay.record_steps(
        handle,
        states[:-1],
        np.arange(steps),
        np.arange(steps),
        states[-1] if final else None,
        truncated=truncated,
        policy_version=version,
    )


def fill(replay: ExperienceReplay, lengths: list[int]) -> ExperienceReplay:
    for steps in lengths:
        add_episode(replay, steps)
    return replay

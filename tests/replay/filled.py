"""A replay filled with episodes of known content, for the tests beside this file: state = [handle, position], reward =
position."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddrl.core.rows import RowSchema
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay
from ddrl.replay.batches import Sequences, Transitions, Windows

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


NAMES = {  # of the arrays of every batch: state, action, reward, next state
    Windows: ("batch_state", "batch_action", "batch_reward", "batch_state_next"),
    Transitions: ("s_tm1", "a_tm1", "r_t", "s_t"),
    Sequences: ("state", "action", "r_t", ""),
}


def arrays_of(
    schema: RowSchema, batch: Windows | Transitions | Sequences, columns: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """All arrays of a batch, those of columns (apart where it is of windows) by name, next states as name_next."""
    state, action, reward, after = NAMES[type(batch)]
    given = batch._asdict()
    arrays = {**given.pop("columns", columns or {}), "action": given.pop(action), "reward": given.pop(reward)}
    for name, suffix in ((state, ""), (after, "_next")):
        observation = given.pop(name, {})
        for column in schema.observation if name else ():
            by_name = observation if isinstance(observation, dict) else {"observation": observation}
            arrays[column.name + suffix] = by_name[schema.array_name(column)]
    return arrays | given


def same(given: np.ndarray, wanted: Any, name: str) -> None:
    """Bit for bit, NaN included; what lies past the entries of `wanted`, a list, is zero."""
    array = np.ascontiguousarray(given)
    used = len(wanted) if isinstance(wanted, list) else None
    expected = np.asarray(wanted, array.dtype).reshape(-1, *array.shape[1:]) if used is not None else wanted
    assert (array if used is None else array[:used]).tobytes() == np.ascontiguousarray(
        expected, array.dtype
    ).tobytes(), name
    assert used is None or not any(array[used:].tobytes()), name

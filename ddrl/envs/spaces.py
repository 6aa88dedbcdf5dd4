"""From Gymnasium's spaces to the shapes and dtypes that networks, lanes and replay see.

A network sees uint8 (images) or float32 (everything else): a Box of another dtype is cast, a Discrete observation
becomes one-hot, and whatever else Gymnasium can flatten (Tuple, Dict, MultiDiscrete, MultiBinary of those) becomes one
flat vector (or, for a Dict, a record of named arrays: each entry by its own name, a Sequence padded to env.max_lengths
entries, with a mask `<name>_mask` that is true for the entries given). Actions are Discrete, or a Box of floats, which
is described for algorithms that act continuously.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, cast

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import utils as space_utils

from ddrl.core.errors import EnvError
from ddrl.core.specs import Array, ArraySpec, EnvSpec

Writer = Callable[[Any, Array], None]


def is_box(space: object) -> TypeGuard[spaces.Box[Any]]:
    """Whether a space is a Box, of a dtype that a type checker need not follow."""
    return isinstance(space, spaces.Box)


def is_array(value: object) -> TypeGuard[Array]:
    """Whether a value is a numpy array."""
    return isinstance(value, np.ndarray)


def first_action(space: object) -> int:
    """The least action of a Discrete space, which ddrl calls 0; 0 for a continuous one."""
    return int(cast(Any, space).start) if isinstance(space, spaces.Discrete) else 0


def describe(
    env_id: str, observation: spaces.Space[Any], action: spaces.Space[Any], named: ArraySpec | None = None
) -> EnvSpec:
    """The spec of an environment with these spaces; EnvError where a space is one that no network of ddrl can see or
    act in. `named`: the record that represents the observation space."""
    num_actions, action_spec = _describe_action(env_id, action)
    low, high = _bounds(action)
    array = describe_array(env_id, observation) if named is None else named
    return EnvSpec(env_id, array, num_actions, action_spec, action_low=low, action_high=high)


def _bounds(space: spaces.Space[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bounds of a Box of actions, flat; empty where it has none on some side."""
    if not is_box(space) or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        return (), ()
    return tuple(space.low.ravel().tolist()), tuple(space.high.ravel().tolist())


def describe_array(env_id: str, space: spaces.Space[Any]) -> ArraySpec:
    """The one array that represents a space of observations; EnvError where there is none."""
    if is_box(space):
        if not (np.issubdtype(space.dtype, np.number) or space.dtype == np.bool_) or np.issubdtype(
            space.dtype, np.complexfloating
        ):
            raise EnvError(
                f"env.id = {env_id}: observations of dtype {space.dtype} cannot be fed to a network; declare a Box of "
                "numbers"
            )
        return ArraySpec(space.shape or (1,), "uint8" if space.dtype == np.uint8 else "float32")
    if not space.is_np_flattenable:
        raise EnvError(
            f"env.id = {env_id}: observations of {space} have no fixed size; wrap the environment so that it gives a "
            "Box"
        )
    return ArraySpec((space_utils.flatdim(space),), "float32")


def _describe_action(env_id: str, space: spaces.Space[Any]) -> tuple[int, ArraySpec]:
    if isinstance(space, spaces.Discrete):
        return int(space.n), ArraySpec((), "int64")
    if is_box(space) and np.issubdtype(space.dtype, np.floating):
        return 0, ArraySpec(space.shape, np.dtype(space.dtype).name)
    raise EnvError(
        f"env.id = {env_id}: actions of {space} are not supported; wrap the environment so that its actions are "
        "Discrete (or a Box of floats)"
    )


def observation_writer(env_id: str, space: spaces.Space[Any]) -> Writer:
    """A function (observation, row) that checks one observation against `space` and writes it into `row`
    [*spec.observation.shape]."""
    if is_box(space):
        return _box_writer(env_id, space)
    if isinstance(space, spaces.Discrete):
        return _one_hot_writer(env_id, space)
    return _flattening_writer(env_id, space)


def broken_observation(env_id: str, observation: Any, shape: tuple[int, ...], dtype: Any) -> EnvError:
    """The error for an observation that does not fit its space."""
    given = f"{observation.dtype} {observation.shape}" if is_array(observation) else f"a {type(observation).__name__}"
    return EnvError(
        f"env.id = {env_id}: the environment gave an observation of {given} but its observation_space declares an "
        f"array of {np.dtype(dtype)} {shape}; make them agree"
    )


def _box_writer(env_id: str, space: spaces.Box) -> Writer:
    shape = space.shape
    dtype = space.dtype

    def write(observation: Any, row: Array) -> None:
        if not is_array(observation) or observation.shape != shape or observation.dtype != dtype:
            if shape == () and isinstance(observation, np.generic) and cast(Any, observation).dtype == dtype:
                row[0] = observation
                return
            raise broken_observation(env_id, observation, shape, dtype)
        row[...] = observation

    return write


def _one_hot_writer(env_id: str, space: spaces.Discrete) -> Writer:
    start = int(space.start)
    count = int(space.n)

    def write(observation: Any, row: Array) -> None:
        try:
            place = observation.__index__() - start
        except (AttributeError, TypeError):
            place = -1
        if not 0 <= place < count:
            raise EnvError(
                f"env.id = {env_id}: the environment gave the observation {observation!r}, which is not in its {space}"
            )
        row.fill(0)
        row[place] = 1

    return write


def _flattening_writer(env_id: str, space: spaces.Space[Any]) -> Writer:
    def write(observation: Any, row: Array) -> None:
        if not space.contains(observation):
            raise EnvError(
                f"env.id = {env_id}: the environment gave the observation {observation!r}, which is not in its {space}"
            )
        row[...] = space_utils.flatten(space, observation)

    return write


# ---- Dict spaces as records of named arrays (env.observation = named) ----


def describe_named(env_id: str, space: spaces.Dict, max_lengths: Mapping[str, int]) -> ArraySpec:
    """The record of a Dict space; EnvError where an entry has no fixed size and no setting gives one."""
    for name in max_lengths:
        if not isinstance(space.spaces.get(name), spaces.Sequence):
            raise EnvError(f"env.max_lengths.{name}: {env_id} has no Sequence space of that name in {space}")
    return ArraySpec.record(
        {name: _describe_entry(env_id, name, entry, max_lengths) for name, entry in space.spaces.items()}
    )


def named_writer(env_id: str, space: spaces.Dict, max_lengths: Mapping[str, int]) -> Writer:
    """A function (observation, row) that checks a dict of observations against `space` and writes it into `row`, a
    structured value of the record."""
    writers: dict[str, Callable[[Any, Array, str], None]] = {
        name: _sequence_writer(env_id, name, entry, max_lengths[name])
        if isinstance(entry, spaces.Sequence)
        else _entry_writer(env_id, entry)
        for name, entry in space.spaces.items()
    }

    def write(observation: Any, row: Array) -> None:
        if not isinstance(observation, Mapping) or observation.keys() != writers.keys():
            raise EnvError(
                f"env.id = {env_id}: the environment gave an observation that is no dict of {', '.join(writers)}"
            )
        for name, write_entry in writers.items():
            write_entry(observation[name], row, name)

    return write


def _describe_entry(env_id: str, name: str, space: spaces.Space[Any], max_lengths: Mapping[str, int]) -> ArraySpec:
    if not isinstance(space, spaces.Sequence):
        return describe_array(env_id, space)
    if max_lengths.get(name, 0) < 1:
        raise EnvError(
            f"env.id = {env_id}: the observation {name} has no most entries; set env.max_lengths.{name} to at least 1"
        )
    entry = describe_array(env_id, space.feature_space)
    return ArraySpec((max_lengths[name], *entry.shape), entry.dtype, axes=(name, *("" for _ in entry.shape)))


def _entry_writer(env_id: str, space: spaces.Space[Any]) -> Callable[[Any, Array, str], None]:
    write = observation_writer(env_id, space)
    array = describe_array(env_id, space)
    if array.shape:
        return lambda value, row, name: write(value, row[name])
    raise EnvError(f"env.id = {env_id}: {space} gives an array without axes")


def _sequence_writer(env_id: str, name: str, space: spaces.Sequence, most: int) -> Callable[[Any, Array, str], None]:
    write_entry = observation_writer(env_id, space.feature_space)

    def write(values: Any, row: Array, key: str) -> None:
        count = len(values)
        if count > most:
            raise EnvError(
                f"env.id = {env_id}: the observation {name} has {count} entries, more than env.max_lengths.{name} = "
                f"{most}; raise it"
            )
        array = row[key]
        mask = row[f"{key}_mask"]
        for index in range(count):
            write_entry(values[index], array[index])
        array[count:] = 0
        mask[:count] = True
        mask[count:] = False

    return write

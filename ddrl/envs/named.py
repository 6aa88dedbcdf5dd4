"""Dict spaces of observations as records of named arrays (env.observation = "named").

Each entry of the Dict is an array by its own name: a Box or Discrete as it is alone, a Sequence of those padded to
env.max_lengths entries, with a mask `<name>_mask` that is true where an entry stands. Whatever else Gymnasium can
flatten becomes one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gymnasium import spaces
from numpy.typing import NDArray

from ddrl.core.errors import EnvError
from ddrl.core.specs import ArraySpec
from ddrl.envs.spaces import Writer, describe_array, observation_writer


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
    writers: dict[str, Callable[[Any, NDArray[Any], str], None]] = {
        name: _sequence_writer(env_id, name, entry, max_lengths[name])
        if isinstance(entry, spaces.Sequence)
        else _entry_writer(env_id, entry)
        for name, entry in space.spaces.items()
    }

    def write(observation: Any, row: NDArray[Any]) -> None:
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


def _entry_writer(env_id: str, space: spaces.Space[Any]) -> Callable[[Any, NDArray[Any], str], None]:
    write = observation_writer(env_id, space)
    array = describe_array(env_id, space)
    if array.shape:
        return lambda value, row, name: write(value, row[name])
    raise EnvError(f"env.id = {env_id}: {space} gives an array without axes")


def _sequence_writer(
    env_id: str, name: str, space: spaces.Sequence, most: int
) -> Callable[[Any, NDArray[Any], str], None]:
    write_entry = observation_writer(env_id, space.feature_space)

    def write(values: Any, row: NDArray[Any], key: str) -> None:
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

"""Arrays on their way into replay: what a caller gives, in the form that the kernel reads in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddrl.core.rows import STATE, RowSchema
from ddrl.core.specs import ArraySpec, ColumnRole


class RecordArrays:
    """Converts the arrays of `record` and `record_steps`; ValueError or TypeError where one cannot be stored.

    `lead` is () for one record and (n,) for n of them."""

    def __init__(self, schema: RowSchema) -> None:
        self._arrays = {schema.array_name(column): column.array for column in schema.observation}
        self._named = schema.observation[0].name != STATE
        self._action = schema.column("action").array
        self._reward = schema.column("reward").array
        self._further = {column.name: column for column in schema.further}

    @property
    def plain(self) -> bool:
        """Whether a record is one state array, an action and a reward, and nothing further."""
        return not self._named and not self._further

    def observation(self, state: Any, lead: tuple[int, ...]) -> tuple[NDArray[Any], ...]:
        """A state: one array, or a dict (or structured array) of the named ones."""
        if not self._named:
            return (conform(state, self._arrays["observation"], lead, STATE),)
        names: Any = (
            cast(Any, state) if isinstance(state, Mapping) else getattr(getattr(state, "dtype", None), "names", ())
        )
        if set(names or ()) != set(self._arrays):
            raise ValueError(f"a state of this replay is a dict of {', '.join(self._arrays)}")
        return tuple(conform(state[name], array, lead, name) for name, array in self._arrays.items())

    def action(self, action: ArrayLike, lead: tuple[int, ...]) -> NDArray[Any]:
        """An action."""
        return conform(action, self._action, lead, "action")

    def reward(self, reward: ArrayLike, lead: tuple[int, ...]) -> NDArray[np.float32]:
        """A reward; a vector of them where the schema has one."""
        return conform(np.asarray(reward, np.float32), self._reward, lead, "reward")

    def further(
        self, columns: Mapping[str, ArrayLike] | None, lead: tuple[int, ...], ends: bool
    ) -> dict[str, NDArray[Any]]:
        """The further columns by name; one of role STATE also as name_next where the episode ends."""
        if not self._further and not columns:
            return {}
        given = dict(columns or {})
        made: dict[str, NDArray[Any]] = {}
        for name, column in self._further.items():
            wanted = {name: lead}
            if ends and column.role is ColumnRole.STATE:
                wanted[f"{name}_next"] = ()
            for key, shape in wanted.items():
                if key not in given:
                    raise TypeError(f"columns lacks {key}: records of this replay have {', '.join(self._further)}")
                made[key] = conform(given.pop(key), column.array, shape, key)
        if given:
            raise TypeError(
                f"records of this replay have no column {', '.join(map(repr, given))}; they have "
                f"{', '.join(self._further) or 'none beside state, action and reward'}"
            )
        return made


def conform(value: Any, spec: ArraySpec, lead: tuple[int, ...], name: str) -> NDArray[Any]:
    """`value` as a C-contiguous array [*lead, *shape] of the spec's dtype; no conversion loses the kind of a number."""
    array = np.asarray(value)
    if array.shape != lead + spec.shape:
        raise ValueError(f"{name} of shape {array.shape} does not fit {lead + spec.shape}")
    integers = array.dtype.kind in "iub" and np.dtype(spec.dtype).kind in "iu"
    if not integers and not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise TypeError(f"{name} of dtype {array.dtype} cannot be stored as {spec.dtype} without loss of kind")
    return np.ascontiguousarray(array, spec.dtype).reshape(lead + spec.shape)

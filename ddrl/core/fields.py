"""A field of a component of settings, with its unit, meaning and range, and the check of these ranges."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from ddrl.core import plugins
from ddrl.core.errors import ConfigError


def setting(
    default: Any,
    unit: str,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] = (),
    plugin: str = "",
) -> Any:
    """A field of a component: its default, unit and one line of meaning, with the range or the words it accepts.

    `plugin`: the package of the plug-ins that the field names (`core.plugins`).
    """
    metadata = {"unit": unit, "doc": doc, "ge": ge, "gt": gt, "le": le, "choices": choices, "plugin": plugin}
    if isinstance(default, (dict, list)):
        fresh: Callable[[], Any] = default.copy  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return field(default_factory=fresh, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_ranges(component: str, values: Any) -> None:
    """Raise ConfigError where a field of a component is out of its range, or names no plug-in."""
    for item in fields(values):
        value = getattr(values, item.name)
        meta = item.metadata
        name = f"{component}.{item.name}"
        if meta["plugin"] and (value or item.default):
            plugins.check_name(name, meta["plugin"], value)
        if meta["choices"] and value not in meta["choices"]:
            raise ConfigError(f"{name} ({value!r}) must be one of {', '.join(meta['choices'])}")
        for bound, holds, words in (
            ("ge", operator.ge, "at least"),
            ("gt", operator.gt, "above"),
            ("le", operator.le, "at most"),
        ):
            if meta[bound] is not None and not holds(value, meta[bound]):
                raise ConfigError(f"{name} ({value!r}) must be {words} {meta[bound]}")

"""Components of settings: frozen dataclasses of fields with unit, meaning and range; how one is made from a file's
values, and how the component of a slice is found."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

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


def convert(values: Mapping[str, Any], component: Any, source: str, *, joint: str = ": ") -> Any:
    """`values` as a `component`, strictly; ConfigError that begins with `source` for a wrong type or value, `joint`
    between it and the setting's name."""
    try:
        return msgspec.convert(values, component, strict=True)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError(f"{source}: {error.__cause__}") from None
        what, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigError(f"{source}{joint}{name or 'settings'}: {what}") from None


ROOT = Path(__file__).parents[1]


@cache
def slice_component(name: str) -> Any:
    """The component of the slice `name`: the class in ddrl/NAME/settings.py whose `section` is NAME; None where there
    is none. Imports the slice's settings alone."""
    if not name.isidentifier() or not (ROOT / name / "settings.py").exists():
        return None
    module = importlib.import_module(f"ddrl.{name}.settings")
    return next((found for found in vars(module).values() if getattr(found, "section", None) == name), None)


def installed_slices() -> list[str]:
    """The slices with a section of their own, by name."""
    names = sorted(path.parent.name for path in ROOT.glob("*/settings.py"))
    return [name for name in names if name != "core" and slice_component(name) is not None]

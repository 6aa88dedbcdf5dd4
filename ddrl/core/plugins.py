"""Plug-ins: algorithms, selectors, schemes, codecs, choosers and the like, each one class in one file, reached by name.

A plug-in is a class with a `name`. A built-in one is the class of that name in the file of that name in its kind's
package (`c51` is the class in ddrl/learner/algorithms/c51.py whose `name` is "c51"); one from outside is written
package.module:Class. No list of them exists anywhere else. A plug-in with settings of its own has `Settings`, a frozen
dataclass of `core.config.setting` fields: its table in a settings file is `[section.name]`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

from ddrl.core.errors import ConfigError, DdrlError

ROOT = Path(__file__).parents[1]


@cache
def names(package: str) -> tuple[str, ...]:
    """The built-in plug-ins of a kind, by the files of its package (ddrl.learner.algorithms); imports none of them."""
    folder = ROOT.joinpath(*package.split(".")[1:])
    return tuple(sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")))


def check_name(setting: str, package: str, name: str) -> None:
    """Raise ConfigError unless `name` is a built-in plug-in of `package` or is written package.module:Class."""
    if ":" not in name and name not in names(package):
        near = difflib.get_close_matches(name, names(package), n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? Known are" if near else "known are"
        raise ConfigError(
            f"{setting} ({name!r}): {hint} {', '.join(names(package))}, or package.module:Class of your own"
        )


def load(setting: str, package: str, name: str) -> Any:
    """The plug-in class that `setting` names; ConfigError where there is none or it cannot be imported."""
    check_name(setting, package, name)
    module_name, _, attribute = name.partition(":") if ":" in name else (f"{package}.{name}", "", "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ConfigError(
            f"{setting} = {name}: there is no module {error.name}; is it installed, or on PYTHONPATH?"
        ) from None
    except DdrlError:
        raise
    if attribute:
        found = getattr(module, attribute, None)
        if found is None or not isinstance(getattr(found, "name", None), str):
            raise ConfigError(f"{setting} = {name}: {module_name} has no class {attribute} with a `name`")
        return found
    for _, found in inspect.getmembers(module, inspect.isclass):
        if found.__module__ == module_name and getattr(found, "name", None) == name:
            return found
    raise AssertionError(f"{module_name} holds no class whose name is {name!r}")

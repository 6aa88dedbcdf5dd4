"""Plug-ins: algorithms, selectors, schemes, codecs, choosers and the like, each one class that is found by its name.

A plug-in is a class with a `name`. The built-in ones of a kind are either one module (the choosers are the classes of
ddrl/acting/choosers.py that begin with a line `name = "..."`), or a package with a file for each (`c51` is the class
whose `name` is "c51" in ddrl/learner/algorithms/c51.py). One from outside is written package.module:Class. There is no
other list of them. A plug-in with settings of its own has `Settings`, a frozen dataclass of `core.config.setting`
fields; its table in a settings file is `[section.name]`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ddrl.core.errors import ConfigError
from ddrl.core.files import read_regular

ROOT = Path(__file__).parents[1]
CELLS = "cells"  # the folder of a run directory that holds code of a notebook's cells
MAX_CELL_BYTES = 1 << 30  # of one file of a notebook's cells, arrays included


class CodeName(NamedTuple):
    """Code as settings name it, package.module:Name."""

    module: str
    attribute: str


def code_name(text: str) -> CodeName | None:
    """The module and the name in package.module:Name, also package.module:Env-v0; None for any other text. What is
    imported and what the user is asked about (`core.trust`) are read by this alone."""
    module, _, attribute = text.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or not _ATTRIBUTE.fullmatch(attribute):
        return None
    return CodeName(module, attribute)


_ATTRIBUTE = re.compile(r"[\w./-]+")
# A class's own `name`, with or without a type: how built-in plug-ins are found in a module without importing it.
_NAME_LINE = re.compile(r'^    name(?:: [^=\n]+)? = "(\w+)"', re.MULTILINE)


@cache
def names(kind: str) -> tuple[str, ...]:
    """The built-in plug-ins of a kind, a module or package (ddrl.learner.algorithms); imports none of them."""
    module = _module_of(kind)
    if module is not None:
        return tuple(sorted(_NAME_LINE.findall(module.read_text())))
    place = ROOT.joinpath(*kind.split(".")[1:])
    return tuple(sorted(path.stem for path in place.glob("*.py") if not path.stem.startswith("_")))


def _module_of(kind: str) -> Path | None:
    """The file of a kind that is one module; None where it is a package. A folder of the same name beside the file is
    what Python's cache left of an earlier version."""
    module = ROOT.joinpath(*kind.split(".")[1:]).with_suffix(".py")
    return module if module.exists() else None


def check_name(setting: str, kind: str, name: str) -> None:
    """Raise ConfigError unless `name` is a built-in plug-in of `kind` or is written package.module:Class."""
    if code_name(name) is None and name not in names(kind):
        near = difflib.get_close_matches(name, names(kind), n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? Known are" if near else "known are"
        raise ConfigError(f"{setting} ({name!r}): {hint} {', '.join(names(kind))}, or package.module:Class of your own")


def load(setting: str, kind: str, name: str) -> Any:
    """The plug-in class that `setting` names; ConfigError where there is none or it cannot be imported."""
    check_name(setting, kind, name)
    code = code_name(name)
    own = f"{kind}.{name}" if _module_of(kind) is None else kind
    module_name = own if code is None else code.module
    try:
        module = import_code(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ConfigError(
            f"{setting} = {name}: there is no module {error.name}; install it, or put it on PYTHONPATH"
        ) from None
    if code is not None:
        found = getattr(module, code.attribute, None)
        if found is None or not isinstance(getattr(found, "name", None), str):
            raise ConfigError(f"{setting} = {name}: {module_name} has no class {code.attribute} with a `name`")
        return found
    for _, found in inspect.getmembers(module, inspect.isclass):
        if found.__module__ == module_name and vars(found).get("name") == name:
            return found
    raise AssertionError(f"{module_name} holds no class whose name is {name!r}")


def import_code(name: str) -> ModuleType:
    """Import the module that a setting names. cells_ID.ROLE is code of a notebook's cells, in a run directory that this
    process or one above it has named by `mount_cells`; it is always compiled from its source, which is what the user
    has consented to, and never taken from a folder of compiled files beside it."""
    package, _, role = name.partition(".")
    folder = os.environ.get(cells_variable(package))
    if folder is None or not role.isidentifier():
        return importlib.import_module(name)
    if name not in sys.modules:
        path = Path(folder) / f"{role}.py"
        try:
            source = read_regular(path, MAX_CELL_BYTES)
        except OSError as error:
            raise ModuleNotFoundError(f"{path} cannot be read: {error.strerror or error}", name=name) from None
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module
        try:
            exec(compile(source, path, "exec", dont_inherit=True), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def mount_cells(run: Path, names: Iterable[str]) -> None:
    """Let this process and its children import what these names of settings mean in the run directory."""
    for name in names:
        package = name.partition(".")[0]
        if package.startswith("cells_"):
            os.environ[cells_variable(package)] = str(run.absolute() / CELLS)


def keep_compiled_files(folder: Path) -> None:
    """Let this process and its children read and write compiled files in `folder` alone."""
    sys.pycache_prefix = str(folder)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


def cells_variable(package: str) -> str:
    """The environment variable that holds the folder of a package of cells."""
    return f"DDRL_{package.upper()}"


def mounted_cells() -> dict[str, str]:
    """The environment variables by which this process finds packages of cells."""
    return {name: value for name, value in os.environ.items() if name.startswith("DDRL_CELLS_")}


def slice_module(name: str, asked_by: str) -> ModuleType:
    """The module ddrl.NAME of a slice ("pool.mode"), which the core finds by its name alone.

    ConfigError where this installation lacks the slice; `asked_by`: the setting or option that asks for it."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(f"ddrl.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"ddrl.{package}":
            raise
        raise ConfigError(
            f"{asked_by} needs ddrl.{package}, which this installation lacks: install the whole of ddrl"
        ) from None

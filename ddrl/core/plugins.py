"""Plug-ins: algorithms, selectors, schemes, codecs, choosers and the like, each one class that is found by its name.

A plug-in is a class with a `name`. The built-in ones of a kind are either one module (the choosers are the classes of
ddrl/acting/choosers.py that begin with a line `name = "..."`), or a package with a file for each (`c51` is the class
whose `name` is "c51" in ddrl/learner/algorithms/c51.py). One from outside is written package.module:Class. There is no
other list of them. A plug-in with settings of its own has `Settings`, a frozen dataclass of `core.config.setting`
fields; its table in a settings file is `[section.name]`. Below: whether the user trusts code that a run names.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import inspect
import ipaddress
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from ddrl import current_name
from ddrl.core.errors import ConfigError, RunDirError, shortened
from ddrl.core.files import MAX_ARRAYS, MAX_STATUS, open_to_append, read_regular, write_atomically

ROOT = Path(__file__).parents[1]
CELLS = "cells"  # the folder of a run directory that holds code of a notebook's cells
MAX_CELL_BYTES = 1 << 30  # of one file of a notebook's cells, arrays included


class CodeName(NamedTuple):
    """Code as settings name it, package.module:Name."""

    module: str
    attribute: str


def code_name(text: str) -> CodeName | None:
    """The module and the name in package.module:Name, also package.module:Env-v0; None for any other text. What is
    imported and what the user is asked about (`check_trust`) are read by this alone."""
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


@cache
def slice_component(name: str) -> Any:
    """The component of the slice `name`: the class with `section: ClassVar[str] = "NAME"` in ddrl/NAME/__init__.py;
    None where there is none. Imports the package alone."""
    file = ROOT / name / "__init__.py"
    if not name.isidentifier() or not file.exists() or f'section: ClassVar[str] = "{name}"' not in file.read_text():
        return None
    module = importlib.import_module(f"ddrl.{name}")
    return next(found for found in vars(module).values() if getattr(found, "section", None) == name)


def installed_slices() -> list[str]:
    """The slices with a section of their own, by name."""
    names = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    return [name for name in names if slice_component(name) is not None]


# -- trust -------------------------------------------------------------------------------------------------------------
# A run directory is a program: its settings name code, files and addresses.
#
# What a run that was not started here names from outside of the library and of its own directory is used only where the
# user trusts it, by --trust (in Python trust=True). Nothing is asked about the library's own plug-ins, environments of
# Gymnasium's registry, and the library's own factories with the arguments of a task that ships. What is trusted is
# remembered outside of the run directory, in $XDG_STATE_HOME/ddrl/trusted (~/.local/state), as a digest of the
# directory, the name and what the name means here: the content of code that lies in the run, and of code elsewhere only
# its file, so that one may edit it. The same names in another directory, or of other code, are asked for again.


NOT_CODE = ("learner.device", "pool.devices")  # settings of the form a:b that nothing is imported by
PATHS = ("replay.file", "learner.init", "balance.ddqn.network")
ADDRESSES = ("telemetry.bind", "telemetry.prometheus_bind")
COMMANDS = ("telemetry.alert",)  # commands, and servers that hear of the run
MAX_ARGUMENT = 1e5  # of the library's factories without a question; beyond it they can take all memory
_WORD = re.compile(r"[\w-]*")


def foreign_code(settings: Mapping[str, Any], run: Path) -> dict[str, str]:
    """What the settings, a tree of sections, name from outside of the library and of the run: {section.name: text}."""
    found = dict[str, str]()
    for place, value in _leaves(settings, ""):
        if not isinstance(value, str):
            continue
        if place in PATHS:
            foreign = value != "" and not _is_inside(Path(value), run)
        elif place in COMMANDS:
            foreign = value != ""
        elif place in ADDRESSES:
            foreign = not is_loopback(value)
        elif place.startswith(("env.kwargs.", "env.by_rollout.")):
            foreign = _WORD.fullmatch(value) is None
        else:
            foreign = ":" in value and place not in NOT_CODE
            foreign = foreign and not (place == "env.id" and _is_shipped(settings["env"]))
        if foreign:
            found[place] = value
    return found


def check_trust(run: Path, code: Mapping[str, str], *, trust: bool) -> None:
    """Raise RunDirError where the run names something that this user has not trusted for it; with `trust` it is trusted
    now."""
    unknown = {setting: name for setting, name in code.items() if not is_trusted(run, name)}
    if unknown and not trust:
        named = ", ".join(f"{setting} = {name!r}" for setting, name in unknown.items())
        names = f"the run {run} names code of its own ({shortened(named)}), which"
        if any(map(_is_nowhere, unknown.values())):  # also where the user has started the run, in another folder
            raise RunDirError(
                f"{names} is not found from here: start in the folder of that code, set PYTHONPATH to it, or install it"
            )
        raise RunDirError(
            f"{names} would be used with your rights, and was not started by you on this machine: look at that code, "
            "then say --trust once (in Python trust=True)"
        )
    remember_trust(run, unknown)
    use_code(run, code.values())


def use_code(run: Path, names: Iterable[str]) -> None:
    """Let this process and its children import what the run names: cells from its directory, and code that lies in it
    from its source alone, never from compiled files beside it."""
    mount_cells(run, names)
    if any(_lies_in(run, name) for name in names):
        keep_compiled_files(_memory().with_name("compiled"))


def is_trusted(run: Path, name: str) -> bool:
    """Whether the user has trusted this name, as it is now, for the run."""
    return is_remembered(_digest(run, name))


def is_remembered(digest: str) -> bool:
    """Whether the user's memory of consent holds a digest."""
    return digest in _remembered()


def remember_trust(run: Path, code: Mapping[str, str]) -> None:
    """Note that the user trusts what the run names. Where that cannot be written, he is asked again."""
    remember(_digest(run, name) for name in code.values())


def remember(digests: Iterable[str]) -> None:
    """Keep digests in the user's memory of consent."""
    new = set(digests) - _remembered()
    if new:
        with contextlib.suppress(OSError):
            path = _memory()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open_to_append(path) as file:
                file.write("".join(f"{digest}\n" for digest in sorted(new)).encode())


def own_secret(folder: Path, name: str, make: Callable[[], bytes]) -> bytes:
    """The secret in FOLDER/name, readable by its owner alone. It is made anew where it is missing, damaged, readable by
    others, or not made here: who gave the folder has kept a copy. RunDirError where it cannot be written."""
    path = folder / name
    with contextlib.suppress(OSError):
        secret = read_regular(path, MAX_STATUS).strip()
        is_own = is_remembered(_secret_digest(folder, path.name, secret))
        if is_own and path.lstat().st_mode == stat.S_IFREG | 0o600:
            return secret
    secret = make()
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, secret, secret=True)
    except OSError as error:
        raise RunDirError(f"cannot write {path} ({error.strerror}): choose another run.dir") from None
    remember([_secret_digest(folder, path.name, secret)])
    return secret


def _secret_digest(folder: Path, name: str, secret: bytes) -> str:
    return digest_of(folder, name, secret.decode(errors="replace"))


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    return address == "localhost"


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The texts and numbers of a tree by their places."""
    if isinstance(value, (Mapping, list, tuple)):
        tree = cast("Any", value)
        for key, inner in tree.items() if isinstance(value, Mapping) else enumerate(tree):
            yield from _leaves(inner, f"{place}.{key}" if place else str(key))
    else:
        yield place, value


def _is_shipped(env: Mapping[str, Any]) -> bool:
    """Whether a table [env] names a factory of the library that a shipped task names too, with arguments that are
    numbers, words, or lists and tables of them."""
    return current_name(env.get("id", "")) in _shipped_factories() and all(
        _WORD.fullmatch(value) if isinstance(value, str) else abs(value) <= MAX_ARGUMENT or place.endswith("seed")
        for place, value in (*_leaves(env.get("kwargs", {}), ""), *_leaves(env.get("by_rollout", ()), ""))
    )


@cache
def _shipped_factories() -> frozenset[str]:
    found = {tomllib.loads(path.read_text())["env"]["id"] for path in ROOT.glob("**/tasks/*.toml")}
    return frozenset(filter(code_name, found))


def _is_inside(path: Path, run: Path) -> bool:
    return path.resolve().is_relative_to(run.resolve())


def _digest(run: Path, name: str) -> str:
    code = code_name(name)
    origins = [] if code is None else _origins(code.module)
    place = os.path.realpath(origins[-1]) if origins else ""
    content = _content(run) if name.startswith("cells_") or _lies_in(run, name) else ""
    return digest_of(run, name, place, content)


def digest_of(run: Path, *parts: str) -> str:
    """What the memory of consent keeps of `parts` that belong to the run."""
    text = "\0".join((str(run.resolve()), *parts))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _lies_in(run: Path, name: str) -> bool:
    """Whether code of the run directory is executed where the name is imported."""
    code = code_name(name)
    return code is not None and any(_is_inside(Path(origin), run) for origin in _origins(code.module))


def _is_nowhere(name: str) -> bool:
    code = code_name(name)
    return code is not None and not name.startswith("cells_") and not _origins(code.module)


def _content(run: Path) -> str:
    """A digest of what can be imported from the run directory, and of the arrays beside its cells: others may change
    them. RunDirError for what is no file."""
    digest = hashlib.blake2b(digest_size=16)
    for folder, folders, files in os.walk(run):
        folders[:] = sorted(name for name in folders if name != "__pycache__")  # never read (`use_code`)
        links = [Path(folder) / name for name in folders if os.path.islink(Path(folder) / name)]
        kinds = (*all_suffixes(), *((".npy",) if Path(folder).name == CELLS else ()))
        for path in [*links, *(Path(folder) / name for name in sorted(files) if name.endswith(kinds))]:
            try:
                data = os.fsencode(path.resolve()) if path in links else read_regular(path, MAX_CELL_BYTES)
            except OSError as error:
                raise RunDirError(
                    f"{path} cannot be read: {error.strerror or error}; remove it, or take a whole copy of the run"
                ) from None
            digest.update(os.fsencode(f"{path.relative_to(run)}\0{len(data)}\0"))
            digest.update(data)
    return digest.hexdigest()


def cells_digest(run: Path) -> str:
    """A digest of the code of cells in a run directory, the same in every run of the same code."""
    return _content(run / CELLS)


def _origins(module: str) -> list[str]:
    """The files that are executed where a module is imported, its packages' first; found without importing any."""
    path = None
    origins: list[str] = []
    for part in module.split("."):  # one part at a time: a dotted name makes the finder ask for the imported package
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return []
        path = spec.submodule_search_locations
        origins += [] if spec.origin is None else [spec.origin]
    return origins


def _remembered() -> set[str]:
    try:
        return set(read_regular(_memory(), MAX_ARRAYS).decode(errors="replace").split())
    except OSError:
        return set()


def _memory() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # "~" stays where a user has no home and no name
        state = os.path.join(os.path.abspath(os.sep), os.path.expanduser("~"), ".local", "state")
    return Path(state) / "ddrl" / "trusted"

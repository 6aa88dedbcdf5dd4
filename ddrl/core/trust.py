"""A run directory is a program: its settings name code, files and addresses.

What a run that was not started here names from outside of the library and of its own directory is used only where the
user trusts it, by --trust (in Python trust=True). Nothing is asked about the library's own plug-ins, environments of
Gymnasium's registry, and the library's own factories with the arguments of a task that ships. What is trusted is
remembered outside of the run directory, in $XDG_STATE_HOME/ddrl/trusted (~/.local/state), as a digest of the
directory, the name and what the name means here: the content of code that lies in the run, and of code elsewhere only
its file, so that one may edit it. The same names in another directory, or of other code, are asked for again.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path
from typing import Any, cast

from ddrl import current_name
from ddrl.core import plugins
from ddrl.core.errors import RunDirError, shortened
from ddrl.core.files import MAX_ARRAYS, MAX_STATUS, open_to_append, read_regular, write_atomically

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
    plugins.mount_cells(run, names)
    if any(_lies_in(run, name) for name in names):
        plugins.keep_compiled_files(_memory().with_name("compiled"))


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
    found = {tomllib.loads(path.read_text())["env"]["id"] for path in plugins.ROOT.glob("**/tasks/*.toml")}
    return frozenset(filter(plugins.code_name, found))


def _is_inside(path: Path, run: Path) -> bool:
    return path.resolve().is_relative_to(run.resolve())


def _digest(run: Path, name: str) -> str:
    code = plugins.code_name(name)
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
    code = plugins.code_name(name)
    return code is not None and any(_is_inside(Path(origin), run) for origin in _origins(code.module))


def _is_nowhere(name: str) -> bool:
    code = plugins.code_name(name)
    return code is not None and not name.startswith("cells_") and not _origins(code.module)


def _content(run: Path) -> str:
    """A digest of what can be imported from the run directory, and of the arrays beside its cells: others may change
    them. RunDirError for what is no file."""
    digest = hashlib.blake2b(digest_size=16)
    for folder, folders, files in os.walk(run):
        folders[:] = sorted(name for name in folders if name != "__pycache__")  # never read (`use_code`)
        links = [Path(folder) / name for name in folders if os.path.islink(Path(folder) / name)]
        kinds = (*all_suffixes(), *((".npy",) if Path(folder).name == plugins.CELLS else ()))
        for path in [*links, *(Path(folder) / name for name in sorted(files) if name.endswith(kinds))]:
            try:
                data = os.fsencode(path.resolve()) if path in links else read_regular(path, plugins.MAX_CELL_BYTES)
            except OSError as error:
                raise RunDirError(
                    f"{path} cannot be read: {error.strerror or error}; remove it, or take a whole copy of the run"
                ) from None
            digest.update(os.fsencode(f"{path.relative_to(run)}\0{len(data)}\0"))
            digest.update(data)
    return digest.hexdigest()


def cells_digest(run: Path) -> str:
    """A digest of the code of cells in a run directory, the same in every run of the same code."""
    return _content(run / plugins.CELLS)


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

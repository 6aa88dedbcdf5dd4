"""A run directory is a program: settings written package.module:Name import code.

A run that names such code is resumed or played only where the user trusts it: because he started it on this machine,
or by --trust. What is trusted is remembered outside of the run directory, in $XDG_STATE_HOME/ddrl/trusted
(~/.local/state), as a digest of the directory, the name and the file that the name means here. The same names in
another directory, or of another file, are asked for again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, cast

from ddrl import current_name
from ddrl.core import plugins
from ddrl.core.errors import RunDirError
from ddrl.core.files import read_regular

OWN = "ddrl.admix"  # its factories take no names of code; those of ddrl.envs.partial do


def foreign_code(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings, of a tree of sections, that name code from outside: {section.name: package.module:Name}."""
    return dict(_names(settings, ""))


def check_trust(run: Path, code: Mapping[str, str], *, trust: bool) -> None:
    """Raise RunDirError where the run names code that this user has not trusted for it; with `trust` it is trusted
    now."""
    unknown = {setting: name for setting, name in code.items() if _digest(run, name) not in _remembered()}
    if unknown and not trust:
        named = ", ".join(f"{setting} = {name!r}" for setting, name in unknown.items())
        raise RunDirError(
            f"the run {run} names code of its own ({named}), which would be run with your rights, and was not started "
            "by you on this machine: look at that code, then say --trust once"
        )
    remember_trust(run, unknown)
    plugins.mount_cells(run, code.values())


def remember_trust(run: Path, code: Mapping[str, str]) -> None:
    """Note that the user trusts the code that the run names. Where that cannot be written, he is asked again."""
    new = [_digest(run, name) for name in code.values()]
    if new:
        with contextlib.suppress(OSError):
            path = _memory()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with path.open("a") as file:
                file.write("".join(f"{digest}\n" for digest in new))


def _names(tree: Mapping[str, Any] | Sequence[Any], prefix: str) -> Iterable[tuple[str, str]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if isinstance(value, (Mapping, list, tuple)):
            yield from _names(cast("Mapping[str, Any] | Sequence[Any]", value), f"{prefix}{key}.")
        elif isinstance(value, str):
            module, _, name = value.rpartition(":")
            # Gymnasium's names are of any form, and env.kwargs may hold one; elsewhere cuda:1 is none of code.
            environment = prefix.startswith("env.")
            named = all(part.isidentifier() for part in module.split(".")) and (environment or name.isidentifier())
            if named and current_name(module) != OWN:
                yield f"{prefix}{key}", value


def _digest(run: Path, name: str) -> str:
    origin = _content(run) if name.startswith("cells_") else _origin(name.rpartition(":")[0])
    text = "\0".join((str(run.resolve()), name, origin))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _content(run: Path) -> str:
    """A digest of the code and arrays that a run has of a notebook's cells: they lie in its directory, where others may
    change them. RunDirError for what is no file."""
    digest = hashlib.blake2b(digest_size=16)
    folder = run / plugins.CELLS
    for path in sorted([*folder.glob("*.py"), *folder.glob("*.npy")]):
        try:
            data = read_regular(path, plugins.MAX_CELL_BYTES)
        except (OSError, ValueError) as error:
            raise RunDirError(f"{path} cannot be read: {error}; remove it, or take a whole copy of the run") from None
        digest.update(f"{path.name}\0{len(data)}\0".encode(errors="surrogateescape"))
        digest.update(data)
    return digest.hexdigest()


def _origin(module: str) -> str:
    """The file that a module's name means here; found without importing anything."""
    path = None
    spec = None
    for part in module.split("."):  # one part at a time: a dotted name makes the finder ask for the imported package
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return ""
        path = spec.submodule_search_locations
    return os.path.realpath(spec.origin) if spec is not None and spec.origin is not None else ""


def _remembered() -> set[str]:
    try:
        return set(_memory().read_text(errors="replace").split())
    except OSError:
        return set()


def _memory() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "ddrl" / "trusted"

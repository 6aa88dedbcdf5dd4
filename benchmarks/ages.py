"""Figures that are older than the code they were measured with: `python -m benchmarks.ages`.

The code under a file in benchmarks/results is what its command's program imports and runs: modules by their import
statements, modules that a benchmark names in words (`"-m", "ddrl.run"`), and packages whose plug-ins are found by name.
A figure is old where that code has changed in git since the commit that it was measured at, or, where it
names none, since its file was last written. Prints them; never fails."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT, print_table

MODULE = re.compile(r"(?:ddrl|benchmarks|tests)(?:\.\w+)+")
PLUGIN = re.compile(r"ddrl(?:\.\w+)+:\w+|ddrl(?:\.\w+){2,}")
SLICES = ("admix", "balance", "pool")


def measured_code(command: str) -> list[Path]:
    """The files and folders under the figures of a command, from the root; the library where its program has left."""
    todo = [module for module in re.findall(r"-m (\S+)", command) if MODULE.fullmatch(module)]
    if not todo or not all(map(file_of, todo)):
        return [Path("ddrl")]
    found: set[Path] = set()
    while todo:
        path = file_of(todo.pop())
        if path is not None and path not in found:
            found.add(path)
            todo += modules_in(path) if path.suffix == ".py" else ()
    if Path("ddrl/run/__main__.py") in found:
        found.add(Path("ddrl/tasks"))
    return sorted(found)


@functools.cache
def modules_in(path: Path) -> tuple[str, ...]:
    """Modules that a file of this tree imports or names, and the compiled kernel's folder as a module."""
    return tuple(_modules_in(path, ast.parse((ROOT / path).read_text())))


def _modules_in(path: Path, tree: ast.Module) -> Iterator[str]:
    facade = path == Path("ddrl/__init__.py")  # what its functions import is what a caller asks for by name
    nodes = tree.body if facade else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from named_in(node.value, path)


def named_in(words: str, path: Path) -> list[str]:
    """Modules that a string names: of a benchmark or a check any, which it starts; in the library its plug-ins, or the
    package that they are looked up in. What the core names of a slice runs only where somebody asks for it."""
    if path.parts[0] != "ddrl":
        return [words] if MODULE.fullmatch(words) else []
    module = words.partition(":")[0]
    if not PLUGIN.fullmatch(words):
        return []
    part = module.split(".")[1]
    if part in SLICES and part != path.parts[1]:
        return []
    folder = ROOT.joinpath(*module.split("."))
    return [module] if ":" in words else [f"{module}.{file.stem}" for file in sorted(folder.glob("*.py"))]


def file_of(module: str) -> Path | None:
    """Where a module is written, from the root; of a compiled kernel the folder of its sources."""
    if module.endswith("._kernel"):
        return Path(*module.split(".")[:-1], "kernel")
    path = Path(*module.split("."))
    places = (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py")
    return next((place for place in places if (ROOT / place).exists()), None)


def commits_since(path: Path, code: list[Path], commit: str = "") -> list[str]:
    """Commits, newest first, that changed the code after `commit`, at which the figures were measured; that alone where
    git knows it no more. Where they name none: after the one that last wrote more of the file than its command."""
    if commit:
        written = _git("rev-parse", "--verify", "--quiet", commit.rstrip("+") + "^{commit}")
        if not written:
            return [commit]
    else:
        written = _git("log", "-1", "--format=%H", "-G", '^[^"]+("[^c]|$)', "--", str(path.relative_to(ROOT)))
    return _git("log", "--format=%h", f"{written[0]}..HEAD", "--", *map(str, code)) if written else []


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m benchmarks.ages", description=__doc__).parse_args()
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        file = json.loads(path.read_text())
        for part, origin in {"": file, **file.get("kept", {})}.items():
            code = measured_code(origin["command"])
            commits = commits_since(path, code, origin.get("commit", ""))
            if commits:
                rows.append((f"{path.stem} {part}", origin["date"], len(commits), commits[0], len(code)))
    if rows:
        print("Warning: the code under these figures has changed since they were measured:")
        print_table(("figures", "measured", "commits since", "newest", "files of code"), rows)
    else:
        print("No figure is older than its code.")


if __name__ == "__main__":
    main()

"""Figures that are older than the code they were measured with: `python -m benchmarks.ages`.

The code under a file in benchmarks/results is what its command's program imports and runs: modules by their import
statements, modules that a benchmark names in words (`"-m", "ddrl.run"`), and packages whose plug-ins are found by name.
A figure is old where that code has changed in git since the commit that it was measured at; comments and docstrings do
not count. Prints them; never fails."""

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
from benchmarks.size import CPP_SUFFIXES, cpp_tokens, python_code

MODULE = re.compile(r"(?:ddrl|benchmarks|tests)(?:\.\w+)+")
PLUGIN = re.compile(r"ddrl(?:\.\w+)+:\w+|ddrl(?:\.\w+){2,}")
SLICES = ("admix", "balance", "pool")


def measured_code(command: str) -> list[Path]:
    """The files and folders under the figures of a command, from the root; the library where its program has left."""
    programs = [file_of(module) for module in re.findall(r"-m (\S+)", command) if MODULE.fullmatch(module)]
    todo = list(filter(None, programs))
    if not todo or None in programs:
        return [Path("ddrl")]
    found: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += files_in(path) if path.suffix == ".py" else ()
    if Path("ddrl/run/__main__.py") in found:
        found.add(Path("ddrl/tasks"))
    return sorted(found)


@functools.cache
def files_in(path: Path) -> frozenset[Path]:
    """Files of modules that a file of this tree imports or names, and the compiled kernel's folder."""
    modules = set(_modules_in(path, ast.parse((ROOT / path).read_text())))
    return frozenset(file for file in map(file_of, modules) if file is not None)


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
    """Where a module is written, from the root; of a compiled kernel the folder of its sources, `_peers`: peers.cpp."""
    if module.endswith("._kernel"):
        return Path(*module.split(".")[:-1], "kernel")
    path = Path(*module.split("."))
    source = path.with_name(path.name[1:] + ".cpp")
    places = (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py", source)
    return next((place for place in places if (ROOT / place).exists()), None)


def changed_since(code: list[Path], commit: str) -> Iterator[str]:
    """Files of this code that say something else since `commit`, at which figures were measured; that alone where git
    does not know it. One by one, for callers that ask only whether there is any."""
    commit = commit.rstrip("+")
    if not _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        yield commit
        return
    words = _git("diff", "--raw", "--no-abbrev", "--no-renames", commit, "HEAD", "--", *map(str, code)).split()
    files = zip(words[2::6], words[3::6], words[5::6], strict=True)  # of modes, versions, a letter and the path
    yield from (path for old, new, path in files if said(old, path) != said(new, path))


@functools.cache
def said(version: str, path: str) -> int | str:
    """What a version of a file in git says to a compiler, as a hash; of other files the version itself."""
    if path.endswith(".py"):
        return hash(ast.dump(python_code(_git("cat-file", "blob", version))))  # nothing where the file was not there
    if path.endswith(CPP_SUFFIXES):
        return hash(" ".join(cpp_tokens(_git("cat-file", "blob", version))))
    return version


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m benchmarks.ages", description=__doc__).parse_args()
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        file = json.loads(path.read_text())
        for part, origin in {"": file, **file.get("kept", {})}.items():
            code = measured_code(origin["command"])
            changed = next(changed_since(code, origin.get("commit", "(measured before commits were noted)")), None)
            if changed:
                rows.append((f"{path.stem} {part}", origin["date"], changed))
    if rows:
        print("Warning: the code under these figures has changed since they were measured:")
        print_table(("figures", "measured", "the first file that has changed"), rows)
    else:
        print("No figure is older than its code.")


if __name__ == "__main__":
    main()

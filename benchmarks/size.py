"""How much code there is: `python -m benchmarks.size [--against COMMIT]`.

Lines say little about size, because a formatter moves them. So Python is measured in nodes of its syntax tree, without
docstrings and without the load and store marks of names, and C++ in tokens, without comments. The table has a row for
each package of the library (the core and the slices that build on it), the dashboard, the benchmarks and the tests.
With --against, a commit's figures are printed beside those of the working tree. Nothing enforces them.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import print_table

ROOT = Path(__file__).parents[1]
SLICES = ("admix", "balance", "pool")
PARTS = ("ddrl", "dashboard", "benchmarks", "tests")
CPP_SUFFIXES = (".cpp", ".hpp")
CPP_COMMENT_OR_LITERAL = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')""", re.DOTALL)
CPP_TOKEN = re.compile(r'\w+|"(?:\\.|[^"\\])*"|[^\s\w]')


@dataclass
class Size:
    """What one package holds."""

    nodes: int = 0
    files: int = 0
    tokens: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.nodes + other.nodes, self.files + other.files, self.tokens + other.tokens)


def python_code(source: str) -> ast.Module:
    """A module's syntax tree, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return tree


def python_nodes(source: str) -> int:
    """Nodes of a module's syntax tree, without docstrings and expression contexts."""
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(python_code(source)))


def cpp_tokens(source: str) -> list[str]:
    """Tokens of a C++ file, without comments. Every sign is a token: `->` is two."""
    return CPP_TOKEN.findall(CPP_COMMENT_OR_LITERAL.sub(lambda found: found[1] or " ", source))


def measure(files: Iterable[tuple[str, str]]) -> dict[str, Size]:
    """Sizes by package, of files given as (path from the repository's root, text)."""
    sizes: dict[str, Size] = {}
    for path, text in files:
        package = package_of(path)
        size = sizes.setdefault(package, Size())
        if path.endswith(".py"):
            size.nodes += python_nodes(text)
            size.files += 1
        elif path.startswith("ddrl/"):
            size.tokens += len(cpp_tokens(text))
    return sizes


def package_of(path: str) -> str:
    """The package that a file counts to: ddrl/replay, benchmarks/pool, tests; a module of ddrl itself is its own."""
    first, *rest = path.split("/")
    if first in ("tests", "dashboard") or path.startswith("ddrl/dashboard/"):
        return first if first == "tests" else "dashboard"
    return f"{first}/{rest[0]}"


def working_tree() -> Iterator[tuple[str, str]]:
    """Python and C++ files as they lie in the working tree."""
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*")):
            if path.suffix == ".py" or path.suffix in CPP_SUFFIXES:
                yield str(path.relative_to(ROOT)), path.read_text()


def of_commit(commit: str) -> Iterator[tuple[str, str]]:
    """The same files as a commit has them. SystemExit where git does not know it."""
    done = subprocess.run(["git", "archive", commit, "--", *PARTS], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise SystemExit(f"--against {commit}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and member.name.endswith((".py", *CPP_SUFFIXES)):
                yield member.name, content.read().decode()


def rows(sizes: dict[str, Size]) -> dict[str, Size]:
    """The packages, largest first, each part followed by its sum; the library's by slices, core and both."""
    table: dict[str, Size] = {}
    for part in PARTS:
        packages = {name: size for name, size in sizes.items() if name.split("/")[0] == part}
        if part == "ddrl":
            slices = {name: size for name, size in packages.items() if name.removeprefix("ddrl/") in SLICES}
            core = {name: size for name, size in packages.items() if name not in slices}
            table.update(_sorted(core))
            table["= core"] = sum(core.values(), Size())
            table.update(_sorted(slices))
            table["= ddrl"] = sum(packages.values(), Size())
        else:
            table.update(_sorted(packages))
            if list(packages) != [part]:
                table[f"= {part}"] = sum(packages.values(), Size())
    return table


def _sorted(sizes: dict[str, Size]) -> dict[str, Size]:
    return dict(sorted(sizes.items(), key=lambda item: (item[1].nodes, item[1].tokens), reverse=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="a commit whose figures stand beside")
    options = parser.parse_args()
    now = rows(measure(working_tree()))
    headers = ["package", "nodes", "files", "C++ tokens"]
    if options.against is None:
        print_table(headers, [(name, size.nodes, size.files, size.tokens) for name, size in now.items()])
        return
    then = rows(measure(of_commit(options.against)))
    headers += [f"{header} of {options.against}" for header in headers[1:]]
    table = []
    for name in [*now, *(name for name in then if name not in now)]:
        left = now.get(name, Size())
        right = then.get(name, Size())
        table.append((name, left.nodes, left.files, left.tokens, right.nodes, right.files, right.tokens))
    print_table(headers, table)


if __name__ == "__main__":
    main()

"""Each option of a command that README.md or a page of docs/ shows is one that its program takes."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddrl.admix.settings import ServeConfig
from tests.docs.test_names import PAGES, PAST
from tests.sources import ROOT

COMMAND = re.compile(r"\bpython -m ((?:ddrl|benchmarks|tests)(?:\.[a-z_]+)*)\b(?!\.)((?:\\\n|[^`\n|#&;])*)")
OPTION = re.compile(r"(?:^|\s)(--[a-z][\w-]*)(?=[\s=,)]|$)")  # those with a dot are Streamlit's
TAKEN = re.compile(r"[\"'](--[a-z][\w-]*)[\"']")


@cache
def options(module: str) -> frozenset[str]:
    """That the files of a program add to a parser, or what benchmarks have in common does."""
    spec = find_spec(module)
    assert spec is not None
    if spec.submodule_search_locations is not None:
        spec = find_spec(f"{module}.__main__")
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin)
    files = [*program.parent.glob("*.py")] if program.name == "__main__.py" else [program]
    if not module.startswith("ddrl"):
        files.append(ROOT / "benchmarks" / "harness.py")
    own = {f"--{item.name.replace('_', '-')}" for item in fields(ServeConfig)} if module == "ddrl.serve" else set()
    return frozenset({*own, *TAKEN.findall("\n".join(file.read_text() for file in files))})


def commands(page: Path) -> list[tuple[str, set[str]]]:
    """Modules with the options given to them, without those behind a `--`, which are another program's."""
    found = COMMAND.findall(page.read_text())
    return [(module, set(OPTION.findall(re.split(r"\s--\s", words)[0]))) for module, words in found]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in PAST], ids=lambda page: page.stem)
def test_programs_take_the_options_that_a_page_gives_them(page: Path) -> None:
    wrong = {(module, option) for module, given in commands(page) for option in given - options(module)}
    assert not wrong


def test_options_are_found() -> None:
    assert sum(len(given) for page in PAGES for _, given in commands(page)) > 200

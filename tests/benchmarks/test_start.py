"""Every benchmark, and each check of tests/ that is a program, can be started; the pages name those that there are."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.sources import ROOT
from tests.waiting import PATIENCE

pytest.importorskip("torch", reason="needs the extra [train]")
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    if "peers" not in path.parts and re.search(r"\barguments\(|ArgumentParser\(", path.read_text())
    if path.name != "harness.py" and not path.name.startswith("test_")
)
START = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code in (0, None), name
    else:
        raise AssertionError(f"{name} went on")
"""
WITHOUT_OPTIONS = ("benchmarks.FOLDER.NAME", "benchmarks.distribution.cluster")  # the latter's are of its subcommands
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What each program says of its options."""
    done = subprocess.run(
        [sys.executable, "-c", START, *PROGRAMS], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    found = re.split(r"^usage: python -m (\S+)", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_every_benchmark_starts_with_help(helps) -> None:
    assert len(PROGRAMS) > 15
    assert list(helps) == PROGRAMS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_benchmarks_options_and_results_that_exist(page, helps) -> None:
    text = page.read_text()
    quoted = re.findall(r"`([^`]*python -m (?:benchmarks|tests)[^`]*)`", text)
    commands = [re.split(r"\bpython -m ", words)[1:] for words in quoted]
    for command in (part for parts in commands for part in parts):
        program, *words = re.sub(r"'.*?'|\".*?\"", "", command.partition(" -- ")[0].partition(";")[0]).split()
        if page.stem == "changelog" or program in WITHOUT_OPTIONS:
            continue
        unknown = [word for word in words if re.match("--[a-z]", word) and word.partition("=")[0] not in helps[program]]
        assert not unknown, command
    named = set(re.findall(r"python -m ((?:benchmarks|tests)\.[\w.]+)", text)) - {"benchmarks.FOLDER.NAME"}
    assert named <= set(PROGRAMS)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link

"""Every program of benchmarks/ that takes --short runs in its smallest form and writes its figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import environment

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^    (?:parser|options) = (?:harness\.)?arguments\(", re.MULTILINE)
TIMEOUT = 1200  # [s]; the smallest forms take about a minute each on two quiet cores

# Programs that need more than --short: what they are asked for.
MORE = {
    "benchmarks.learning.solve": ["cartpole"],
    "benchmarks.mutations": ["--random", "1", "--only", "balance/sizes.py"],
}


def programs() -> list[str]:
    """Modules whose command line is the harness's."""
    paths = [path for path in sorted(ROOT.joinpath("benchmarks").rglob("*.py")) if PROGRAM.search(path.read_text())]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__main__") for name in names]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, env=environment())


def test_the_programs_are_found():
    assert "benchmarks.microbatch" in programs()
    assert len(programs()) > 25


@pytest.mark.long
@pytest.mark.parametrize("program", programs())
def test_a_program_says_how_it_is_called(program):
    done = run(program, "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--short" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("program", programs())
def test_the_smallest_form_of_a_program_ends_and_saves_its_figures(program, tmp_path):
    figures = tmp_path / "figures.json"
    done = run(program, *MORE.get(program, []), "--short", "--json", str(figures))
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(figures.read_text())

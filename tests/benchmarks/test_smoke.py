"""Every program of benchmarks/, and each check of tests/ that is a program, runs in its smallest form, ends, and writes
its figures (`pytest -m long`)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.sources import ROOT, environment

USES_HARNESS = re.compile(r"^    (?:parser|options) = (?:harness\.)?arguments\(", re.MULTILINE)  # --short and --json
OF_TESTS = ("attack.py", "deaths.py", "hostile.py", "mutations/__main__.py", "stability.py")
TIMEOUT = 1200  # [s]; the smallest forms take at most about a minute each on two quiet cores

# What programs are asked for beside --short and --json, one run each; the others need nothing.
FORMS = {
    "benchmarks.distribution": ["tuned"],
    "benchmarks.learning.device": ["--device cpu --part updates publish --cases 'dqn 64' 'plain loss 64' 'pqn 256'"],
    "benchmarks.learning.solve": ["cartpole"],
    "benchmarks.pool": ["--tasks 3"],
    "tests.mutations": ["--random 1 --only balance/sizes.py"],
    "tests.stability": ["tests/core/test_plugins.py --no-load"],
}
# Programs without figures.
PLAIN = {
    "benchmarks.ages": [""],
    "benchmarks.figures": ["--check"],
    "tests.published": ["CartPole-v1"],
    "benchmarks.size": [""],
    "benchmarks.distribution.cluster": ["up --hosts 2", "run --ranks 1 -- true", "down"],
    "tests.replay.picture": ["{folder}/replay.png"],
}


def programs() -> list[str]:
    """Modules whose command line is the harness's."""
    files = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests" / name for name in OF_TESTS)])
    paths = [path.relative_to(ROOT) for path in files if USES_HARNESS.search(path.read_text())]
    names = [".".join(path.with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__main__") for name in names]


def run(program: str, *words: str) -> None:
    command = [sys.executable, "-m", program, *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, env=environment(DDRL_CLUSTER="smoke")
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def test_the_programs_are_found():
    assert len(programs()) > 15
    assert set(FORMS) <= set(programs())
    assert not set(PLAIN) & set(programs())


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("command", [(name, words) for name in programs() for words in FORMS.get(name, [""])], ids=str)
def test_the_smallest_form_of_a_program_ends_and_saves_its_figures(command, tmp_path):
    program, words = command
    figures = tmp_path / "figures.json"
    run(program, *shlex.split(words), "--short", "--json", str(figures))
    assert json.loads(figures.read_text())


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("program", PLAIN)
def test_a_program_without_figures_ends(program, tmp_path):
    if program == "tests.replay.picture":
        pytest.importorskip("kaleido", reason="needs kaleido")
    for words in PLAIN[program]:
        run(program, *words.format(folder=tmp_path).split())

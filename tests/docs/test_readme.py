"""README's snippets run as they stand, and what it says of itself is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddrl.core.settings import load_config
from ddrl.run.cli import tasks
from tests.docs.test_extending import environment
from tests.sources import ROOT
from tests.waiting import PATIENCE

TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
EXTRAS = ("torch", "ipywidgets", "plotly")
AFTER = """
print(run.state)
assert run.path.parent.name == "runs"
assert run.stop() == "ended", run.last_words()
"""


def run(code: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_snippet_that_starts_a_run_starts_one(tmp_path: Path) -> None:
    for package in EXTRAS:
        pytest.importorskip(package, reason="needs the extras [train] and [notebook]")
    (code,) = [snippet for snippet in SNIPPETS if "ddrl.start" in snippet]
    run(code + AFTER, tmp_path)


def test_every_other_snippet_runs(tmp_path: Path) -> None:
    others = [snippet for snippet in SNIPPETS if "ddrl.start" not in snippet]
    assert others
    for code in others:
        run(code, tmp_path)


def test_every_setting_that_it_shows_exists() -> None:
    shown = re.findall(r"--set (\w+(?:\.\w+)+=[^\s`]+)", TEXT)
    assert len(shown) >= 5
    load_config(None, shown)
    named = re.findall(r"python -m ddrl.run (\w+)", TEXT)
    assert named
    assert set(named) <= set(tasks())


def test_it_holds_ten_figures_at_most() -> None:
    section = TEXT.partition("## Figures")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert 2 < len(rows) - 1 <= 10

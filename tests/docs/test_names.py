"""Each file that README or a page of docs/ names exists; programs of studies made once are named with their commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.sources import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAST = {"changelog.md"}  # it names what has gone
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|hpp|cpp|toml|ipynb|sbatch))`(?! of commit)")
STUDIES = "## Studies made once"  # a table of programs with their commits


def tracked() -> set[str]:
    """Every file of the repository; without git, of its folders."""
    found = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return set(found.stdout.split()) or {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()}


def names_of(page: Path) -> set[str]:
    """Of files, in the running text and tables of a page; code blocks have files of the reader's own."""
    text = re.sub(r"^```.*?^```", "", page.read_text().split(STUDIES)[0], flags=re.MULTILINE | re.DOTALL)
    return set(FILE.findall(text))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in PAST], ids=lambda page: page.stem)
def test_each_file_that_a_page_names_exists(page: Path) -> None:
    files = tracked()
    missing = {
        name
        for name in names_of(page)
        if not any(file == name or file.endswith(f"/{name}") for file in files)
        and not re.search("[A-Z]{2}", name)  # a place to fill in, as in `ddrl/plots/SUBJECT.py`
    }
    assert not missing


def test_names_are_found() -> None:
    assert sum(len(names_of(page)) for page in PAGES) > 150

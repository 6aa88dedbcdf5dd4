"""docs/sources.md against the code: each number of each source stands there, and each file that it names exists."""

from __future__ import annotations

import re

import pytest

from tests.sources import ROOT

PAGE = (ROOT / "docs" / "sources.md").read_text()
NUMBERS = {"D": 22, "R": 26, "A": 17, "G": 10, "M": 10}


def numbers_of(cell: str) -> list[str]:
    """The numbers that a row's first cell names: "D5 to D7", "R15, R17", "D2"."""
    letter = cell.strip()[0]
    found: list[int] = []
    for part in cell.split(","):
        ends = [int(number) for number in re.findall(r"[A-Z](\d+)", part)]
        found += range(ends[0], ends[-1] + 1)
    return [f"{letter}{number}" for number in found]


@pytest.mark.parametrize("letter", NUMBERS)
def test_each_number_of_a_source_stands_in_one_row(letter: str) -> None:
    cells = re.findall(rf"^\| ({letter}\d+[^|]*) \|", PAGE, re.MULTILINE)
    listed = [number for cell in cells for number in numbers_of(cell)]
    assert sorted(listed, key=lambda name: int(name[1:])) == [f"{letter}{n}" for n in range(1, NUMBERS[letter] + 1)]


def test_each_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`([a-z_]+/[\w/]*(?:\.\w+)?)`", PAGE)
    assert len(named) > 60
    assert [name for name in named if not (ROOT / "ddrl" / name).exists() and not (ROOT / name).exists()] == []


def test_each_row_says_whether_it_departs() -> None:
    for line in PAGE.splitlines():
        if re.match(r"\| [A-Z]\d+", line):
            assert line.rstrip("| ").split("|")[-1].strip(), line

"""The table of docs/security.md: what somebody may not do names the tests that hold it, and they exist."""

from __future__ import annotations

import re

from tests.sources import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "security.md").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| who | may"))
    end = next(number for number in range(begin, len(lines)) if not lines[number].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin + 2 : end]]


def test_whatever_somebody_may_not_do_is_held_by_tests_that_exist() -> None:
    table = rows()
    assert len(table) >= 15
    for row in table:
        assert len(row) == 4, row
        _, _, denied, held = row
        named = NAMED.findall(held)
        assert bool(named) == (denied != "-"), f"{denied}: {held}"
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"

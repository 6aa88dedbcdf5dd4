"""Each row of the table of docs/security.md names tests that exist."""

from __future__ import annotations

import re

from tests.sources import ROOT


def test_the_tests_that_security_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) >= 10
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"

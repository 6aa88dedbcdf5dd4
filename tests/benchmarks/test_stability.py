"""Rounds of tests are counted, a failure is never tried again, and what was done before is kept."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests import stability

FLAKY = """
from pathlib import Path
def test_fails_in_its_second_round():
    count = Path(__file__).with_name("count")
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    assert len(count.read_text()) != 2
"""


def rounds(monkeypatch: pytest.MonkeyPatch, report, test, number: int) -> int:
    arguments = ["stability", str(test), "--rounds", str(number), "--no-load", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # --basetemp would delete the folder that these tests are in
    monkeypatch.setattr(stability, "arguments", lambda name, words: _parser())
    return stability.main()


def _parser():
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser


@pytest.mark.long
def test_a_failure_counts_and_rounds_done_before_are_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    test, report = tmp_path / "test_flaky.py", tmp_path / "report.json"
    test.write_text(FLAKY)
    assert rounds(monkeypatch, report, test, 1) == 0
    assert rounds(monkeypatch, report, test, 3) == 1
    (case,) = json.loads(report.read_text())["cases"].values()
    assert (case["rounds"], len(case["failed"])) == (3, 1)
    assert "test_fails_in_its_second_round" in case["failed"][0]
    assert (tmp_path / "count").read_text() == "xxx"


def test_rounds_of_other_code_are_not_counted_and_neither_are_their_failures(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, commit = tmp_path / "report.json", ["a"]
    outcomes = iter([(["tests/a.py::test_b"], 1.0), ([], 2.0), ([], 3.0), (["tests/a.py::test_c"], 4.0)])
    monkeypatch.setattr(stability, "commit_of", lambda root: commit[0])
    monkeypatch.setattr(stability, "run", lambda tests, under: next(outcomes))

    def case() -> dict[str, Any]:
        (case,) = json.loads(report.read_text())["cases"].values()
        return case

    assert rounds(monkeypatch, report, "tests", 1) == 1
    assert case() == {"commit": "a", "rounds": 1, "failed": ["tests/a.py::test_b"], "seconds": [1.0]}
    commit[0] = "b"
    assert rounds(monkeypatch, report, "tests", 2) == 0
    assert case() == {"commit": "b", "rounds": 2, "failed": [], "seconds": [2.0, 3.0]}
    assert rounds(monkeypatch, report, "tests", 3) == 1  # the same code: counted on
    assert case() == {"commit": "b", "rounds": 3, "failed": ["tests/a.py::test_c"], "seconds": [2.0, 3.0, 4.0]}


def test_files_that_start_processes_are_found() -> None:
    found = stability.multi_process(["tests"])
    assert {"tests/run/test_processes.py", "tests/distribution/test_relays.py", "tests/pool/test_leases.py"} <= {*found}
    assert "tests/core/test_layouts.py" not in found

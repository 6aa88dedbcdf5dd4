"""Rounds of tests are counted, a failure is never tried again, and what was done before is kept."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import stability

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


def test_files_that_start_processes_are_found() -> None:
    found = stability.multi_process(["tests"])
    assert {"tests/run/test_processes.py", "tests/distribution/test_relays.py", "tests/pool/test_leases.py"} <= {*found}
    assert "tests/core/test_layouts.py" not in found

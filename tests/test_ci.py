"""What was skipped in CI is judged by .ci/check_skips.py: nothing that this machine could run is passed over."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.sources import ROOT

spec = importlib.util.spec_from_file_location("check_skips", ROOT / ".ci" / "check_skips.py")
assert spec
assert spec.loader
check_skips = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_skips)

TESTS = """import pytest

@pytest.mark.parametrize("a", [1, 2])
def test_quick(a): ...

@pytest.mark.LONG
def test_of_minutes(): ...

class TestTogether:
    def test_inside(self): ...
""".replace("LONG", "long")  # this file has no such test itself
RAN = '<testcase classname="tests.test_it" name="test_quick[1]"/>'
INSIDE = '<testcase classname="tests.test_it.TestTogether" name="test_inside"/>'
WHOLE = '<testcase classname="" name="tests.test_it"><skipped message="collection skipped">{}</skipped></testcase>'


def skipped(reason: str) -> str:
    return f'<testcase classname="tests.test_it" name="test_quick[2]"><skipped message="{reason}"/></testcase>'


@pytest.mark.parametrize(
    ("cases", "status", "line"),
    [
        ([RAN, INSIDE], 0, "0 tests skipped, 0 reasons that do not hold here, 0 tests absent"),
        ([RAN], 1, "DID NOT RUN: tests.test_it.TestTogether.test_inside, which is not marked long"),
        ([INSIDE], 1, "DID NOT RUN: tests.test_it.test_quick, which is not marked long"),
        ([RAN, INSIDE, skipped("cannot mount here: no")], 0, "skipped: 1 in tests.test_it.test_quick: cannot mount"),
        ([RAN, INSIDE, skipped("needs the extra [mpi]")], 1, "COULD HAVE RUN: 1 in tests.test_it.test_quick: needs"),
        ([RAN, INSIDE, skipped("for no reason")], 1, "COULD HAVE RUN: 1 in tests.test_it.test_quick: for no reason"),
        ([WHOLE.format("Skipped: needs the extra [mpi]")], 1, "COULD HAVE RUN: 1 in tests.test_it: Skipped: needs"),
        ([WHOLE.format("Skipped: cannot mount here")], 0, "skipped: 1 in tests.test_it: Skipped: cannot mount here"),
    ],
)
def test_it_fails_where_a_test_was_left_out_that_could_have_run(
    cases: list[str], status: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    assert check_skips.main(str(report), tmp_path) == status
    assert line in capsys.readouterr().out

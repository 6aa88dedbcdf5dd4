"""docs/testing.md names every file that has a long test."""

from tests.sources import ROOT


def test_every_file_with_a_long_test_is_named() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    mark = "pytest.mark." + "long"
    files = [path for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()]
    assert len(files) > 3
    assert [path.name for path in files if f"`{path.relative_to(ROOT)}`" not in page] == []

"""The figures of README and docs are those of benchmarks/results, and a page that states others is found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import figures
from tests.sources import ROOT

PAGE = Path("docs/page.md")
FILE = {
    "command": "python -m benchmarks.size --short",
    "date": "2026-11-25",
    "machine": {"cpu": "AMD EPYC 7R13 Processor"},
    "seconds": {"median": 5.83, "low": 3.7, "high": 9.04, "runs": 3},
    "steps": [10_100, 12_300, 9_000],
    "rows": [{"label": "chain"}, {"label": "auto", "share": 0.85}],
}


@pytest.fixture
def speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository of one page with its template and one results file."""
    for name in ("benchmarks/results", "benchmarks/pages/docs", "docs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "benchmarks/size.py").touch()
    path = tmp_path / "benchmarks/results/speed.json"
    path.write_text(json.dumps(FILE))
    (tmp_path / "benchmarks/pages" / PAGE).write_text(
        '{% set r = results("speed") %}\n| speed | {{ r.seconds | f(1) }} s |\n'
    )
    (tmp_path / PAGE).write_text("before\n<!-- figures -->\nold\n<!-- end of figures -->\nafter\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures.is_older.cache_clear()
    monkeypatch.setattr(figures, "RESULTS", path.parent)
    monkeypatch.setattr(figures, "TEMPLATES", tmp_path / "benchmarks/pages")
    yield path
    figures.is_older.cache_clear()


def marks(page: str) -> list[tuple[str, bool]]:
    """Of each date of a page's figures the results file that it goes with, and whether it is marked."""
    part = "".join(figures.PART.findall((ROOT / page).read_text()))
    if page == "README.md":
        return [
            (name, figures.OLDER in words) for words, name in re.findall(r"\[(\d{4}-[^]]*)\]\([^)]*/(\w+)\.json", part)
        ]
    return [(name, figures.OLDER in words) for name, words in re.findall(r"/(\w+)\.json\) \| (\d{4}-[^|]*)", part)]


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_rows_that_name_no_commit_are_marked_as_older_than_their_code(page: str) -> None:
    found = marks(page)
    assert len(found) >= 10
    assert [name for name, marked in found if not marked and "commit" not in figures.results(name)] == []


def rendered(expression: str) -> str:
    return figures.render('{% set r = results("speed") %}| speed | ' + expression + " |", PAGE)


def test_the_pages_hold_what_the_results_files_say() -> None:
    for page, text in figures.pages().items():
        found = (ROOT / page).read_text()
        assert figures.unmarked(found) == figures.unmarked(text), f"{page}: python -m benchmarks.figures"
    assert {Path("README.md"), Path("docs/benchmarks.md")} <= set(figures.pages())


def test_a_part_is_written_and_a_change_of_a_results_file_is_found(speed: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["figures", "--check"])
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.figures"):
        figures.main()
    monkeypatch.setattr("sys.argv", ["figures"])
    figures.main()
    page = figures.ROOT / PAGE
    assert page.read_text() == "before\n<!-- figures -->\n| speed | 5.8 s |\n<!-- end of figures -->\nafter\n"
    monkeypatch.setattr("sys.argv", ["figures", "--check"])
    figures.main()
    (figures.ROOT / "docs/other.md").write_text("# Other\n\n| what | figure |\n|---|---|\n| speed | 7 s |\n")
    with pytest.raises(SystemExit, match="no results file holds"):
        figures.main()
    (figures.ROOT / "docs/other.md").unlink()
    speed.write_text(json.dumps({**FILE, "seconds": {"median": 6.1, "low": 1, "high": 9}}))
    with pytest.raises(SystemExit):
        figures.main()
    assert "5.8 s" in page.read_text()


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("{{ r.seconds | f(2) }}", "5.83"),
        ("{{ r.seconds | span(1) }}", "3.7 to 9.0"),
        ("{{ r.steps | median | f }}", "10100"),
        ("{{ r.steps | span }}", "9000 to 12300"),
        ("{{ r.steps[1] | n(1000) }}", "12,000"),
        ('{{ (r.rows | starting("label", "au")).share | f(2) }}', "0.85"),
        ('{{ given("batch 64") }}', "batch 64"),
        ("C51 beside Stable-Baselines3", "C51 beside Stable-Baselines3"),
        ('{{ when("speed") }}', "[2026-11-25, AMD EPYC, older code](../benchmarks/results/speed.json)"),
    ],
)
def test_a_template_takes_its_numbers_from_a_results_file(speed: Path, expression: str, text: str) -> None:
    assert rendered(expression) == f"| speed | {text} |"


def test_a_row_says_how_it_was_made_and_whether_its_code_has_changed(speed: Path, monkeypatch) -> None:
    row = "`python -m benchmarks.size --short` | [speed](../benchmarks/results/speed.json) | 2026-11-25, AMD EPYC"
    assert figures.made("speed", PAGE) == row + figures.OLDER
    figures.is_older.cache_clear()
    speed.write_text(json.dumps({**FILE, "commit": "be93cf5a"}))
    later = row.replace(row.partition(" | ")[0], "the same") + ", be93cf5a"
    assert figures.made("speed", PAGE, "the same") == later
    monkeypatch.setattr(figures, "changed_since", lambda *_: iter(["be93cf5a"]))
    assert figures.made("speed", PAGE, "the same", history=True) == later + figures.OLDER
    monkeypatch.setattr(figures, "changed_since", lambda *_: iter([]))
    figures.is_older.cache_clear()
    assert figures.made("speed", PAGE, "the same", history=True) == later


def test_a_row_says_of_each_part_when_it_was_measured(speed: Path) -> None:
    kept = {"steps": {**{name: FILE[name] for name in ("command", "machine")}, "date": "2026-11-20"}}
    speed.write_text(json.dumps({**FILE, "commit": "be93cf5a", "kept": kept}))
    new = "2026-11-25, AMD EPYC, be93cf5a"
    old = "2026-11-20, AMD EPYC, older code"
    assert figures.when("speed", history=False) == f"seconds, rows: {new}; steps: {old}"
    assert figures.when("speed", history=False, parts=("seconds", "rows")) == new
    assert rendered('{{ when("speed", "steps") }}') == f"| speed | [{old}](../benchmarks/results/speed.json) |"
    assert figures.made("speed", PAGE, "`it`", parts=("steps", "seconds")).endswith(f" | steps: {old}; seconds: {new}")
    with pytest.raises(figures.FigureError, match="no part minutes"):
        figures.when("speed", history=False, parts=("minutes",))


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("5.8 s", "5.8 in a row of figures comes from no results file"),
        ("about .9 of it", r"\.9 in a row"),
        ("{% macro m() %}3 and {{ r.date }}{% endmacro %}{{ m() }}", "3 in a row"),
        ("{{ r.minutes | f }}", "has no attribute 'minutes'"),
        ('{{ results("gone") }}', "gone.json is missing: run the benchmark"),
    ],
)
def test_a_number_without_a_results_file_is_refused(speed: Path, expression: str, error: str) -> None:
    with pytest.raises(figures.FigureError, match=error):
        rendered(expression)


def test_a_command_whose_program_has_left_is_refused(speed: Path) -> None:
    (figures.ROOT / "benchmarks/size.py").unlink()
    with pytest.raises(figures.FigureError, match=re.escape("benchmarks.size, which speed.json was measured by")):
        figures.made("speed", PAGE)


@pytest.mark.parametrize("text", ["no part", "<!-- figures -->\n<!-- end of figures -->\n" * 2])
def test_a_page_without_exactly_one_part_is_refused(speed: Path, text: str) -> None:
    (figures.ROOT / PAGE).write_text(text)
    with pytest.raises(figures.FigureError, match="exactly one part"):
        figures.pages()


def test_no_table_of_docs_holds_a_number_that_its_results_files_do_not() -> None:
    pages = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
    assert [line for page in pages for line in figures.unfounded(page)] == []
    assert sum(len(rows) for page in pages for *_, rows in figures.tables(page)) > 200


LINKED = "See [speed](../benchmarks/results/speed.json).\n"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (LINKED + "{5.83}", None),
        (LINKED + "{5.8 s (3.7 to 9.0)}", None),
        (LINKED + "{85 %}", None),
        (LINKED + "{10,100}", None),
        (LINKED + "{12,000}", None),
        (LINKED + "{5}", None),
        (LINKED + "{7.77}", "7.77 in no file that it links"),
        (LINKED + "{5.84}", "5.84 in"),
        (LINKED + "{5.8 s (3.6 to 9.0)}", "3.6 in"),
        (LINKED + "{12,400}", "12,400 in"),
        (LINKED + "<!-- computed: 7.77 -->\n{7.77}", None),
        (LINKED + "<!-- computed: 7.77 -->\n### Another\n" + LINKED + "{7.77}", "Another: 7.77 in"),
        (LINKED + "## Another\n{5.83}", "Another: a table of numbers whose section links no file"),
        ("<!-- figures -->\n{7.77}<!-- end of figures -->\n", None),
    ],
)
def test_a_table_s_number_without_a_results_file_is_found(speed: Path, text: str, refused: str | None) -> None:
    table = "\n\n| what | figure |\n|---|---|\n| 99 tasks | {} |\n"
    page = re.sub(r"\{(.*?)\}", lambda cell: table.format(cell[1]), text)
    (figures.ROOT / PAGE).write_text(page)
    speed.write_text(json.dumps({**FILE, "mean": float("nan")}))
    found = figures.unfounded(str(PAGE))
    assert [refused in line for line in found] == ([True] if refused else [])

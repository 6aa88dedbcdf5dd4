"""Figures of README and docs, rendered from benchmarks/results: `python -m benchmarks.figures` writes them into the
pages, with `--check` it says which pages differ from what it would write.

A page holds its figures between `<!-- figures -->` and `<!-- end of figures -->`. The template of that part, in Jinja,
lies in benchmarks/pages under the page's own path. In each row of a table the column "figure" takes its numbers from
results files; a condition that no file holds is written `given("batch 64")`, and any other number is refused."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.harness import RESULTS, ROOT

TEMPLATES = ROOT / "benchmarks" / "pages"
PART = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
COMPUTED = re.compile("\x02[^\x03]*\x03")  # what an expression of a template gave, while numbers are looked for
NUMBER = re.compile(r"(?<![\w-])\.?\d[\w.,]*")  # not the digits of a name, as in C51 or Stable-Baselines3


class FigureError(Exception):
    """A template states a number of its own, or asks for one that no results file holds."""


def render(template: str, page: Path) -> str:
    """The figures' part of a page, by its template's text; FigureError where a number has no results file.

    page: its path from the root, which links are relative to."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=marked,
    )
    environment.filters |= {"f": decimals, "n": grouped, "median": median, "span": span, "starting": starting}
    environment.globals |= {
        "results": results,
        "given": str,
        "link": lambda name, words="": link(name, page, words),
        "when": lambda name: link(name, page, when(name)),
        "made": lambda name, command="": made(name, page, command),
    }
    try:
        text = environment.from_string(template).render()
    except jinja2.TemplateError as error:
        raise FigureError(f"{page}: {error}") from None
    for row in text.splitlines():
        bare = NUMBER.findall(COMPUTED.sub("", figure_of(row)))
        if bare:
            raise FigureError(f"{page}: {', '.join(bare)} in a row of figures comes from no results file: {row[:80]}")
    return text.replace("\x02", "").replace("\x03", "")


def marked(value: Any) -> str:
    """What an expression gave, between marks; of a macro, whose text has numbers of its own, what it marked."""
    text = str(value)
    return text if "\x02" in text else f"\x02{text}\x03"


def figure_of(row: str) -> str:
    """The second cell of a table's row; empty elsewhere."""
    cells = row.split(" | ")
    return cells[1] if row.startswith("| ") and len(cells) > 1 else ""


def results(name: str) -> dict[str, Any]:
    """What benchmarks/results/NAME.json holds."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise FigureError(f"{path.relative_to(ROOT)} is missing: run the benchmark that writes it")
    return json.loads(path.read_text())


def link(name: str, page: Path, words: str = "") -> str:
    """A link to a results file from a page."""
    path = os.path.relpath(RESULTS / f"{name}.json", (ROOT / page).parent)
    return f"[{words or name}]({path})"


def made(name: str, page: Path, command: str = "") -> str:
    """How a results file came about, as three cells: command; file; date, processor and commit.

    command: the one that measures it today, where the program that the file names has another name or has left."""
    file = results(name)
    words = command or f"`{file['command']}`"
    for module in re.findall(r"python -m ([\w.]+)", words):
        path = ROOT.joinpath(*module.split("."))
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            raise FigureError(f"{page}: {module}, which {name}.json was measured by, is not here: name today's command")
    return f"{words.replace('|', '&#124;')} | {link(name, page)} | {when(name)}"


def when(name: str) -> str:
    """Date, processor and, where it is saved, commit of a results file."""
    file = results(name)
    return ", ".join(filter(None, [file["date"], processor(file["machine"]["cpu"]), file.get("commit")]))


def processor(model: str) -> str:
    """The maker and family of a processor."""
    return " ".join(re.sub(r"\((R|TM)\)|CPU|Processor", " ", model).split()[:2])


def median(values: Mapping[str, float] | Sequence[float]) -> float:
    """Of a saved `Timing`, or of numbers."""
    return values["median"] if isinstance(values, Mapping) else statistics.median(values)


def span(values: Mapping[str, float] | Sequence[float], places: int = 0) -> str:
    """The least and the largest: "3.7 to 9.0"."""
    if isinstance(values, Mapping):
        return f"{decimals(values['low'], places)} to {decimals(values['high'], places)}"
    return f"{decimals(min(values), places)} to {decimals(max(values), places)}"


def decimals(value: Any, places: int = 0) -> str:
    """A number, or the median of a saved `Timing`, with so many decimals."""
    number = float(median(value) if isinstance(value, Mapping) else value)
    return f"{number:.{places}f}"


def grouped(value: Any, to: int = 1) -> str:
    """A whole number, or the median of a saved `Timing`, with commas, rounded to a multiple of `to`."""
    return f"{round((median(value) if isinstance(value, Mapping) else value) / to) * to:,}"


def starting(rows: Sequence[Mapping[str, Any]], name: str, words: str) -> Mapping[str, Any] | None:
    """The first row whose `name` starts with these words."""
    return next((row for row in rows if row[name].startswith(words)), None)


def pages() -> dict[Path, str]:
    """Each page with figures, by its path from the root, and its text as it should be."""
    found: dict[Path, str] = {}
    for path in sorted(TEMPLATES.rglob("*.md")):
        page = path.relative_to(TEMPLATES)
        text = (ROOT / page).read_text()
        if len(PART.findall(text)) != 1:
            raise FigureError(
                f"{page}: exactly one part between <!-- figures --> and <!-- end of figures --> is needed"
            )
        part = render(path.read_text(), page)
        found[page] = PART.sub(lambda _, part=part: part, text)
    return found


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a page differs")
    options = parser.parse_args()
    differing = {page: text for page, text in pages().items() if (ROOT / page).read_text() != text}
    for page, text in differing.items():
        if not options.check:
            (ROOT / page).write_text(text)
        print(f"{page}: {'differs' if options.check else 'written'}")
    if options.check and differing:
        raise SystemExit("write them by: python -m benchmarks.figures")


if __name__ == "__main__":
    main()

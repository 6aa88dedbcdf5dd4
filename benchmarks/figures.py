"""Figures of README and docs, rendered from benchmarks/results: `python -m benchmarks.figures` writes them into the
pages, with `--check` it says which pages differ from what it would write. A row whose code has changed in git since it
was measured is marked where it is written; whether a mark has come due since then is asked by `benchmarks.ages`.

A page holds its figures between `<!-- figures -->` and `<!-- end of figures -->`. The template of that part, in Jinja,
lies in benchmarks/pages under the page's own path. In each row of a table the column "figure" takes its numbers from
results files; a condition that no file holds is written `given("batch 64")`, and any other number is refused.

Other tables of docs are written by hand. Where a cell of one is a number, its section links the results files that it
is from, and each number of its rows, beside their first cell, is one that they hold, rounded as it stands there, or
stands in a comment of the section, `<!-- computed: NUMBERS -->`: sums, medians and ratios that nobody saved."""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2

from benchmarks.ages import changed_since, measured_code
from benchmarks.harness import ORIGIN, RESULTS, ROOT

TEMPLATES = ROOT / "benchmarks" / "pages"
PART = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
COMPUTED = re.compile("\x02[^\x03]*\x03")  # what an expression of a template gave, while numbers are looked for
OLDER = ", older code"  # the mark
NUMBER = re.compile(r"(?<![\w-])\.?\d[\w.,]*")  # not the digits of a name, as in C51 or Stable-Baselines3
SECTION = re.compile(r"^(?=#{1,3} )", re.MULTILINE)
TABLE = re.compile(r"^\|.*\n\|[ :|-]+\n((?:\|.*\n)+)", re.MULTILINE)
CELL = re.compile(r"[*~<>+-]*\d[\d.,]*( ?(%|s|ms|us|ns|MiB|GiB|MB|kB|times))?\**( \(.*\))?")  # wholly a number
WORDS_OF_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|10\^\d+")
PLAIN_NUMBER = re.compile(r"(?<![\w.,^-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w^])|(?<![\w.])\.\d+")
SCALES = (1, 100, 1e3, 1e6, 1e-3, 1e-6)  # units and shares that a page may use
# Headings over tables of numbers that nobody measured.
NOT_MEASURED = {
    ("docs/architecture.md", "The map"),
    ("docs/serving.md", "Beside requests"),
}


class FigureError(Exception):
    """A template states a number of its own, or asks for one that no results file holds."""


def render(template: str, page: Path, *, history: bool = False) -> str:
    """The figures' part of a page, by its template's text; FigureError where a number has no results file.

    page: its path from the root, which links are relative to. history: ask git which rows are older than their code;
    else they are those that name no commit."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=marked,
    )
    filters = {"f": decimals, "n": grouped, "median": median, "span": span, "starting": starting}
    cast(dict[str, Any], environment.filters).update(filters)

    def linked(name: str, words: str = "") -> str:
        return link(name, page, words)

    def dated(name: str, *parts: str) -> str:
        return link(name, page, when(name, history, parts))

    def measured(name: str, command: str = "", *parts: str) -> str:
        return made(name, page, command, history, parts)

    names = {"results": results, "given": str, "link": linked, "when": dated, "made": measured}
    try:
        text = environment.from_string(template, globals=names).render()
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


def made(name: str, page: Path, command: str = "", history: bool = False, parts: Sequence[str] = ()) -> str:
    """How a results file came about, as three cells: command; file; date, processor and commit.

    command: the one that measures it today, where the program that the file names has another name or has left.
    parts: those of the file that the row takes its numbers from, where they are not all."""
    words = command or f"`{results(name)['command']}`"
    for module in re.findall(r"python -m ([\w.]+)", words):
        path = ROOT.joinpath(*module.split("."))
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            raise FigureError(f"{page}: {module}, which {name}.json was measured by, is not here: name today's command")
    return f"{words.replace('|', '&#124;')} | {link(name, page)} | {when(name, history, parts)}"


def when(name: str, history: bool, parts: Sequence[str] = ()) -> str:
    """Date, processor and, where it is saved, commit of a results file, with OLDER where its code has changed since;
    one after the other where its parts, or those of `parts`, were not measured in one run."""
    file = results(name)
    kept = file.get("kept", {})
    origins: dict[str, list[str]] = {}
    if missing := set(parts) - set(file):
        raise FigureError(f"{name}.json has no part {', '.join(sorted(missing))}")
    for part in parts or [*(part for part in file if part not in (*ORIGIN, "kept") and part not in kept), *kept]:
        origin = kept.get(part, file)
        words = ", ".join(filter(None, [origin["date"], processor(origin["machine"]["cpu"]), origin.get("commit")]))
        origins.setdefault(words + OLDER * is_older(name, history, part if part in kept else ""), []).append(part)
    if len(origins) == 1:
        return next(iter(origins))
    return "; ".join(f"{', '.join(its)}: {words}" for words, its in origins.items())


@functools.cache
def is_older(name: str, history: bool, part: str = "") -> bool:
    """Whether the code under a results file, or under a part that later runs have kept, has changed since: where it
    names no commit, or in git with `history`."""
    file = results(name)
    origin = file["kept"][part] if part else file
    if "commit" not in origin:
        return True
    return history and any(changed_since(measured_code(origin["command"]), origin["commit"]))


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
    number = float(median(cast(Mapping[str, float], value)) if isinstance(value, Mapping) else value)
    return f"{number:.{places}f}"


def grouped(value: Any, to: int = 1) -> str:
    """A whole number, or the median of a saved `Timing`, with commas, rounded to a multiple of `to`."""
    return f"{round((median(cast(Mapping[str, float], value)) if isinstance(value, Mapping) else value) / to) * to:,}"


def starting(rows: Sequence[Mapping[str, Any]], name: str, words: str) -> Mapping[str, Any] | None:
    """The first row whose `name` starts with these words."""
    return next((row for row in rows if row[name].startswith(words)), None)


def pages(*, history: bool = False) -> dict[Path, str]:
    """Each page with figures, by its path from the root, and its text as it should be."""
    found: dict[Path, str] = {}
    for path in sorted(TEMPLATES.rglob("*.md")):
        page = path.relative_to(TEMPLATES)
        text = (ROOT / page).read_text()
        if len(PART.findall(text)) != 1:
            raise FigureError(
                f"{page}: exactly one part between <!-- figures --> and <!-- end of figures --> is needed"
            )
        part = render(path.read_text(), page, history=history)
        found[page] = PART.sub(lambda _, part=part: part, text)
    return found


def tables(page: str) -> Iterator[tuple[str, list[str], list[str], list[str]]]:
    """Of each table of a page with a cell that is a number, outside its rendered part: its heading, the names of the
    results files that its section links, the numbers that it says were computed, and its rows."""
    text = PART.sub("", (ROOT / page).read_text())
    for section in SECTION.split(text):
        heading = section.partition("\n")[0].strip("# ")
        names = re.findall(r"benchmarks/results/([a-z]\w*)\.json", section)
        computed = PLAIN_NUMBER.findall(" ".join(re.findall(r"<!-- computed: (.*?) -->", section)))
        for table in TABLE.finditer(section):
            rows = table[1].splitlines()
            cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]]
            if (page, heading) not in NOT_MEASURED and any(map(CELL.fullmatch, cells)):
                yield heading, names, computed, rows


def held(names: Sequence[str]) -> list[float]:
    """All numbers of results files, of their words too, in each of SCALES; sorted."""
    found = {abs(number) for name in names for number in _numbers(results(name))}
    return sorted(number * scale for number in found for scale in SCALES)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping | list):
        mapping = cast(Mapping[str, Any], value if isinstance(value, Mapping) else {})
        for item in (*mapping, *mapping.values(), *(cast(list[Any], value) if isinstance(value, list) else ())):
            yield from _numbers(item)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"\d+(?:\.\d+)?", value))
    elif isinstance(value, int | float) and math.isfinite(value):
        yield float(value)


def holds(numbers: Sequence[float], word: str) -> bool:
    """Whether a word of a page, as "1,200" or ".98", is one of these numbers, rounded as it stands; zeros at the end of
    a whole number may be what it was rounded to."""
    digits = word.replace(",", "")
    whole, _, decimals = digits.partition(".")
    zeros = 0 if decimals else len(whole) - len(whole.rstrip("0"))
    half = 0.501 * 10.0 ** (zeros - len(decimals))
    place = bisect.bisect_left(numbers, float(digits) - half)
    return place < len(numbers) and numbers[place] <= float(digits) + half


def unfounded(page: str) -> list[str]:
    """Numbers of a page's tables, of two digits or more, that no results file of their section holds; in words."""
    found: list[str] = []
    for heading, names, computed, rows in tables(page):
        if not names:
            found.append(f"{page}, {heading}: a table of numbers whose section links no file of benchmarks/results")
            continue
        numbers = held(sorted(set(names)))
        for row in rows:
            cells = WORDS_OF_CODE.sub(" ", "|".join(row.strip("|").split("|")[1:]))
            words = [word for word in PLAIN_NUMBER.findall(cells) if len(re.sub(r"\D", "", word).strip("0")) > 1]
            bad = [word for word in words if word not in computed and not holds(numbers, word)]
            if bad:
                found.append(f"{page}, {heading}: {', '.join(bad)} in no file that it links: {row[:80]}")
    return found


def unmarked(text: str) -> str:
    """A page without its marks: they come with commits, and so after what is committed."""
    return text.replace(OLDER, "")


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a page differs")
    options = parser.parse_args()
    same = unmarked if options.check else str
    texts = pages(history=not options.check)
    differing = {page: text for page, text in texts.items() if same((ROOT / page).read_text()) != same(text)}
    wrong = [line for path in sorted((ROOT / "docs").glob("*.md")) for line in unfounded(f"docs/{path.name}")]
    print("\n".join(wrong), end="\n" if wrong else "")
    for page, text in differing.items():
        if not options.check:
            (ROOT / page).write_text(text)
        print(f"{page}: {'differs' if options.check else 'written'}")
    if options.check and differing:
        raise SystemExit("write them by: python -m benchmarks.figures")
    if wrong:
        raise SystemExit("figures that no results file holds: measure them, or take them out")


if __name__ == "__main__":
    main()

"""What all benchmarks share: interleaved timing, medians with spread, the machine in words, a table in the terminal,
JSON on disk.

Two things are compared only by runs that alternate (A B A B ...), because a shared machine drifts: the ratio is taken
pair by pair."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PEER = "PYTHON_OF_THE_PEER"


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs of one thing."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarize; low and high are the extremes."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def interleave(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run every case once a round, in turn; seconds per case, by round (warm-up rounds dropped)."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warmup + rounds):
        for name, case in cases.items():
            begin = clock()
            case()
            elapsed = clock() - begin
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Timing:
    """Ratio pair by pair: median and extremes."""
    return Timing.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def machine() -> dict[str, Any]:
    """The machine in words, for the JSON."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }


def module() -> str:
    """The module that this process was started with, as `python -m` takes it."""
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "start a benchmark as a module: python -m benchmarks.FOLDER.NAME"
    return spec.name.removesuffix(".__main__")


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """The parser every benchmark starts from: --short and --json."""
    parser = argparse.ArgumentParser(prog=f"python -m {module()}", description=description)
    parser.add_argument("--short", action="store_true", help="a smaller form that ends in about a minute")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / f"{name}.json", metavar="FILE", help="where the figures go (%(default)s)"
    )
    return parser


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain aligned table."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [
        max(len(str(header)), *(len(row[column]) for row in cells)) if cells else len(str(header))
        for column, header in enumerate(headers)
    ]
    print("  ".join(str(header).ljust(width) for header, width in zip(headers, widths, strict=True)))
    print("  ".join("-" * width for width in widths))
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def save(path: Path, figures: Mapping[str, Any]) -> None:
    """Write the figures with the command and the machine that made them."""
    document = {
        "command": command(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=lambda value: asdict(value)) + "\n")
    print(f"saved {path}")


def command(words: Sequence[str]) -> str:
    """The command of this process, to be run anywhere: without --json, and with a word for a peer's interpreter."""
    kept: list[str] = []
    for option, word in itertools.pairwise(["", *words]):
        if option.endswith("-python"):
            kept.append(PEER)
        elif option == "--peer":
            kept.append(f"{word.partition('=')[0]}={PEER}")
        elif option != "--json" and word.partition("=")[0] != "--json":
            kept.append(word)
    return " ".join(["python -m", module(), *kept])

"""What all benchmarks share: interleaved timing, medians with spread, the command line, parts that are saved one by
one, programs under mpirun, a table in the terminal, JSON on disk.

Two things are compared only by runs that alternate (A B A B ...), because a shared machine drifts: the ratio is taken
pair by pair."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"


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


def run_parts(parser: argparse.ArgumentParser, parts: Mapping[str, Callable[[argparse.Namespace], Any]]) -> None:
    """Run the parts of a benchmark that --part names (default: all), each with the options of `parser`.

    Figures are saved after each part; what the JSON holds of other parts is kept.
    """
    parser.add_argument("--part", nargs="+", choices=list(parts), default=list(parts), help="only these (default: all)")
    options = parser.parse_args()
    figures = known_figures(options.json, parts)
    for name in options.part:
        figures[name] = parts[name](options)
        save(options.json, figures)


def known_figures(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """What an earlier run saved under these names; empty without a file."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return {name: known[name] for name in names if name in known}


def mpirun(ranks: int) -> list[str]:
    """The start of a command that runs a program on so many ranks of this machine, under the interpreter's MPI."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else "mpirun"
    return [launcher, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks)]


def mpi_environment(**variables: str) -> dict[str, str]:
    """The environment in which root may call mpirun, and whose processes import this source tree; with `variables`."""
    allowed = {f"{prefix}_ALLOW_RUN_AS_ROOT{end}": "1" for prefix in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    sources = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": sources, **allowed, **variables}


def on_ranks(ranks: int, module: str, *words: str, timeout: float = 600.0, **variables: str) -> str:
    """What `python -m module words` prints on `ranks` ranks of this machine; SystemExit with its errors if it fails."""
    command = [*mpirun(ranks), sys.executable, "-m", module, *words]
    environment = mpi_environment(**variables)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{module} failed ({done.returncode}):\n{done.stdout[-500:]}\n{done.stderr[-2500:]}")
    return done.stdout


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | Sequence[str] = ()) -> None:
    """A table of rows that are given by name. `columns`: {heading: name}, or names that serve as headings (default:
    those of the first row)."""
    chosen = columns or list(rows[0])
    names = list(chosen.values()) if isinstance(chosen, Mapping) else list(chosen)
    print_table(list(chosen), [[row.get(name) for name in names] for row in rows])


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain aligned table."""
    cells = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(headers, *cells, strict=True)]
    for line in (headers, ["-" * width for width in widths], *cells):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _shown(cell: object) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


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

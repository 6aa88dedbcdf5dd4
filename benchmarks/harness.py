"""What all benchmarks share: interleaved timing, medians with spread, the command line, parts that are saved one by
one, programs under mpirun, a table in the terminal, JSON on disk, and `--against`: a program in this tree and in
another one, in turn.

Two things are compared only by runs that alternate (A B A B ...), because a shared machine drifts: the ratio is taken
pair by pair."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PEER = "PYTHON_OF_THE_PEER"
RESAMPLES = 10_000  # of a bootstrap
ORIGIN = ("command", "date", "commit", "machine")  # how figures came about, in their file


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


def in_turn(cases: Mapping[str, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run every case, which measures itself, once a round, in turn; the figures of each by round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(case())
            shown = {key: f"{value:.4g}" for key, value in found[name][-1].items() if isinstance(value, int | float)}
            print(name, shown, flush=True)
    return found


def seconds_of(command: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, float]:
    """Of a process and children that it waited for, from its start to its end. CalledProcessError where it fails."""
    begin = time.perf_counter()
    used = children_seconds()
    try:
        subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise
    return {"processor_seconds": children_seconds() - used, "wall_seconds": time.perf_counter() - begin}


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Timing:
    """Ratio pair by pair: median and extremes."""
    return Timing.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def bootstrapped_mean(values: Any) -> dict[str, float]:
    """Mean of [cases], or of [trainings, cases], and its 95 % interval by bootstrap: cases are drawn anew, and
    trainings, each with all cases."""
    import numpy as np

    array = np.atleast_2d(values)
    rng = np.random.default_rng(0)
    trainings, cases = (rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n for n in array.shape)
    low, high = np.percentile(((trainings @ array) * cases).sum(-1), [2.5, 97.5])
    return {"mean": float(array.mean()), "low": float(low), "high": float(high)}


def machine() -> dict[str, Any]:
    """The machine in words, for the JSON."""
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model[1] if model else platform.processor(),
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


class Parser(argparse.ArgumentParser):
    """The command line of a benchmark. With `--against` its parse_args measures this tree and another one in turn, and
    ends the process."""

    compared: str

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As ArgumentParser's."""
        words = [word.replace("{pair}", "1") for word in (sys.argv[1:] if args is None else args)]
        options = super().parse_args(words, namespace)
        if options.against is None:
            return options
        _, further = comparing().parse_known_args(args)
        if options.json == self.get_default("json"):
            options.json = options.json.with_stem(f"{options.json.stem}_against")
        compare(options, further, options.figures or self.compared)
        raise SystemExit


def arguments(name: str, description: str, *, compared: str = "", peer: str = "") -> Parser:
    """The parser every benchmark starts from: --short, --json and --against.

    compared: a regular expression for the names of the figures that --against shows (default: all). peer: the packages
    of a peer, whose interpreter --peer-python gives."""
    parser = Parser(prog=f"python -m {module()}", description=description, parents=[comparing()])
    parser.compared = compared
    parser.add_argument("--short", action="store_true", help="a smaller form that ends in about a minute")
    if peer:
        parser.add_argument("--peer-python", help=f"interpreter of an environment with {peer} (default: ddrl alone)")
    parser.set_defaults(json=RESULTS / f"{name}.json")
    return parser


def comparing() -> argparse.ArgumentParser:
    """The options that `compare` reads; all other words go to the program in both trees."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go (%(default)s)")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another built tree, measured in turn with this")
    parser.add_argument("--pairs", type=int, default=5, help="of runs with --against (%(default)s)")
    parser.add_argument("--figures", metavar="REGEX", help="names of the figures that --against compares")
    parser.add_argument(
        "--words-there",
        metavar="WORDS",
        help="options in the other tree, where they differ: --words-there='--short ...'",
    )
    return parser


def compare(options: argparse.Namespace, words: Sequence[str], figures: str) -> None:
    """Run this program in this tree and in `options.against`, in turn, each in a process of its own; print and save the
    ratios, this tree's figures over the other's.

    The other tree's own program is run where it has one of this name, else this one with ddrl from there. "{pair}" in
    the words is the number of the pair, from 1."""
    other = options.against.resolve()
    path = Path(*module().split("."))
    there = shlex.split(options.words_there) if options.words_there is not None else list(words)
    pairs: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        benchmarks = Path(folder) / "benchmarks"
        benchmarks.symlink_to(ROOT / "benchmarks")
        has_own = (other / path / "__main__.py").exists() or (other / path.with_suffix(".py")).exists()
        sides = {"this": (ROOT, ROOT, list(words)), "other": (other if has_own else Path(folder), other, there)}
        for pair in range(1, options.pairs + 1):
            found: dict[str, dict[str, list[float]]] = {}
            for side in sorted(sides, reverse=bool(pair % 2)):
                home, tree, own_words = sides[side]
                file = Path(folder) / f"{side}.json"
                file.unlink(missing_ok=True)
                given = [word.replace("{pair}", str(pair)) for word in own_words]
                begin = time.perf_counter()
                used = children_seconds()
                said = Path(folder) / "said"
                with said.open("w") as output:  # no pipe: what a program leaves running would hold it open
                    status = subprocess.run(
                        [sys.executable, "-m", module(), *given, "--json", str(file)],
                        cwd=home,
                        env={**os.environ, "PYTHONPATH": str(tree)},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    ).returncode
                if status:
                    raise SystemExit(f"the program failed in {tree} ({status}):\n{said.read_text()[-2500:]}")
                found[side] = {
                    "processor seconds": [children_seconds() - used],
                    "wall seconds": [time.perf_counter() - begin],
                    **named_figures(json.loads(file.read_text())),
                }
            for name in found["this"].keys() & found["other"].keys():
                values = zip(found["this"][name], found["other"][name], strict=False)
                pairs.setdefault(name, []).extend((here, there) for here, there in values if here > 0 and there > 0)
            print(f"pair {pair} of {options.pairs}", flush=True)
    rows = {name: ratio_of_pairs(pairs[name]) for name in sorted(pairs) if pairs[name] and re.search(figures, name)}
    shown = [{"figure": name, **row} for name, row in rows.items()]
    print_rows(shown)
    save(options.json, {"other": commit_of(other), "ratios": {row["figure"]: row for row in shown}})


def commit_of(tree: Path) -> str:
    """The commit that a tree is at, with "+" where files of it differ; empty outside git."""
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+"]
    return subprocess.run(words, cwd=tree, capture_output=True, text=True).stdout.strip()


def ratio_of_pairs(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Of (this, other): the medians of both, the ratio's median and extremes, and the 95 % interval of its geometric
    mean (Student's)."""
    both = [statistics.median(side) for side in zip(*pairs, strict=True)]
    ratio = ratios(*zip(*pairs, strict=True))
    row: dict[str, Any] = {
        "this": both[0],
        "other": both[1],
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "pairs": ratio.runs,
        "mean": None,
        "mean_low": None,
        "mean_high": None,
    }
    if len(pairs) > 1:
        logarithms = [math.log(this / other) for this, other in pairs]
        mean = statistics.mean(logarithms)
        half = half_width(logarithms)
        row |= {"mean": math.exp(mean), "mean_low": math.exp(mean - half), "mean_high": math.exp(mean + half)}
    return row


def half_width(values: Sequence[float]) -> float:
    """Half of Student's 95 % interval of the mean."""
    from scipy import stats

    return float(stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5)


def named_figures(figures: Any, name: str = "") -> dict[str, list[float]]:
    """The numbers of a results file by their path in it; of a `Timing` the median. An item of a list is named by its
    words, or by its number where others have the same; numbers of items without words are pooled."""
    found: dict[str, list[float]] = {}
    for key, value in _entries(figures):
        place = f"{name}/{key}".strip("/") if key else name
        if isinstance(value, bool) or value is None or place == "machine":
            continue
        if isinstance(value, Mapping) and {"median", "low", "high"} <= value.keys():
            found.setdefault(place, []).append(float(value["median"]))
        elif isinstance(value, Mapping | list):
            for inner, numbers in named_figures(value, place).items():
                found.setdefault(inner, []).extend(numbers)
        elif isinstance(value, int | float):
            found.setdefault(place, []).append(float(value))
    return found


def _entries(figures: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(figures, Mapping):
        yield from figures.items()
        return
    seen: Counter[str] = Counter()
    for item in figures:
        fields = item.items() if isinstance(item, Mapping) else ()
        words = " ".join(value for key, value in fields if isinstance(value, str) and key != "date")
        seen[words] += 1
        yield f"{words} {seen[words]}" if words and seen[words] > 1 else words, item


def children_seconds() -> float:
    """What the children that have ended took of processors [s]."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_parts(parser: argparse.ArgumentParser, parts: Mapping[str, Callable[[argparse.Namespace], Any]]) -> None:
    """Run the parts of a benchmark that --part names (default: all), each with the options of `parser`.

    Figures are saved after each part; what the JSON holds of other parts is kept, and beside it, under "kept", the
    command, date, commit and machine that each of them was measured with.
    """
    parser.add_argument("--part", nargs="+", choices=list(parts), default=list(parts), help="only these (default: all)")
    options = parser.parse_args()
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    figures = {name: figure for name, figure in known.items() if name not in (*ORIGIN, "kept")}
    origin = {name: known[name] for name in ORIGIN if name in known}
    kept = {name: known.get("kept", {}).get(name, origin) for name in figures}
    for name in options.part:
        figures[name] = parts[name](options)
        kept.pop(name, None)
        save(options.json, figures | ({"kept": kept} if kept else {}))


def known_figures(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """What an earlier run saved under these names; empty without a file."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return {name: known[name] for name in names if name in known}


def continued(path: Path) -> dict[str, Any]:
    """The figures that an interrupted run of a benchmark has left in its file, for the next one to go on from; empty
    where the file is of another commit, whose figures would be passed off as this one's."""
    known = json.loads(path.read_text()) if path.exists() else {}
    if not known:
        return {}
    measured = known.get("commit", "an older commit").rstrip("+")
    if measured != commit_of(ROOT).rstrip("+"):
        print(f"{path.name} was measured at {measured}: everything is measured anew", flush=True)
        return {}
    return {name: figure for name, figure in known.items() if name not in ORIGIN}


def mpirun(ranks: int) -> list[str]:
    """The start of a command that runs a program on so many ranks of this machine, under the interpreter's MPI."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else "mpirun"
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
    placing = [] if "HYDRA" in version else ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]  # MPICH's asks nothing
    return [launcher, *placing, "-n", str(ranks)]


def mpi_environment(**variables: str) -> dict[str, str]:
    """The environment in which root may call mpirun, and whose processes import this source tree; with `variables`."""
    allowed = {f"{prefix}_ALLOW_RUN_AS_ROOT{end}": "1" for prefix in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    sources = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": sources, **allowed, **variables}


def setting_words(*settings: str) -> list[str]:
    """Settings as words of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def on_ranks(ranks: int, module: str, *words: str, timeout: float = 600.0, **variables: str) -> str:
    """What `python -m module words` prints on `ranks` ranks of this machine; SystemExit with its errors if it fails."""
    command = [*mpirun(ranks), sys.executable, "-m", module, *words]
    environment = mpi_environment(**variables)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{module} failed ({done.returncode}):\n{done.stdout[-500:]}\n{done.stderr[-2500:]}")
    return done.stdout


class Peer:
    """A program of benchmarks/peers under an interpreter of its own: asked by a line, it answers with one. It ends with
    its input. name: in tables and messages."""

    def __init__(self, name: str, python: str, program: str, *words: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, "-W", "ignore", ROOT / "benchmarks" / "peers" / program, *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> str:
        """Send one line; the peer's answer. SystemExit where it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """Its next line. SystemExit where it has ended."""
        assert self._process.stdout is not None
        found = self._process.stdout.readline().strip()
        if not found:
            raise SystemExit(f"the peer {self.name} has ended")
        return found

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """A table of rows that are given by name, of these columns (default: those of the first row)."""
    chosen = columns or list(rows[0])
    print_table(chosen, [[row.get(name) for name in chosen] for row in rows])


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
    origin = (command(sys.argv[1:]), time.strftime("%Y-%m-%d"), commit_of(ROOT), machine())
    document = {**dict(zip(ORIGIN, origin, strict=True)), **figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=asdict) + "\n")
    print(f"saved {path}")


def command(words: Sequence[str]) -> str:
    """The command of this process, to be run anywhere: without --json, with a word for a peer's interpreter and for
    another tree."""
    kept: list[str] = []
    for option, word in itertools.pairwise(["", *words]):
        if option.endswith("-python"):
            kept.append(PEER)
        elif option == "--against":
            kept.append("TREE")
        elif option == "--peer":
            kept.append(f"{word.partition('=')[0]}={PEER}")
        elif option != "--json" and word.partition("=")[0] != "--json":
            kept.append(word)
    return " ".join(["python -m", module(), *kept])

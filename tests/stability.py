"""The same tests again and again under load: how often each fails. Resumable: rounds done before are kept.

    python -m tests.stability --rounds 20                       the whole quick suite, 20 times
    python -m tests.stability --rounds 200 --multi-process      each file that starts several processes, 200 times

The load is one busy loop a core, at normal priority, beside the tests. Nothing is tried again: a failure counts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import ROOT, arguments, commit_of, machine, print_table
from ddrl.core.files import write_atomically

LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
MULTI_PROCESS = re.compile(r"subprocess|mpirun|ddrl\.start|\bprocess\(")


def main() -> int:
    """The command; 1 where a round has failed."""
    parser = arguments("stability", __doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="as pytest takes them (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="of each (%(default)s; --short: 1)")
    parser.add_argument("--multi-process", action="store_true", help="each test file that starts processes by itself")
    parser.add_argument("--no-load", action="store_true", help="no busy loops: the machine is busy by itself")
    parser.add_argument("--under", default="", metavar="COMMAND", help="runs the tests, as in --under 'nice -n 10'")
    options = parser.parse_args()
    cases = [[path] for path in multi_process(options.tests)] if options.multi_process else [options.tests]
    rounds = 1 if options.short else options.rounds
    kept: dict[str, dict[str, Any]] = json.loads(options.json.read_text())["cases"] if options.json.exists() else {}
    with load(0 if options.no_load else len(os.sched_getaffinity(0))):
        for number in range(rounds):
            for tests in cases:
                name = " ".join(tests)
                case = kept.setdefault(name, {"commit": commit_of(ROOT), "rounds": 0, "failed": [], "seconds": []})
                if case["commit"] != commit_of(ROOT):  # other code: begin anew
                    case |= {"commit": commit_of(ROOT), "rounds": 0, "failed": [], "seconds": []}
                if case["rounds"] > number:
                    continue
                failed, seconds = run(tests, options.under.split())
                case["rounds"] += 1
                case["failed"] += failed
                case["seconds"].append(round(seconds, 1))
                print(f"{number + 1}/{rounds} {name}: {seconds:.0f} s {' '.join(failed) or 'ok'}", flush=True)
                document = {"command": "python -m tests.stability", "date": time.strftime("%Y-%m-%d")}
                document |= {"machine": machine(), "cases": kept}
                write_atomically(options.json, (json.dumps(document, indent=1) + "\n").encode())
    print_table(
        ["tests", "rounds", "failures"],
        [(name, case["rounds"], len(case["failed"])) for name, case in kept.items()],
    )
    return int(any(case["failed"] for case in kept.values()))


def multi_process(tests: list[str]) -> list[str]:
    """The test files below `tests` that start processes."""
    given = [ROOT / name for name in tests]
    paths = sorted({path for each in given for path in ([each] if each.is_file() else each.rglob("test_*.py"))})
    return [str(path.relative_to(ROOT)) for path in paths if MULTI_PROCESS.search(path.read_text())]


def run(tests: list[str], under: list[str]) -> tuple[list[str], float]:
    """The tests that failed, and seconds."""
    begin = time.monotonic()
    command = [*under, sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-rfE", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 5):
        print(done.stdout[-6000:], flush=True)
        failed = failed or [f"pytest ended with {done.returncode}"]
    return failed, time.monotonic() - begin


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Busy loops beside what runs inside; they end with this process, also where it is killed."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())

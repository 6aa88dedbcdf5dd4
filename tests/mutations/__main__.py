"""Faults put into the code one at a time, each in a clean copy, and which of them the nearest tests notice.

    python -m tests.mutations                    the named faults, those from outside, then 100 random ones
    python -m tests.mutations --only mailbox     faults whose file or name holds the word

A fault that no test near its file notices has survived: a test is missing, or the fault changes nothing that a user can
see. What was judged before at the same text is not judged again, so a run can be interrupted. Faults from outside were
written by somebody who had not seen the tests (outside.toml), and four times again after the tests for those that
survived had been written (held_out.toml, and those that end in again, third and fourth)."""

from __future__ import annotations

import compileall
import hashlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import arguments, machine, print_table
from ddrl.core.files import write_atomically
from tests.mutations.copies import KERNELS, ROOT, Copy, KernelBuild, preload, stands
from tests.mutations.explained import explanation
from tests.mutations.named import NAMED, OUTSIDE, Fault, from_outside
from tests.mutations.nearest import PROGRAMS, nearest
from tests.mutations.operators import draw, text_of

SEED = 14
SLOW = ("tests/run/", "tests/distribution/test_relays.py")  # they start processes: faults that need them come last


def main() -> int:
    """The command; its exit status is 1 where a fault that a person wrote survives."""
    parser = arguments("mutations", __doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=100, metavar="N", help="random faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, metavar="S", help="of the random faults (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose file or name holds this word")
    parser.add_argument("--again", action="store_true", help="judge those that survived once more")
    parser.add_argument("--near", action="store_true", help="without runs that go through a file")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="of one test run (%(default)s)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faults = [("named", fault) for fault in NAMED]
    for name in OUTSIDE:
        faults += [(name.replace("_", " "), fault) for fault in from_outside(name)]
    for _, fault in faults:
        if not stands(fault):
            print(f"passed over, its line has changed: {fault.path}: {fault.name}")
    faults = [(kind, fault) for kind, fault in faults if stands(fault)]
    faults += [("random", fault) for fault in draw(ROOT, 0 if options.short else options.random, options.seed)]
    faults = [(kind, fault) for kind, fault in faults if options.only in f"{fault.path} {fault.name}"]
    if options.short:
        faults = faults[:3]
    known = {row["key"]: row for row in _saved(options.json)}
    todo = [
        (kind, fault)
        for kind, fault in faults
        if _key(fault) not in known or (options.again and not known[_key(fault)]["noticed"])
    ]
    todo.sort(key=lambda pair: (pair[1].path.startswith(KERNELS), nearest(pair[1].path)[0][0].startswith(SLOW)))
    print(f"{len(faults)} faults, {len(todo)} to judge here", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddrl-mutations-") as folder:
        judge = Judge(Path(folder), options.timeout, near=options.near)
        for place, (kind, fault) in enumerate(todo, 1):
            why = explanation(fault)
            verdict = Verdict(False, why, 0.0) if why else judge(fault)
            row = {"key": _key(fault), "kind": kind, **fault._asdict(), **verdict._asdict()}
            row["noticed_at_first"] = known.get(row["key"], row).get("noticed_at_first", verdict.noticed)
            known[row["key"]] = row
            _save(options.json, row)
            word = "noticed" if verdict.noticed else "explained" if why else "SURVIVED"
            left = (time.monotonic() - begin) / place * (len(todo) - place)
            said = f"{place}/{len(todo)} {word:9} {fault.path}: {fault.name} {verdict.by} ({left:.0f} s left)"
            print(said, flush=True)
    judged = [(kind, known[_key(fault)]) for kind, fault in faults if _key(fault) in known]
    return _report(judged)


class Verdict(NamedTuple):
    """`noticed`: a test fails with the fault and passes without it; `by`: its name and reason, or why no test can."""

    noticed: bool
    by: str
    seconds: float


class Judge:
    """Puts a fault into a clean copy and runs the nearest tests, then the further ones.

    A test that fails has noticed the fault only if it fails a second time by itself, and passes by itself without the
    fault: a busy machine, another run beside it or an unlucky draw is no proof. Only a compiled program is believed at
    once where time was not the reason. A test of which this does not hold is left out, and the others judge."""

    def __init__(self, folder: Path, timeout: float, *, near: bool = False) -> None:
        self._timeout = timeout
        self._near = near
        preload()
        self._clean = Copy(folder / "clean")
        self._copy = Copy(folder / "copy")
        self._clean.make()
        compileall.compile_dir(self._clean.path / "ddrl", quiet=1)
        self._passes: set[str] = set()  # tests that have passed by themselves without a fault
        self._kernel = KernelBuild(folder / "kernel", self._clean.path)

    def __call__(self, fault: Fault) -> Verdict:
        """Judge a fault."""
        begin = time.monotonic()
        self._copy.make(self._clean.path)
        self._copy.put(fault)
        by = ""
        for tests in nearest(fault.path, further=not self._near):
            if fault.path.startswith(KERNELS) and not tests[0].startswith(PROGRAMS):
                self._kernel.into(self._copy, fault)
            if by := self._noticed_by(tests):
                break
        return Verdict(bool(by), by, round(time.monotonic() - begin, 1))

    def _noticed_by(self, tests: tuple[str, ...]) -> str:
        left_out: set[str] = set()
        while (outcome := self._copy.test(tests, self._timeout, left_out)).failed:
            if outcome.failed.startswith(PROGRAMS) and "cmake --build" in outcome.reason:
                raise RuntimeError(f"the fault does not compile: {outcome.reason}")
            if outcome.failed in left_out:
                raise RuntimeError(f"{outcome.failed} fails without a fault and cannot be left out")
            alone = (outcome.failed,)
            believed = outcome.failed.startswith(PROGRAMS) and not outcome.by_time
            again = believed or self._copy.test(alone, self._timeout).failed
            if again and (outcome.failed in self._passes or not self._clean.test(alone, self._timeout).failed):
                self._passes.add(outcome.failed)
                return f"{outcome.failed} - {outcome.reason}"
            print(f"left out, fails without the fault or not again: {outcome.failed} - {outcome.reason}", flush=True)
            left_out.update(outcome.passed, alone)
        return ""


def _key(fault: Fault) -> str:
    """A fault at the text that it stands in: another text of the file's line is another fault."""
    return hashlib.blake2b(repr(tuple(text_of(fault))).encode(), digest_size=8).hexdigest()


def _saved(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _save(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file."""
    rows = {each["key"]: each for each in _saved(path)} | {row["key"]: {**row, "date": time.strftime("%Y-%m-%d")}}
    document = {"command": "python -m tests.mutations", "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    write_atomically(path, (json.dumps({**document, "rows": list(rows.values())}, indent=1) + "\n").encode())


def _report(judged: list[tuple[str, dict[str, Any]]]) -> int:
    """Print the counts and what has survived; 1 where one that a person wrote has."""
    survived = [(kind, row) for kind, row in judged if not row["noticed"] and not row["by"]]
    counts = []
    for kind in sorted({kind for kind, _ in judged}):
        rows = [row for other, row in judged if other == kind]
        noticed = sum(row["noticed"] for row in rows)
        left = sum(other == kind for other, _ in survived)
        first = sum(row.get("noticed_at_first", row["noticed"]) for row in rows)
        counts.append((kind, len(rows), first, noticed, len(rows) - noticed - left, left))
    print_table(("faults", "judged", "noticed at first", "noticed", "explained", "survived"), counts)
    for kind, row in survived:
        print(f"survived ({kind}): {row['path']}: {row['name']}\n  - {row['old'].strip()}\n  + {row['new'].strip()}")
    return int(any(kind != "random" for kind, _ in survived))


if __name__ == "__main__":
    sys.exit(main())

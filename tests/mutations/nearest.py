"""Which tests are nearest to a module, in rings: the files of its name, those that import it, the folder that mirrors
its package, then runs that go through it, or a browser that shows it. Of a header of the kernel first the C++ programs
that include it: they need no module of Python's."""

from __future__ import annotations

import re
from collections.abc import Set
from functools import cache
from pathlib import Path

from benchmarks.harness import ROOT

MAX_FILES = 6  # that import a module: of more, the folder's own tests say as much
PROGRAMS = "tests/kernel/test_programs.py"
RUNS = ("tests/run/test_serial.py", "tests/run/test_training.py", "tests/run/test_resume.py")
BROWSER = "tests/dashboard/test_dashboard.py"
MPI = ("tests/run/test_processes.py", "tests/run/test_handover.py")
# Packages whose tests are not the folder of their name alone, and those whose last ring is not RUNS.
FOLDERS = {
    "acting": ("tests/acting", "tests/rollout"),
    "docs": ("tests/docs", "tests/benchmarks/test_figures.py"),
    "mpi_launch": ("tests/launch", "tests/run/test_launching.py", "tests/run/test_launch.py"),
    "kernel": (
        "tests/replay",
        "tests/channels",
        "tests/distribution/test_codecs.py",
        "tests/distribution/test_shards.py",
        "tests/learner",
    ),
    "tests": ("tests/benchmarks",),  # of the checks that are programs
}
FURTHER: dict[str, tuple[str, ...]] = {
    "admix": ("tests/plots",),  # its page, and those of the next two, are drawn through ddrl.plots
    "balance": ("tests/plots",),
    "benchmarks": (),
    "core": ("tests/telemetry", "tests/channels", "tests/learner", *RUNS),
    "dashboard": (BROWSER,),
    "distribution": MPI,
    "docs": (),
    "kernel": (),
    "mpi_launch": (),
    "notebooks": (),
    "plots": (BROWSER,),
    "pool": ("tests/plots",),
    "run": (*RUNS, *MPI),
    "tests": (),
}


def nearest(path: str, *, further: bool = True) -> list[tuple[str, ...]]:
    """The tests of a file, in rings: each runs where those before it have noticed nothing. The last one is left out
    where nothing `further` is asked for."""
    module = path.removesuffix(".py").replace("/", ".")
    stem = Path(path).stem
    top, _, below = path.partition("/")
    package = below.split("/")[0] if top == "ddrl" else top if below else "docs"
    folder = FOLDERS.get(package, (f"tests/{package}",))
    folder = tuple(name for name in folder if (ROOT / name).exists())
    imported = re.compile(rf"\b{re.escape(module)}\b(?!\.)")
    importing = [
        name
        for name, text in _test_files()  # looked through first without an expression, which takes 50 times as long
        if (module in text and imported.search(text)) or (top != "ddrl" and path in text)
    ]
    importing.sort(key=lambda name: not name.startswith(folder))
    own = tuple(
        name
        for name, _ in _test_files()
        if Path(name).stem == f"test_{stem}" and (name in importing or name.startswith(folder or "tests/"))
    )
    others = tuple(name for name in importing if name not in own)[:MAX_FILES]
    runs = FURTHER.get(package, RUNS) if further else ()
    return [ring for ring in (_programs(path), own, others, folder, runs) if ring]


def _programs(header: str) -> tuple[str, ...]:
    """The kernel's own tests that include a header, perhaps through others; those of its name first."""
    sources = sorted((ROOT / "tests/kernel").glob("test_*.cpp")) if header.endswith(".hpp") else []
    names = [path.stem for path in sources if ROOT / header in _included(path)]
    names.sort(key=lambda name: not name.startswith(f"test_{Path(header).stem}"))
    return tuple(f"{PROGRAMS}::test_a_program_passes_as_it_is[{name}]" for name in names[:MAX_FILES])


@cache
def _included(source: Path) -> Set[Path]:
    """The headers that a C++ source includes, and those that these include."""
    names = re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE)
    folders = (source.parent, ROOT / "ddrl/kernel", ROOT / "ddrl/admix/kernel")
    direct = {(folder / name).resolve() for folder in folders for name in names if (folder / name).exists()}
    return direct.union(*(_included(path) for path in direct))


@cache
def _test_files() -> list[tuple[str, str]]:
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in sorted((ROOT / "tests").rglob("test_*.py"))]

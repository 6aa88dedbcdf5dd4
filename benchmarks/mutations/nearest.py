"""Which tests stand nearest to a module: the files of its name and those that import it, then the folder that mirrors
it, then the runs that go through it. Of a header of the kernel first the C++ programs of its name: they need no module
of Python's."""

from __future__ import annotations

import re
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAX_FILES = 6  # that import a module: of more, the folder's own tests say as much
PROGRAMS = "tests/kernel/test_programs.py"

_RUNS = (
    "tests/run/test_training.py",
    "tests/run/test_serial.py",
    "tests/run/test_learning.py",
    "tests/run/test_turns.py",
)
_MPI = ("tests/run/test_processes.py", "tests/run/test_handover.py")
_RECORDS = (
    "tests/run/test_resume.py",
    "tests/run/test_lag.py",
    "tests/run/test_algorithms.py",
    "tests/test_evaluate.py",
)

# By the longest prefix of the file's path: the folder's tests, and those that run where these pass.
NEAREST: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ddrl/acting": (("tests/acting", "tests/rollout"), _RUNS),
    "ddrl/balance": (("tests/balance",), ()),
    "ddrl/channels": (("tests/channels",), ("tests/rollout", *_RUNS)),
    "ddrl/core": (
        ("tests/core",),
        ("tests/telemetry", "tests/rollout", "tests/channels", "tests/learner"),
    ),
    "ddrl/distribution": (("tests/distribution",), _MPI),
    "ddrl/distribution/plans": (
        tuple(f"tests/distribution/test_{name}.py" for name in ("costs", "plans", "simulator", "planner", "plugins")),
        ("tests/distribution",),
    ),
    "ddrl/envs": (("tests/envs",), ("tests/test_evaluate.py", "tests/run/test_training.py")),
    "ddrl/evaluate.py": (("tests/test_evaluate.py",), ()),
    "ddrl/kernel": (("tests/replay", "tests/channels"), ("tests/distribution/test_codecs.py", "tests/learner")),
    "ddrl/kernel/codec.hpp": (("tests/distribution/test_codecs.py", "tests/distribution/test_shards.py"), ()),
    "ddrl/learner": (("tests/learner",), ("tests/run/test_algorithms.py", "tests/run/test_saved_bits.py", *_RUNS)),
    "ddrl/notebook.py": (("tests/telemetry/test_notebook_panel.py", "tests/run/test_launch.py"), ("tests/notebooks",)),
    "ddrl/plots": (("tests/plots",), ("tests/telemetry/test_notebook_panel.py",)),
    "ddrl/pool": (("tests/pool",), ("tests/pool/test_mode.py",)),
    "ddrl/replay": (("tests/replay",), _RUNS),
    "ddrl/rollout": (("tests/rollout",), _RUNS),
    "ddrl/run": (_RUNS, (*_RECORDS, "tests/telemetry/test_control_of_a_run.py", *_MPI)),
    "ddrl/admix": (("tests/admix",), ()),
    "ddrl/telemetry": (("tests/telemetry",), ("tests/run/test_resume.py", "tests/run/test_training.py")),
    "ddrl/video.py": (("tests/test_evaluate.py",), ()),
    "ddrl": (("tests/test_package.py",), ("tests/docs",)),
}

# By the longest prefix too: the tests that say most where no file bears the module's name.
FIRST: dict[str, tuple[str, ...]] = {
    "ddrl/distribution/plans/schemes": ("tests/distribution/test_plans.py", "tests/distribution/test_costs.py"),
    "ddrl/distribution/relay": ("tests/distribution/test_relays.py",),
    "ddrl/distribution/transport": ("tests/distribution/test_relays.py",),
    "ddrl/envs/vectors.py": ("tests/envs/test_stepping.py",),
    "ddrl/balance/leader.py": ("tests/balance/test_nodes.py",),
    "ddrl/balance/messages.py": ("tests/balance/test_nodes.py",),
    "ddrl/admix/environment.py": ("tests/admix/test_vector.py",),
    "ddrl/admix/contracts.py": ("tests/admix/test_market.py", "tests/admix/test_vector.py"),
    "ddrl/admix/logs.py": ("tests/admix/test_logs.py",),
    "ddrl/kernel/replay": ("tests/replay/test_selectors.py", "tests/replay/test_experience.py"),
    "ddrl/kernel/ring.hpp": ("tests/channels/test_lane.py",),
    "ddrl/learner": ("tests/learner/test_dqn.py", "tests/learner/test_snapshot.py"),
    "ddrl/pool/policies.py": ("tests/pool/test_queue.py", "tests/pool/test_leases.py"),
    "ddrl/plots": ("tests/plots/test_figures.py",),
    "ddrl/admix/page.py": ("tests/plots/test_admix_figures.py",),
    "ddrl/pool/page.py": ("tests/pool/test_page.py",),
    "ddrl/pool/control.py": ("tests/pool/test_mode.py",),
    "ddrl/replay/replay.py": ("tests/replay/test_experience.py",),
    "ddrl/replay/sources": ("tests/replay/test_sources.py", "tests/run/test_training.py"),
    "ddrl/run": tuple(f"tests/run/test_{name}.py" for name in ("task", "training", "serial", "resume")),
    "ddrl/run/__main__.py": ("tests/run/test_bad_input.py", "tests/run/test_start.py"),
    "ddrl/run/checkpoint.py": ("tests/run/test_task.py", "tests/run/test_damage.py", "tests/run/test_resume.py"),
    "ddrl/run/cli.py": ("tests/run/test_trust.py", "tests/run/test_bad_input.py"),
    "ddrl/run/directory.py": ("tests/run/test_lock.py", "tests/run/test_full_disk.py", "tests/run/test_serial.py"),
    "ddrl/run/modes/local.py": ("tests/run/test_start.py", "tests/run/test_processes.py"),
    "ddrl/pool/mode.py": ("tests/pool/test_mode.py", "tests/pool/test_rounds.py"),
    "ddrl/admix": ("tests/admix/test_mixer.py", "tests/admix/test_server.py"),
    "ddrl/telemetry": ("tests/telemetry/test_recorder.py", "tests/telemetry/test_progress_and_summary.py"),
}


def nearest(path: str) -> list[tuple[str, ...]]:
    """The tests of a file, in rings: each runs where those before it have noticed nothing."""
    folder, further = _longest(NEAREST, path)
    module = path.removesuffix(".py").replace("/", ".")
    stem = Path(path).stem
    files = [(name, text) for name, text in _test_files() if name.startswith(folder) or f"{module} " in text]
    own = tuple(name for name, _ in files if Path(name).stem == f"test_{stem}") or _longest(FIRST, path) or ()
    importing = tuple(name for name, text in files if name not in own and f"{module} " in text)[:MAX_FILES]
    programs = _programs(path)
    of_its_name = tuple(name for name in programs if f"[test_{stem}" in name)
    others = tuple(name for name in programs if name not in of_its_name)
    return [ring for ring in (of_its_name, own, importing, folder, others, further) if ring]


def _programs(header: str) -> tuple[str, ...]:
    """The kernel's own tests that include a header, perhaps through others."""
    kernel = ROOT / "ddrl/kernel"
    sources = sorted((ROOT / "tests/kernel").glob("test_*.cpp")) if header.endswith(".hpp") else []
    of_it = [path.stem for path in sources if ROOT / header in _included(path, kernel)]
    return tuple(f"{PROGRAMS}::test_a_program_passes_as_it_is[{name}]" for name in of_it[:MAX_FILES])


@cache
def _included(source: Path, kernel: Path) -> Set[Path]:
    """The headers that a C++ source includes, and those that these include."""
    names = re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE)
    direct = {path.resolve() for name in names for path in (source.parent / name, kernel / name) if path.exists()}
    return direct.union(*(_included(path, kernel) for path in direct))


def _longest(table: dict[str, Any], path: str) -> Any:
    """What stands under the longest prefix of a path; None where no prefix fits."""
    return table.get(max((prefix for prefix in table if path.startswith(prefix)), key=len, default=""))


@cache
def _test_files() -> list[tuple[str, str]]:
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.parent.name != "dashboard"]
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in paths]

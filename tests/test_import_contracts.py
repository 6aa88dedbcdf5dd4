"""The import contracts bite: in a copy of the package, each forbidden import breaks one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("contracts")
    shutil.copytree(ROOT / "ddrl", folder / "ddrl", ignore=shutil.ignore_patterns("__pycache__", "kernel", "*.so"))
    shutil.copy(ROOT / ".importlinter", folder)
    return folder


# An editable install answers for `ddrl` before any folder does: the copy would never be looked at.
LINT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, "")
from importlinter.cli import lint_imports_command
lint_imports_command(["--no-cache"])
"""


def contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True)


def test_the_package_keeps_them(copy):
    done = contracts(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("replay/sources.py", "import ddrl.rollout.worker", "Stages are siblings"),
        ("channels/board.py", "import ddrl.replay", "Stages are siblings"),
        ("acting/policy_file.py", "import ddrl.rollout", "Stages are siblings"),
        ("core/roles.py", "import ddrl.channels", "Stages are siblings"),
        ("acting/policy.py", "import torch", "torch lives in the learner"),
        ("replay/sources.py", "import ddrl.run.task", "Stages are siblings"),
        ("balance/sizes.py", "import torch", "torch lives in the learner"),
        ("balance/sizes.py", "import mpi4py", "MPI is spoken by distribution"),
        ("learner/actor_critic.py", "import ddrl.admix.networks", "The core never imports a slice"),
        ("admix/mixer.py", "import ddrl.pool.policies", "Slices are independent"),
        ("telemetry/store.py", "import mpi4py", "MPI is spoken by distribution"),
    ],
)
def test_a_forbidden_import_breaks_one(copy, module, line, contract):
    path = copy / "ddrl" / module
    before = path.read_text()
    try:
        path.write_text(f"{before}\n{line}\n")
        done = contracts(copy)
    finally:
        path.write_text(before)
    assert done.returncode != 0
    assert any(contract in shown and "BROKEN" in shown for shown in done.stdout.splitlines()), done.stdout

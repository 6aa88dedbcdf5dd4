"""The kernel's own tests are C++ programs; this builds and runs them where CMake and a compiler are installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.stem for path in Path(__file__).parent.glob("test_*.cpp"))


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def build_and_run(build: Path, sanitize: str, program: str = "") -> None:
    """All programs, or one."""
    cmake, ctest = tool("cmake"), tool("ctest")
    only = (["--target", program], ["--tests-regex", f"^{program}$"]) if program else ([], [])
    configure = [cmake, "-S", str(ROOT), "-B", str(build), "-DDDRL_KERNEL_TESTS=ON", f"-DDDRL_SANITIZE={sanitize}"]
    for command in (
        configure,
        [cmake, "--build", str(build), "-j2", *only[0]],
        [ctest, "--test-dir", str(build), "--output-on-failure", "--no-tests=error", *only[1]],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


@pytest.mark.long  # CI runs them under both sanitizers by itself
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_the_kernels_own_tests_pass_under_sanitizers(tmp_path, sanitize):
    build_and_run(tmp_path, sanitize)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_passes_as_it_is(tmp_path, program):
    build_and_run(tmp_path, "", program)

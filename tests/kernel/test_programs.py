"""The kernel's own tests are C++ programs; this builds and runs them where CMake and a compiler are installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def build_and_run(build: Path, sanitize: str) -> None:
    cmake, ctest = tool("cmake"), tool("ctest")
    configure = [cmake, "-S", str(ROOT), "-B", str(build), "-DDDRL_KERNEL_TESTS=ON", f"-DDDRL_SANITIZE={sanitize}"]
    for command in (
        configure,
        [cmake, "--build", str(build), "-j2"],
        [ctest, "--test-dir", str(build), "--output-on-failure", "--no-tests=error"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


@pytest.mark.long  # CI runs them under both sanitizers by itself
@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_the_kernels_own_tests_pass_as_they_are_and_under_sanitizers(tmp_path, sanitize):
    build_and_run(tmp_path, sanitize)

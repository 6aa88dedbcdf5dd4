"""A test that leaves a process fails, and nothing of that process is left."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import PATIENCE, wait_until

LEAVES = """
import subprocess, sys
from tests.conftest import denormal_numbers, processes

CHILD = "import time; time.sleep(10**6)"
PARENT = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {CHILD!r}]).pid, flush=True); {CHILD}"

def test_leaves_two(capfd):
    for _ in range(2):
        started = subprocess.Popen([sys.executable, "-c", PARENT], stdin=-1, stdout=-1, text=True)
        child = started.stdout.readline()
        with capfd.disabled():
            print("left", started.pid, child)

def test_waits():
    with subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=-1) as started:
        started.communicate()
"""


def test_what_a_test_has_started_ends_with_it_and_the_test_fails(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={tmp_path}", "-W", "error", str(tmp_path)]
    bare = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run([*command, "-rA"], capture_output=True, text=True, timeout=PATIENCE, env=bare, cwd=tmp_path)
    said = done.stdout
    assert done.returncode == 1, said
    assert "ERROR test_leaves.py::test_leaves_two" in said
    assert "still there at the test's end: [[" in said
    assert "PASSED test_leaves.py::test_waits" in said
    assert "1 error" in said.splitlines()[-1]
    left = [int(pid) for pair in re.findall(r"left (\d+) (\d+)", said) for pid in pair]
    assert len(left) == 4, said
    wait_until(lambda: not any(map(alive, left)), "processes stay")


def alive(pid: int) -> bool:
    """Whether a process still runs: one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Runs fakegpu_cases.py in a process of its own: a device type, once registered, stays for the process's life."""

import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE

CASES = Path(__file__).with_name("fakegpu_cases.py")


def test_the_fake_device_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(CASES)],
        capture_output=True,
        text=True,
        cwd=CASES.parents[2],
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout

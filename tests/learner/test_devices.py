"""Runs device_cases.py on the fake device, and on CUDA where there is one, each in a process of its own: a device type,
once registered, stays for the process's life, and so does the order of CUDA's sums."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waiting import PATIENCE

CASES = Path(__file__).with_name("device_cases.py")
SKIPPED = {  # what the run inside may leave out, for the report outside does not hold it
    "fake": ("the fake device gives the processor's bits, which a test above asserts",),
    "cuda": ("the fake device counts, CUDA does not",),
}


@pytest.mark.parametrize("device", ["fake", "cuda"])
def test_every_algorithm_on(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("nothing was tested on CUDA: torch sees no CUDA device")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(CASES)],
        capture_output=True,
        text=True,
        cwd=CASES.parents[2],
        env=os.environ | {"DDRL_TEST_DEVICE": device, "PYTEST_ADDOPTS": "", "COLUMNS": "400"},
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "[100%]" in done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert [line for line in skipped if not line.endswith(SKIPPED[device])] == []

"""Projections and losses agree with `rlax` (`rlax_comparison`), in a process of its own: JAX starts threads, and then
warns of every fork."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("rlax") is None,
    reason="projections and losses were NOT compared with rlax: needs the extra [reference]",
)
def test_projections_and_losses_agree_with_rlax() -> None:
    comparison = Path(__file__).with_name("rlax_comparison.py")
    command = [sys.executable, "-m", "pytest", "-W", "default", str(comparison)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

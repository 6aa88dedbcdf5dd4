"""For all tests: torch computes in one thread, as a run does by default. Two threads that wait for each other on a busy
machine take many times as long. What a user trusts is remembered in a directory of the tests' own. Every child process
imports the sources beside the tests, also one that a test starts with the environment as it is."""

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.sources import environment

_state = tempfile.TemporaryDirectory(prefix="ddrl-tests-")
os.environ["XDG_STATE_HOME"] = _state.name

os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def denormal_numbers() -> Iterator[None]:
    """A test that learns in this process lets its thread take denormal numbers as zero; the next one has them again."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)

"""For all tests: torch computes in one thread, as a run does by default. Two threads that wait for each other on a busy
machine take many times as long. What a user trusts is remembered in a directory of the tests' own. Every child process
imports the sources beside the tests, also one that a test starts with the environment as it is. Every test has its own
folder for what mpirun keeps: one that was killed leaves a folder named by its process id, and a later mpirun with the
same id refuses to start."""

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


@pytest.fixture(autouse=True)
def mpirun_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short path: mpirun makes sockets there."""
    with tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", folder)
        yield

"""For all tests: torch computes in one thread, as a run does by default. Two threads that wait for each other on a busy
machine take many times as long. What a user trusts is remembered in a directory of the tests' own. Every child process
imports the sources beside the tests, also one that a test starts with the environment as it is."""

import os
import tempfile

from tests.sources import environment

_state = tempfile.TemporaryDirectory(prefix="ddrl-tests-")
os.environ["XDG_STATE_HOME"] = _state.name

os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
os.environ.setdefault("OMP_NUM_THREADS", "1")

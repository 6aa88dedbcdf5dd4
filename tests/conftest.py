"""For all tests: torch computes in one thread, as a run does by default. Two threads that wait for each other on a busy
machine take many times as long."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

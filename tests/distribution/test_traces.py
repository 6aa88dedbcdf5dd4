"""Notes of relays as a table of sends."""

import numpy as np

from benchmarks.distribution.traces import merge_traces
from ddrl.distribution.schemes import make_plan


def test_notes_of_all_hosts_become_sends_in_seconds_from_the_first():
    plan = make_plan("chain", 2, 64, chunk_bytes=64)
    root = [(1_000, "send", 0, 0, 1), (3_000, "sent", 0, 0, 1)]
    first = [
        (4_000, "received", 0, 0, 0),
        (5_000, "send", 0, 1, 2),
        (5_500, "sealed", 0, 0, 1),
        (9_000, "sent", 0, 1, 2),
    ]
    second = [(8_000, "received", 0, 1, 1)]
    table = merge_traces(plan, [root, first, second])
    np.testing.assert_allclose(table, [[0, 2e-6, 3e-6, 0, 1, 0], [4e-6, 8e-6, 7e-6, 1, 2, 1]])
    assert merge_traces(plan, [[], [], []]).shape == (0, 6)

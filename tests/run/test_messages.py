"""Barriers with names."""

import pytest

from tests.distribution.test_relays import run

pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
PROGRAM = "../run/barrier_ranks.py"


def test_nobody_passes_a_barrier_before_all_have_come():
    assert run(2, "met", program=PROGRAM) == [True, True]


def test_ranks_that_come_to_different_barriers_are_told_where_they_are():
    for rank, text in enumerate(run(2, "apart", program=PROGRAM)):
        assert text.startswith(f"rank {rank} waits at the barrier 'place {rank}': some ranks came to another one")

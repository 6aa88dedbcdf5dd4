"""The virtual cluster: three hosts stand, speak over MPI through shaped links, and leave nothing behind."""

import subprocess
import sys

import pytest

from benchmarks.distribution.cluster import rate_bytes
from tests.waiting import PATIENCE

pytest.importorskip("mpi4py", reason="needs the extra [mpi]")


def test_hosts_speak_mpi_over_the_cluster_and_down_leaves_nothing(cluster):
    limits = [cluster._neighbors(name).read_text() for name in cluster.NEIGHBORS]
    cluster.up(["50mbit"] * 3)
    try:
        code = (
            f"NETWORK = {cluster.NETWORK!r}"
            + """
import socket, subprocess
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(1)
sockets = subprocess.run(["ss", "-tiH", "dst", NETWORK], capture_output=True, text=True, check=True).stdout.splitlines()
print(socket.gethostname(), total, *{line.split()[0] for line in sockets if line[0].isspace()})
"""
        )
        done = subprocess.run(
            cluster.mpirun([sys.executable, "-c", code]),
            env=cluster.mpi_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert sorted(done.stdout.split("\n")[:-1]) == [f"{cluster.NAME}-h{host} 3 cubic" for host in range(3)], (
            done.stderr[-2000:]
        )
    finally:
        cluster.down()
    assert (
        cluster.NAME not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    )
    assert (
        cluster.NAME
        not in subprocess.run(["ip", "-o", "link", "show"], capture_output=True, text=True, check=True).stdout
    )
    assert [cluster._neighbors(name).read_text() for name in cluster.NEIGHBORS] == limits
    assert not cluster.STATE.exists()


def test_rates_read_as_tc_writes_them():
    assert rate_bytes("20mbit") == 2.5e6
    assert rate_bytes("1gbit") == 1.25e8
    with pytest.raises(ValueError, match="20mbit"):
        rate_bytes("fast")

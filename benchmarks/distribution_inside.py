"""The hand-over inside a host: a 20 MB model from the publisher to 36 rollouts, against one memcpy, MPI_Bcast to 36 ranks, and others' ways.

`python -m benchmarks.distribution_inside`; no root needed. The mailbox hands a version over in place: publishing costs one copy with its
checksum, readers map it and copy nothing. TorchRL and Ray are measured where they are installed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster import mpi_environment
from benchmarks.harness import arguments, print_table, save
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import segment_name

READER = """
import sys, time
import numpy as np
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import Segment
name, index, versions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mailbox, times = Mailbox.attach(name), Segment.attach(sys.argv[4], "times").array.view(np.int64)
reader, seen = mailbox.reader(index), -1
times[index] = 1
private = lambda: sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private"))
before = private()
while seen < versions - 1:
    mailbox.wait_newer(seen, 60)
    pin = reader.pin()
    first = int(pin.data[0]) + int(pin.data[-1])
    seen = pin.version
    times[1024 + seen * 64 + index] = time.perf_counter_ns()
times[512 + index] = private() - before
"""


def hand_over(nbytes: int, readers: int, versions: int) -> dict[str, Any]:
    """Seconds from the begin of a publish until the publisher is free, and until the last reader holds the version; private KiB a reader."""
    from ddrl.channels.segment import Segment

    name, times_name = segment_name(f"bench{os.getpid()}", 0, "mailbox"), segment_name(f"bench{os.getpid()}", 0, "times")
    mailbox = Mailbox.create(name, nbytes, 4, readers)
    segment = Segment.create(times_name, "times", 8 * (1024 + 64 * versions), lambda array: array.fill(0))
    times = segment.array.view(np.int64)
    children = [subprocess.Popen([sys.executable, "-c", READER, name, str(index), str(versions), times_name]) for index in range(readers)]
    try:
        deadline = time.monotonic() + 120
        while not times[:readers].all():
            time.sleep(0.01)
            if time.monotonic() > deadline or any(child.poll() not in (None, 0) for child in children):
                raise SystemExit("a reader did not start")
        model, copy = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8), np.zeros(nbytes, np.uint8)
        publish, last, memcpy = [], [], []
        for version in range(versions):
            begun = time.perf_counter_ns()
            np.copyto(copy, model)
            memcpy.append((time.perf_counter_ns() - begun) * 1e-9)
            begun = time.perf_counter_ns()
            mailbox.publish(model, version)
            publish.append((time.perf_counter_ns() - begun) * 1e-9)
            row = times[1024 + 64 * version : 1024 + 64 * version + readers]
            while not row.all():
                time.sleep(0.001)
            last.append((int(row.max()) - begun) * 1e-9)
        for child in children:
            child.wait(30)
        private = times[512 : 512 + readers].copy()
    finally:
        for child in children:
            child.kill()
        mailbox.unlink()
        segment.unlink()
    return {"memcpy": memcpy[1:], "publish": publish[1:], "last_reader": last[1:], "private_kib": private.tolist()}


def broadcast(nbytes: int, ranks: int, models: int) -> list[float]:
    """Seconds of MPI_Bcast between ranks of this host."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), "--oversubscribe", sys.executable, "-m",
                   "benchmarks.distribution_mpi", "bcast", str(nbytes), str(models), str(out)]
        subprocess.run(command, env={**mpi_environment(), "PYTHONPATH": str(Path(__file__).parent.parent)}, capture_output=True, timeout=600,
                       check=False)
        return json.loads(out.read_text()) if out.exists() else []


def main() -> None:
    parser = arguments("distribution_inside", __doc__ or "")
    chosen = parser.parse_args()
    nbytes, readers, versions = 20_000_000, 36, 6 if chosen.short else 30
    figures = hand_over(nbytes, readers, versions)
    memcpy = statistics.median(figures["memcpy"])
    ours, free = statistics.median(figures["last_reader"]), statistics.median(figures["publish"])
    bcast = broadcast(nbytes, readers + 1, 2 if chosen.short else 10)
    other = statistics.median(bcast) if bcast else float("nan")
    print_table(["what", "median s", "low", "high", "memcpys", "efficiency (memcpy / measured)"], [
        ["one memcpy of the model", memcpy, min(figures["memcpy"]), max(figures["memcpy"]), 1.0, 1.0],
        ["publish (the trainer's stall)", free, min(figures["publish"]), max(figures["publish"]), free / memcpy, memcpy / free],
        [f"publish to the last of {readers} readers", ours, min(figures["last_reader"]), max(figures["last_reader"]), ours / memcpy, memcpy / ours],
        [f"MPI_Bcast to {readers} ranks", other, min(bcast, default=other), max(bcast, default=other), other / memcpy, memcpy / other],
    ])
    print(f"private memory a reader gained: at most {max(figures['private_kib'])} KiB; MPI_Bcast takes {other / ours:.1f} times as long")
    save(chosen.json, {"bytes": nbytes, "readers": readers, **figures, "mpi_bcast": bcast, "memcpys_to_last_reader": ours / memcpy,
                       "times_faster_than_mpi_bcast": other / ours})


if __name__ == "__main__":
    main()

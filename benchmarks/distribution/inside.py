"""The hand-over inside a host: a 20 MB model from the publisher to 36 rollouts, against one memcpy and MPI_Bcast.

`python -m benchmarks.distribution.inside`; no root needed. The mailbox hands a version over in place: publishing costs
one copy with its checksum, readers map it and copy nothing. Each reader is a process that waits for a newer version,
pins it, and a few milliseconds later (not in the way of readers still to be woken) reads its first and last byte; its
time is when it holds the pin. The memcpy writes where a mailbox writes: shared memory, in turn to as many places as the
mailbox has slots; one into private memory (huge pages) is timed beside it. Waking has its own limit: the same hand-over
of a model of 4 KB.

Everything is timed on cores that a process of idle priority keeps awake, as rollouts keep those of a real host: it
gives way to all else, but a halted core of a virtual machine takes long to wake. What the mailbox takes on halted cores
is timed too; MPI's ranks spin, and give way.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Timing, arguments, on_ranks, print_table, ratios, save
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import Segment, segment_name

NBYTES = 20_000_000
SLOTS = 4
STARTED = 0  # places in the shared array: a reader has started, has read everything, and when it had version v
DONE = 512
TIMES = 1024
SEGMENTS = (0, 64 << 10, 1 << 20)  # [bytes] of MPI's pipelines; 0: whole
SWEEP_SECONDS = 1.0  # most for one algorithm in the sweep
READER = """
import os, sys, time
import numpy as np
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import Segment
name, index, versions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mailbox = Mailbox.attach(name)
times = Segment.attach(sys.argv[4], "times").array.view(np.int64)
reader = mailbox.reader(index)
seen = -1
os.nice(5)  # as the rollouts of a run are
times[index] = 1
while seen < versions - 1:
    pin = reader.wait_pin(seen, 60)
    held = time.perf_counter_ns()
    seen = pin.version
    times[1024 + 64 * seen + index] = held
    time.sleep(0.004)  # until all have it
    assert pin.data[0] == pin.data[-1] == seen % 256
whole = int(pin.data.view(np.uint64).sum())  # every page of the version is mapped and read
times[512 + index] = 1
mailbox.wait_newer(seen, 60)  # until the publisher has read this process's memory map
"""
SPINNER = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


@contextmanager
def awake() -> Iterator[None]:
    """Every core has something to do, of so low a priority that it gives way to all else."""
    spinners = [subprocess.Popen([sys.executable, "-c", SPINNER, str(core)]) for core in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def mapped(pid: int, name: str) -> dict[str, int]:
    """KiB of a process's mapping of segment `name` (Pss, Rss, private pages), and Pss of the whole process."""
    found = {"Pss": 0, "Rss": 0, "Private": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        field = line.split()[0]
        if not field.endswith(":"):
            inside = name in line
        elif inside and (key := field.split("_")[0].rstrip(":")) in found:
            found[key] += int(line.split()[1])
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    whole = sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return {f"mailbox_{key.lower()}_kib": value for key, value in found.items()} | {"process_pss_kib": whole}


def hand_over(nbytes: int, readers: int, versions: int) -> dict[str, Any]:
    """Seconds of a memcpy into shared and into private memory, from the start of a publish until the publisher is free,
    and until the last reader holds the version; memory of the readers."""
    run_id = f"bench{os.getpid()}"
    name = segment_name(run_id, 0, "mailbox")
    mailbox = Mailbox.create(name, nbytes, SLOTS, readers)
    segment = Segment.create(
        segment_name(run_id, 0, "times"), "times", 8 * (TIMES + 64 * (versions + 1)), lambda array: array.fill(0)
    )
    place = -(-nbytes // 4096) * 4096
    copies = Segment.create(segment_name(run_id, 0, "copies"), "copies", SLOTS * place)
    times = segment.array.view(np.int64)
    words = [sys.executable, "-c", READER, name]
    children = [subprocess.Popen([*words, str(index), str(versions), segment.name]) for index in range(readers)]

    def wait(row: np.ndarray) -> None:
        deadline = time.monotonic() + 120
        while not row.all():
            time.sleep(0.002)
            if time.monotonic() > deadline or any(child.poll() not in (None, 0) for child in children):
                raise SystemExit("a reader has failed")

    def seconds_of_copy(target: np.ndarray) -> float:
        time.sleep(0.01)  # all readers sleep; as cold as the publish
        begun = time.perf_counter_ns()
        np.copyto(target, model)
        return (time.perf_counter_ns() - begun) * 1e-9

    found: dict[str, list[Any]] = {kind: [] for kind in ("memcpy", "memcpy_private", "publish", "last_reader")}
    try:
        wait(times[STARTED : STARTED + readers])
        model = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
        shared = copies.array[: SLOTS * place].reshape(SLOTS, place)  # in turn, as the mailbox's slots
        private = [np.zeros(nbytes, np.uint8) for _ in range(SLOTS)]
        for version in range(versions):
            model[0] = model[-1] = version % 256
            found["memcpy"].append(seconds_of_copy(shared[version % SLOTS][:nbytes]))
            found["memcpy_private"].append(seconds_of_copy(private[version % SLOTS]))
            time.sleep(0.01)
            begun = time.perf_counter_ns()
            mailbox.publish(model, version)
            found["publish"].append((time.perf_counter_ns() - begun) * 1e-9)
            row = times[TIMES + 64 * version : TIMES + 64 * version + readers]
            wait(row)
            found["last_reader"].append((int(row.max()) - begun) * 1e-9)
        wait(times[DONE : DONE + readers])
        memory = [mapped(child.pid, name) for child in children]
        model[0] = model[-1] = versions % 256
        mailbox.publish(model, versions)
        for child in children:
            child.wait(30)
    finally:
        for child in children:
            child.kill()
        mailbox.unlink()
        segment.unlink()
        copies.unlink()
    # A slot's first version also maps its memory.
    return {kind: seconds[SLOTS + 1 :] for kind, seconds in found.items()} | {"memory": memory}


def broadcast(ranks: int, models: int) -> dict[str, Any]:
    """Seconds of MPI_Bcast between ranks of this host, by MPI's choice and by the best of its algorithms."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        rules = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
        on_ranks(ranks, "benchmarks.distribution.inside", "--rank", str(models), str(out), **rules)
        return json.loads(out.read_text())


def broadcast_rank(models: int, out: Path) -> None:
    """One rank of `broadcast`: every algorithm with three segment sizes takes two turns, the best of them and MPI's own
    choice then `models` turns each. Rank 0 writes algorithm, segment size [bytes] and seconds of both."""
    from mpi4py import MPI

    from benchmarks.distribution.mpi import BCAST_ALGORITHMS, measure

    comm = MPI.COMM_WORLD
    swept: dict[tuple[int, int], float] = {}
    for algorithm in BCAST_ALGORITHMS:
        for segment in SEGMENTS if algorithm else (0,):
            options = {"algorithm": algorithm, "segment": segment}
            found = measure(comm, NBYTES, "bcast", models=2, limit=SWEEP_SECONDS, **options)
            swept[algorithm, segment] = comm.bcast(min(found["periods"] or found["seconds"]))
    result: dict[str, Any] = {}
    for name, (algorithm, segment) in {"MPI's choice": (0, 0), "best": min(swept, key=swept.__getitem__)}.items():
        found = measure(comm, NBYTES, "bcast", models=models, algorithm=algorithm, segment=segment)
        if found["problems"]:
            raise SystemExit(found["problems"][0])
        result[name] = {"algorithm": BCAST_ALGORITHMS[algorithm], "segment": segment, "seconds": found["periods"]}
    if comm.rank == 0:
        out.write_text(json.dumps(result))


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        broadcast_rank(int(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = arguments("distribution_inside", __doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, help="processes that read (default: 36; 4 with --short)")
    options = parser.parse_args()
    readers = options.readers or (4 if options.short else 36)
    versions = 10 if options.short else 60
    with awake():
        ours = hand_over(NBYTES, readers, versions)
        waking = {count: hand_over(4096, count, versions)["last_reader"] for count in sorted({1, readers})}
    halted = hand_over(NBYTES, readers, versions)
    bcast = broadcast(readers + 1, 3 if options.short else 10)  # with spinners beside, MPI's ranks would give way
    memcpy = ours["memcpy"]
    median_memcpy = statistics.median(memcpy)
    timed = {
        "one memcpy of the model, shared memory": (memcpy, memcpy),
        "one memcpy, private memory": (ours["memcpy_private"], memcpy),
        "publish (the trainer's stall)": (ours["publish"], memcpy),
        f"publish to the last of {readers} readers": (ours["last_reader"], memcpy),
        "cores halted before: one memcpy": (halted["memcpy"], halted["memcpy"]),
        "cores halted before: publish": (halted["publish"], halted["memcpy"]),
        f"cores halted before: to the last of {readers}": (halted["last_reader"], halted["memcpy"]),
    }
    timed |= {f"waking alone: 4 KB to the last of {count}": (found, memcpy) for count, found in waking.items()}
    rows: list[list[Any]] = []
    for name, (seconds, copies) in timed.items():
        ratio = ratios(seconds, copies).median
        rows.append([name, Timing.of(seconds), ratio, 1 / ratio])
    for name, found in bcast.items():
        seconds = Timing.of(found["seconds"])
        kind = f"{name}: {found['algorithm']}, segment {found['segment']}"
        rows.append([f"MPI_Bcast, {kind}", seconds, seconds.median / median_memcpy, median_memcpy / seconds.median])
    print_table(["what", "seconds", "memcpys", "efficiency (memcpy / measured)"], rows)
    memory = {key: statistics.median(sample[key] for sample in ours["memory"]) for key in ours["memory"][0]}
    print("a reader's memory:", ", ".join(f"{key} {value:.0f}" for key, value in memory.items()))
    kinds = ("memcpy", "memcpy_private", "publish", "last_reader")
    figures: dict[str, Any] = {kind: Timing.of(ours[kind]) for kind in kinds}
    figures |= {f"{kind}_memcpys": ratios(ours[kind], memcpy) for kind in ("publish", "last_reader")}
    figures |= {"bytes": NBYTES, "readers": readers, "reader_memory": memory, "mpi_bcast": bcast}
    figures["waking_alone"] = {count: Timing.of(seconds) for count, seconds in waking.items()}
    figures["halted_cores"] = {kind: Timing.of(halted[kind]) for kind in kinds}
    save(options.json, figures)


if __name__ == "__main__":
    main()

"""The hand-over inside a host: a 20 MB model from the publisher to 36 rollouts, against one memcpy, MPI_Bcast to 36
ranks, and others' ways.

`python -m benchmarks.distribution.inside [--torchrl-python PYTHON] [--ray-python PYTHON]`; no root needed. The mailbox
hands a version over in place: publishing costs one copy with its checksum, readers map it and copy nothing. Each reader
is a process that waits for a newer version, pins it, and a few milliseconds later (not in the way of readers still to
be woken) looks at its first and last byte; the time that counts is when it holds the pin. The memcpy writes where a
mailbox writes: shared memory, in turn to as many places as the mailbox has slots; one into private memory (huge pages)
stands beside it. Waking has its own limit: the same hand-over of a model of 4 KB.

Everything is timed on cores that a process of idle priority keeps awake, as rollouts keep those of a real host: it
gives way to all else, but a halted core of a virtual machine takes long to come back. What the mailbox takes on halted
cores stands beside it; MPI's ranks spin, and give way. TorchRL and Ray run under interpreters that have them; each
peer's times stand beside a memcpy of its own process, taken in turn."""

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

from benchmarks.distribution.cluster import mpi_environment
from benchmarks.harness import Timing, arguments, print_table, ratios, save
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import Segment, segment_name

PEERS = Path(__file__).parents[1] / "peers"
SLOTS = 4
SEEN = 0  # places in the shared array: a reader has started, has read everything, and when it had version v
DONE = 512
TIMES = 1024
READER = """
import os, sys, time
import numpy as np
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import Segment
name, index, versions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mailbox, times = Mailbox.attach(name), Segment.attach(sys.argv[4], "times").array.view(np.int64)
reader, seen, clock = mailbox.reader(index), -1, time.perf_counter_ns
os.nice(5)  # as the rollouts of a run are
times[index] = 1
while seen < versions - 1:
    pin = reader.wait_pin(seen, 60)
    held, seen = clock(), pin.version
    times[1024 + 64 * seen + index] = held
    time.sleep(0.004)  # until all have it
    assert pin.data[0] == pin.data[-1] == seen % 256
whole = int(pin.data.view(np.uint64).sum())  # every page of the version is mapped and read
times[512 + index] = 1
mailbox.wait_newer(seen, 60)  # its memory is looked at
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
    """KiB of a process's mapping of segment `name`, and of the whole process: Pss, Rss, private pages."""
    found = {"Pss": 0, "Rss": 0, "Private": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        field = line.split()[0]
        if not field.endswith(":"):
            inside = name in line
        elif inside and (key := field.split("_")[0].rstrip(":")) in found:
            found[key] += int(line.split()[1])
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return {
        **{f"mailbox_{key.lower()}_kib": value for key, value in found.items()},
        "process_pss_kib": sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:")),
    }


def hand_over(nbytes: int, readers: int, versions: int) -> dict[str, Any]:
    """Seconds from the begin of a publish until the publisher is free, and until the last reader holds the version;
    memory of the readers."""
    name = segment_name(f"bench{os.getpid()}", 0, "mailbox")
    times_name = segment_name(f"bench{os.getpid()}", 0, "times")
    mailbox = Mailbox.create(name, nbytes, SLOTS, readers)
    segment = Segment.create(times_name, "times", 8 * (TIMES + 64 * (versions + 1)), lambda array: array.fill(0))
    copies = Segment.create(
        segment_name(f"bench{os.getpid()}", 0, "copies"), "copies", SLOTS * -(-nbytes // 4096) * 4096
    )
    times = segment.array.view(np.int64)
    children = [
        subprocess.Popen([sys.executable, "-c", READER, name, str(index), str(versions), times_name])
        for index in range(readers)
    ]

    def wait(row: np.ndarray) -> None:
        deadline = time.monotonic() + 120
        while not row.all():
            time.sleep(0.002)
            if time.monotonic() > deadline or any(child.poll() not in (None, 0) for child in children):
                raise SystemExit("a reader has failed")

    try:
        wait(times[SEEN : SEEN + readers])
        model = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
        shared = copies.array[: SLOTS * (len(copies.array) // SLOTS)].reshape(
            SLOTS, -1
        )  # in turn, like the mailbox's slots
        private = [np.zeros(nbytes, np.uint8) for _ in range(SLOTS)]
        publish = []
        last = []
        memcpy = []
        memcpy_private = []
        for version in range(versions):
            model[0] = model[-1] = version % 256
            for target, seconds in (
                (shared[version % SLOTS][:nbytes], memcpy),
                (private[version % SLOTS], memcpy_private),
            ):
                time.sleep(0.01)  # all readers sleep; as cold as the publish
                begun = time.perf_counter_ns()
                np.copyto(target, model)
                seconds.append((time.perf_counter_ns() - begun) * 1e-9)
            time.sleep(0.01)
            begun = time.perf_counter_ns()
            mailbox.publish(model, version)
            publish.append((time.perf_counter_ns() - begun) * 1e-9)
            row = times[TIMES + 64 * version : TIMES + 64 * version + readers]
            wait(row)
            last.append((int(row.max()) - begun) * 1e-9)
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
    warm = SLOTS + 1  # a slot's first version also maps its memory
    return {
        "memcpy": memcpy[warm:],
        "memcpy_private": memcpy_private[warm:],
        "publish": publish[warm:],
        "last_reader": last[warm:],
        "memory": memory,
    }


def broadcast(nbytes: int, ranks: int, models: int) -> dict[str, Any]:
    """Seconds of MPI_Bcast between ranks of this host, by MPI's choice and by the best of its algorithms."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), "--oversubscribe"]
        program = [sys.executable, "-m", "benchmarks.distribution.inside_ranks", str(nbytes), str(models), str(out)]
        variables = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
        done = subprocess.run(
            [*mpirun, *program],
            env={**mpi_environment(), **variables, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            print(f"MPI_Bcast failed ({done.returncode}):\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
            return {}
        return json.loads(out.read_text())


def peer(python: str, program: str, *numbers: int) -> dict[str, Any] | None:
    """What a peer's program prints last; None where it fails."""
    command = [python, "-W", "ignore", str(PEERS / program), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith('{"last_reader"')]
    if done.returncode or not told:
        print(f"{program} failed ({done.returncode}):\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
        return None
    return json.loads(told[-1])


def main() -> None:
    parser = arguments("distribution_inside", __doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=36)
    parser.add_argument("--torchrl-python", help="interpreter of an environment with torchrl")
    parser.add_argument("--ray-python", help="interpreter of an environment with ray")
    chosen = parser.parse_args()
    nbytes = 20_000_000
    readers = chosen.readers
    versions = 15 if chosen.short else 60
    few = 4 if chosen.short else 20
    peers = {}
    with awake():
        ours = hand_over(nbytes, readers, versions)
        waking = {count: hand_over(4096, count, versions)["last_reader"] for count in sorted({1, readers})}
        for name, python, program in (
            ("TorchRL, shared memory", chosen.torchrl_python, "torchrl_weights.py"),
            ("Ray, object store", chosen.ray_python, "ray_put.py"),
        ):
            if python and (found := peer(python, program, nbytes, readers, few)):
                peers[name] = found
    halted = hand_over(nbytes, readers, versions)
    bcast = broadcast(
        nbytes, readers + 1, 3 if chosen.short else 10
    )  # its ranks spin, and give way to whatever spins beside them
    memcpy = statistics.median(ours["memcpy"])
    last = statistics.median(ours["last_reader"])
    rows: list[list[Any]] = [
        ["one memcpy of the model, shared memory", *spread(ours["memcpy"]), 1.0, 1.0],
        [
            "one memcpy, private memory",
            *spread(ours["memcpy_private"]),
            *against(ours["memcpy_private"], ours["memcpy"]),
        ],
        ["publish (the trainer's stall)", *spread(ours["publish"]), *against(ours["publish"], ours["memcpy"])],
        [
            f"publish to the last of {readers} readers",
            *spread(ours["last_reader"]),
            *against(ours["last_reader"], ours["memcpy"]),
        ],
    ]
    rows += [
        [f"the same, cores halted before: {what}", *spread(halted[key]), *against(halted[key], halted["memcpy"])]
        for what, key in (
            ("one memcpy", "memcpy"),
            ("publish", "publish"),
            (f"to the last of {readers}", "last_reader"),
        )
    ]
    rows += [
        [f"waking alone: 4 KB to the last of {count}", *spread(seconds), *against(seconds, ours["memcpy"])]
        for count, seconds in waking.items()
    ]
    for name in ("MPI's choice", "best") if bcast else ():
        seconds = bcast[name]["seconds"]
        kind = f"{bcast[name]['algorithm']}, segment {bcast[name]['segment']}"
        median = statistics.median(seconds)
        how = "by MPI's choice" if name != "best" else f"by its best algorithm ({kind})"
        rows.append([f"MPI_Bcast to {readers} ranks, {how}", *spread(seconds), median / memcpy, memcpy / median])
    for name, found in peers.items():
        rows.append(
            [f"{name}: the sender's stall", *spread(found["publish"]), *against(found["publish"], found["memcpy"])]
        )
        rows.append(
            [
                f"{name}: to the last of {readers}",
                *spread(found["last_reader"]),
                *against(found["last_reader"], found["memcpy"]),
            ]
        )
    print_table(["what", "median s", "low", "high", "memcpys", "efficiency (memcpy / measured)"], rows)
    memory = {key: statistics.median(sample[key] for sample in ours["memory"]) for key in ours["memory"][0]}
    print(
        f"a reader: {memory['mailbox_rss_kib'] / 1024:.1f} MiB of the mailbox mapped, of these "
        f"{memory['mailbox_private_kib']:.0f} KiB private; its share {memory['mailbox_pss_kib'] / 1024:.2f} MiB; the "
        f"whole process {memory['process_pss_kib'] / 1024:.1f} MiB"
    )
    for name, found in peers.items():
        share, private = (statistics.median(found[key]) / 1024 for key in ("pss_kib", "private_kib"))
        print(f"{name}, a reader's process: {share:.1f} MiB, of these private {private:.1f} MiB")
    faster = {
        "MPI_Bcast, its best algorithm": statistics.median(bcast["best"]["seconds"]) / last if bcast else None,
        **{name: statistics.median(found["last_reader"]) / last for name, found in peers.items()},
    }
    print(
        "publish to the last reader is faster than "
        + ", ".join(f"{name} {times:.1f} times" for name, times in faster.items() if times)
    )
    on_halted: dict[str, Any] = {key: Timing.of(halted[key]) for key in ("memcpy", "publish", "last_reader")}
    on_halted["last_reader_memcpys"] = ratios(halted["last_reader"], halted["memcpy"])
    save(
        chosen.json,
        {
            "halted_cores": on_halted,
            "bytes": nbytes,
            "readers": readers,
            "memcpy": Timing.of(ours["memcpy"]),
            "memcpy_private": Timing.of(ours["memcpy_private"]),
            "waking_alone": {count: Timing.of(seconds) for count, seconds in waking.items()},
            "publish": Timing.of(ours["publish"]),
            "last_reader": Timing.of(ours["last_reader"]),
            "publish_memcpys": ratios(ours["publish"], ours["memcpy"]),
            "last_reader_memcpys": ratios(ours["last_reader"], ours["memcpy"]),
            "reader_memory": memory,
            "mpi_bcast": bcast or None,
            "peers": peers,
            "times_faster_than": faster,
        },
    )


def spread(seconds: list[float]) -> tuple[float, float, float]:
    """Median, low, high."""
    return statistics.median(seconds), min(seconds), max(seconds)


def against(seconds: list[float], memcpy: list[float]) -> tuple[float, float]:
    """In memcpys, pair by pair: median, and its inverse."""
    ratio = ratios(seconds, memcpy).median
    return ratio, 1 / ratio


if __name__ == "__main__":
    main()

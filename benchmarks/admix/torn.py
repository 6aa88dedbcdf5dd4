"""Torn batches: a reader that never rests beside a writer that never rests, on one sample area.

    python -m benchmarks.admix.torn [--short] [--reads N] [--guard generations|flag] [--json FILE]

Every number of a sample is its block's, so a sample that holds two numbers is torn. A read overlaps a write when a
block was being written at its start, or was written or begun before its end. With guard "generations" a read whose
blocks were written over is thrown away and only the others count as batches; with "flag", the source's rule, a read
begins while no block is being written, and every read is a batch. The first claim is void unless the second tears under
the same load.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from typing import Any

import numpy as np

from benchmarks.harness import arguments, known_figures, print_table, save
from ddrl.channels import SampleArea, segment_name
from ddrl.core.specs import Column

COLUMNS = (Column("head", (), "uint64"), Column("body", (32,), "uint64"), Column("tail", (), "uint64"))
BLOCK = 64
BLOCKS = 4
BATCH = 8


def write_for_ever(name: str) -> None:
    """The writer: blocks of one number each, without a pause."""
    area = SampleArea.attach(name, COLUMNS, BLOCK)
    samples = {one.name: np.zeros((BLOCK, *one.shape), one.dtype) for one in COLUMNS}
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        for array in samples.values():
            array[:] = number
        area.write(samples)


def read(guard: str, reads: int, seconds: float) -> dict[str, Any]:
    """`reads` reads, or as many as fit into `seconds`."""
    name = segment_name(f"torn{uuid.uuid4().hex[:8]}", 0, "area")
    area = SampleArea.create(name, COLUMNS, BLOCK, BLOCKS, spare=int(guard == "generations"))
    command = [sys.executable, "-m", "benchmarks.admix.torn", "--write", name]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        counts = _read(area, guard == "flag", reads, seconds)
    finally:
        writer.kill()
        writer.wait()
        area.unlink()
    print_table(list(counts), [list(counts.values())])
    return {"guard": guard, "block": BLOCK, "blocks": BLOCKS, "batch": BATCH, **counts}


def _read(area: SampleArea, flag: bool, reads: int, seconds: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    picks = rng.integers(0, BLOCK * BLOCKS, (4096, BATCH))
    full = area.slots
    done = overlapping = batches = thrown_away = torn = torn_reads = unreadable = 0
    begin = time.perf_counter()
    while done < reads:
        if not done % 4096 and time.perf_counter() - begin > seconds:
            break
        standing = area.update()
        before = area.written
        if standing < BLOCKS:
            unreadable += 1
            continue
        drawn, whole = area.draw(picks[done % 4096])
        done += 1
        overlapping += standing < full or area.written != before or area.update() < full
        mixed = drawn["head"] != drawn["tail"]
        is_torn = bool(mixed.any() or (drawn["body"] != drawn["head"][:, None]).any())
        torn_reads += is_torn
        if whole or flag:
            batches += 1
            torn += is_torn
        else:
            thrown_away += 1
    return {
        "reads": done,
        "overlapping_a_write": int(overlapping),
        "batches": batches,
        "torn_batches": torn,
        "reads_torn_and_thrown_away": torn_reads - torn,
        "reads_thrown_away": thrown_away,
        "looks_while_unreadable": unreadable,
        "blocks_written": area.written,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        write_for_ever(sys.argv[2])
    parser = arguments("admix_torn", __doc__ or "")
    parser.add_argument("--reads", type=int, default=10_000_000, help="reads with each guard (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=170.0, help="most seconds for each guard")
    parser.add_argument("--guard", choices=["generations", "flag"], action="append", help="only this")
    options = parser.parse_args()
    reads = 100_000 if options.short else options.reads
    figures = known_figures(options.json, ("generations", "flag"))
    for guard in options.guard or ["generations", "flag"]:
        figures[guard] = read(guard, reads, options.seconds)
        save(options.json, figures)


if __name__ == "__main__":
    main()

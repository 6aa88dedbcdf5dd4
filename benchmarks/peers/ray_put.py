"""Ray's object store: `PYTHON_OF_THE_PEER ray_put.py NBYTES READERS MODELS`; one JSON line of seconds.

ray.put copies the model into the store; every actor gets it as an argument, mapped without a copy, and says when it had
it."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import ray


def kib(pid: int, field: str) -> int:
    return sum(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith(field)
    )


@ray.remote(num_cpus=0.01)
class Reader:
    """A rollout's place."""

    def process(self):
        """Its process."""
        return os.getpid()

    def take(self, model):
        """Read both ends of the model; when that was."""
        _ = int(model[0]) + int(model[-1])
        return time.perf_counter_ns()


def main() -> None:
    nbytes, readers, models = map(int, sys.argv[1:])
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, logging_level="ERROR", log_to_driver=False
    )
    actors = [Reader.remote() for _ in range(readers)]
    processes = ray.get([actor.process.remote() for actor in actors])
    model = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    copy = np.zeros(nbytes, np.uint8)
    last = []
    stall = []
    memcpy = []
    for version in range(models + 2):
        begun = time.perf_counter_ns()
        np.copyto(copy, model)
        copied = time.perf_counter_ns()
        reference = ray.put(model)
        calls = [actor.take.remote(reference) for actor in actors]
        free = time.perf_counter_ns()
        ended = max(ray.get(calls))
        if version >= 2:
            memcpy.append((copied - begun) * 1e-9)
            stall.append((free - copied) * 1e-9)
            last.append((ended - copied) * 1e-9)
    pss = [kib(pid, "Pss:") for pid in processes]
    private = [kib(pid, "Private") for pid in processes]
    print(
        json.dumps({"last_reader": last, "publish": stall, "memcpy": memcpy, "pss_kib": pss, "private_kib": private}),
        flush=True,
    )
    ray.shutdown()


if __name__ == "__main__":
    main()

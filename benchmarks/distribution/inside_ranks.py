"""MPI's own broadcast between the ranks of one host, for `benchmarks.distribution.inside`: every algorithm with three
segment sizes takes two turns, the best of them and MPI's own choice then `models` turns each. Rank 0 writes the
algorithm, the segment size [bytes] and the seconds of both.

`mpirun -n RANKS python -m benchmarks.distribution.inside_ranks BYTES MODELS OUT.json`
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from mpi4py import MPI

from benchmarks.distribution.mpi import BCAST_ALGORITHMS, measure

SEGMENTS = (0, 64 << 10, 1 << 20)  # [bytes]; 0: whole
LONGEST = 1.0  # [s] of a look; what takes longer is not the best


def main() -> None:
    nbytes = int(sys.argv[1])
    models = int(sys.argv[2])
    out = Path(sys.argv[3])
    comm = MPI.COMM_WORLD
    looks: dict[tuple[int, int], float] = {}
    for algorithm in BCAST_ALGORITHMS:
        for segment in SEGMENTS if algorithm else (0,):
            options = {"algorithm": algorithm, "segment": segment}
            found = measure(comm, nbytes, "bcast", models=2, limit=LONGEST, **options)
            looks[algorithm, segment] = comm.bcast(min(found["periods"] or found["seconds"]))
    algorithm, segment = min(looks, key=looks.__getitem__)
    told = {}
    for name, (kind, size) in {"MPI's choice": (0, 0), "best": (algorithm, segment)}.items():
        found = measure(comm, nbytes, "bcast", models=models, algorithm=kind, segment=size)
        if found["problems"]:
            raise SystemExit(found["problems"][0])
        told[name] = {"algorithm": BCAST_ALGORITHMS[kind], "segment": size, "seconds": found["periods"]}
    if comm.rank == 0:
        told["looks"] = {f"{BCAST_ALGORITHMS[kind]}, {size}": seconds for (kind, size), seconds in looks.items()}
        out.write_text(json.dumps(told))
        print({name: statistics.median(told[name]["seconds"]) for name in ("MPI's choice", "best")})


if __name__ == "__main__":
    main()

"""What `benchmarks.distribution` compares with, on each host of a cluster: MPI's own broadcast and torch's.

`python -m benchmarks.distribution.mpi KIND NBYTES MODELS OUT.json`; KIND: bcast (MPI_Bcast; the algorithm by
OMPI_MCA_coll_tuned_bcast_algorithm), scatter_allgather (blocking MPI_Scatter, then MPI_Allgather), gloo
(torch.distributed.broadcast)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI


def main() -> None:
    kind, nbytes, models = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    model = (
        np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8) if rank == 0 else np.zeros(nbytes, np.uint8)
    )
    if kind == "bcast":

        def send() -> None:
            comm.Bcast(model, 0)
    elif kind == "scatter_allgather":
        part = -(-nbytes // size)
        whole, shard = np.zeros(part * size, np.uint8), np.zeros(part, np.uint8)
        whole[:nbytes] = model

        def send() -> None:
            comm.Scatter(whole if rank == 0 else None, shard, 0)
            comm.Allgather(shard, whole)
    else:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": comm.bcast(os.environ.get("DDRL_ADDRESS", "127.0.0.1")), "MASTER_PORT": "29611"}
        dist.init_process_group("gloo", rank=rank, world_size=size)
        tensor = torch.from_numpy(model)

        def send() -> None:
            dist.broadcast(tensor, 0)

    seconds = []
    for _ in range(models + 1):
        comm.Barrier()
        begun = time.perf_counter()
        send()
        comm.Barrier()
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        Path(sys.argv[4]).write_text(json.dumps(seconds[1:]))


if __name__ == "__main__":
    main()

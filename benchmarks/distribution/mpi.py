"""What `benchmarks.distribution` compares with, run by all ranks of a cluster: MPI's own broadcast by each of its
algorithms and segment sizes, blocking scatter and allgather, a pipeline in thirty lines of mpi4py, our own plans over
ZeroMQ, and torch's gloo.

A rival is {kind, ...}: bcast (algorithm and segment, MPI's numbers and bytes; both 0: MPI's choice), scatter_allgather,
pipeline (chunk), zeromq (a scheme with its parameters), gloo (piece). MPI's algorithm is changed while the job runs, by
its tool interface and a fresh communicator, so that all rivals and our own schemes take turns on the same processes and
links."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from benchmarks.distribution import cluster
from ddrl.distribution.schemes import make_plan

BCAST_ALGORITHMS = {
    0: "MPI's choice",
    1: "linear",
    2: "chain",
    3: "pipeline",
    4: "split binary",
    5: "binary",
    6: "binomial",
    7: "k-nomial",
    8: "scatter + allgather",
    9: "scatter + ring",
}
PORTS = itertools.count(29700)  # of ZeroMQ, one for each rival
AHEAD = 8  # receives posted, and sends outstanding, of the pipeline


def busy() -> tuple[float, float]:
    """Busy and total processor time of the machine so far, in ticks."""
    fields = [float(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def set_variable(name: str, value: int) -> None:
    """Set one of Open MPI's variables from here on; communicators that stand keep what they had."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "/libmpi.so" in line)
    mpi = ctypes.CDLL(library)
    given = ctypes.c_int()
    index = ctypes.c_int()
    count = ctypes.c_int()
    handle = ctypes.c_void_p()
    for call, *arguments in (
        (mpi.MPI_T_init_thread, 0, ctypes.byref(given)),
        (mpi.MPI_T_cvar_get_index, name.encode(), ctypes.byref(index)),
    ):
        if code := call(*arguments):
            raise SystemExit(f"MPI has no variable {name} ({code})")
    if mpi.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) or mpi.MPI_T_cvar_write(
        handle, ctypes.byref(ctypes.c_int(value))
    ):
        raise SystemExit(f"MPI's variable {name} cannot be set")


def bcast(comm: MPI.Comm, model: NDArray[np.uint8], algorithm: int, segment: int) -> Callable[[], None]:
    """MPI_Bcast by that algorithm and segment size [bytes; 0: whole]."""
    names = ("coll_tuned_bcast_algorithm", "coll_tuned_bcast_algorithm_segmentsize")
    for name, value in zip(names, (algorithm, segment), strict=True):
        set_variable(name, value)
    comm = comm.Split(0, comm.rank)  # a new communicator takes the variables as they are now
    for name in names:  # ranks that take no part must agree with these on every other communicator
        set_variable(name, 0)
    return lambda: comm.Bcast(model, 0)


def scatter_allgather(comm: MPI.Comm, model: NDArray[np.uint8]) -> Callable[[], None]:
    """Blocking MPI_Scatter, then MPI_Allgather."""
    part = -(-len(model) // comm.size)
    whole = np.zeros(part * comm.size, np.uint8)
    shard = np.zeros(part, np.uint8)
    whole[: len(model)] = model

    def send() -> None:
        comm.Scatter(whole if comm.rank == 0 else None, shard, 0)
        comm.Allgather(shard, whole)

    return send


def pipeline(comm: MPI.Comm, model: NDArray[np.uint8], chunk: int) -> Callable[[], None]:
    """Chunks from each rank to the next, with blocking waits."""
    rank = comm.rank
    last = comm.rank == comm.size - 1
    pieces = [model[start : start + chunk] for start in range(0, len(model), chunk)]

    def send() -> None:
        receives = deque(comm.Irecv(piece, rank - 1) for piece in pieces[:AHEAD]) if rank else deque()
        sends: deque[Any] = deque()
        for index, piece in enumerate(pieces):
            if rank:
                receives.popleft().Wait()
                if index + AHEAD < len(pieces):
                    receives.append(comm.Irecv(pieces[index + AHEAD], rank - 1))
            if not last:
                if len(sends) == AHEAD:
                    sends.popleft().Wait()
                sends.append(comm.Isend(piece, rank + 1))
        MPI.Request.Waitall(list(sends))

    return send


def zeromq(comm: MPI.Comm, model: NDArray[np.uint8], scheme: str, **parameters: int) -> Callable[[], None]:
    """One of our own plans over ZeroMQ, the source's transport: a socket to each host that a host sends to, chunks
    forwarded as they arrive. Chunks are not verified."""
    import zmq

    plan = make_plan(scheme, comm.size - 1, len(model), **parameters)
    bounds = plan.bounds.tolist()
    mine = plan.sent_by(comm.rank).tolist()
    targets: list[list[int]] = [[] for _ in range(plan.chunks)]
    for message in mine:
        targets[int(plan.first[message])].append(int(plan.target[message]))
    context = zmq.Context.instance()
    port = next(PORTS)
    pull = context.socket(zmq.PULL)
    pull.set_hwm(0)
    pull.bind(f"tcp://{cluster.address(comm.rank)}:{port}")
    comm.Barrier()
    push: dict[int, Any] = {}
    for target in {target for some in targets for target in some}:
        push[target] = context.socket(zmq.PUSH)
        push[target].set_hwm(0)
        push[target].connect(f"tcp://{cluster.address(target)}:{port}")

    def forward(chunk: int) -> None:
        for target in targets[chunk]:
            push[target].send(chunk.to_bytes(4, "little"), zmq.SNDMORE)
            push[target].send(model[bounds[chunk] : bounds[chunk + 1]], copy=False)

    def send() -> None:
        for chunk in range(plan.chunks):
            if comm.rank:
                chunk = int.from_bytes(pull.recv(), "little")
                model[bounds[chunk] : bounds[chunk + 1]] = np.frombuffer(pull.recv(copy=False).buffer, np.uint8)
            forward(chunk)

    return send


def gloo(comm: MPI.Comm, model: NDArray[np.uint8], piece: int = 0) -> Callable[[], None]:
    """torch.distributed.broadcast; `piece` [bytes]: as many broadcasts under way at once as the model has pieces."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not dist.is_initialized():
        os.environ |= {"MASTER_ADDR": comm.bcast(os.environ.get("DDRL_ADDRESS", "127.0.0.1")), "MASTER_PORT": "29611"}
        dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    pieces = torch.from_numpy(model).split(piece or len(model))

    def send() -> None:
        for work in [dist.broadcast(part, 0, async_op=True) for part in pieces]:
            work.wait()

    return send


RIVALS: dict[str, Callable[..., Callable[[], None]]] = {
    "bcast": bcast,
    "scatter_allgather": scatter_allgather,
    "pipeline": pipeline,
    "zeromq": zeromq,
    "gloo": gloo,
}


def measure(
    comm: MPI.Comm, nbytes: int, kind: str, *, models: int, limit: float = 60.0, label: str = "", **options: Any
) -> dict[str, Any]:
    """Seconds of each model but the first, from the root's first byte until all have met; at most about `limit` s. Each
    host checks the bytes of the last one."""
    source = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    model = source.copy() if comm.rank == 0 else np.zeros(nbytes, np.uint8)
    send = RIVALS[kind](comm, model, **options)
    seconds = list[float]()
    before = busy()
    used = time.process_time()
    for turn in range(models + 1):
        comm.Barrier()
        if turn == 1:
            before = busy()
            used = time.process_time()
        begun = time.perf_counter()
        send()
        comm.Barrier()
        seconds.append(time.perf_counter() - begun)
        if comm.bcast(sum(seconds) > limit and turn):
            break
    after = busy()
    used = comm.allreduce(time.process_time() - used)
    wrong = comm.allreduce(int(not np.array_equal(model, source)))
    return {
        "label": label or kind,
        "kind": kind,
        **options,
        "seconds": seconds,
        "periods": seconds[1:],
        "cpu": (after[0] - before[0]) / max(1.0, after[1] - before[1]),
        "relay_seconds": used / comm.size / max(1, len(seconds) - 1),
        "problems": [f"{wrong} hosts have other bytes"] if wrong else [],
    }

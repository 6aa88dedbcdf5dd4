"""A leader and gradient nodes as they run under mpirun, without environments: what `real` times. One JSON line.

python -m benchmarks.microbatch.real_ranks CASE; each node runs within its share of a core, by a quota of the kernel."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from benchmarks.microbatch.work import SPEC, Transitions, batch_of, config_of
from ddrl.balance import Balancer
from ddrl.core.config import Config
from ddrl.learner import Learner
from ddrl.learner.exchange import Exchange, weighted_sum
from ddrl.pool.slots import CpuController, QuotaGroup
from ddrl.run.nodes.leader import Leader
from ddrl.run.nodes.worker import serve

WORLD = MPI.COMM_WORLD
NODES = WORLD.size - 1


def enter(shares: list[float]) -> list[QuotaGroup]:
    """Put every node into a group of its share; the groups, at rank 0."""
    controller = CpuController.find()
    assert controller is not None, "quotas need the cgroup cpu controller"
    name = WORLD.bcast(f"ddrl-nodes-{os.getpid()}")
    groups = (
        [QuotaGroup(controller, f"{name}-{node}", share) for node, share in enumerate(shares)] if not WORLD.rank else []
    )
    WORLD.barrier()
    if WORLD.rank:
        QuotaGroup(controller, f"{name}-{WORLD.rank - 1}", shares[WORLD.rank - 1]).enter()
    WORLD.barrier()
    return groups


def iterate(leader: Leader, learner: Learner, batch: Transitions, sizes: NDArray[np.int64] | None) -> dict[str, Any]:
    """One update: its seconds, and every node's."""
    if sizes is not None:
        leader.parts["value"].sizes = sizes
    used = leader.parts["value"].sizes.tolist()
    begin = time.perf_counter()
    gradient = leader.gradient(batch, "value", False)
    waited = time.perf_counter() - begin
    assert gradient is not None
    learner.apply(gradient)
    nodes = [leader.nodes[node].seconds for node in leader.nodes]
    return {"seconds": time.perf_counter() - begin, "waited": waited, "sizes": used, "nodes": nodes}


def unequal(leader: Leader, learner: Learner, config: Config, groups: list[QuotaGroup], options: dict[str, Any]) -> Any:
    """Calibration by random sizes; equal and balanced blocks in turn; then another node becomes the slow one."""
    rows, draw = config.learner.batch_size, np.random.default_rng(1)
    batch = batch_of(SPEC, rows)
    trace: list[dict[str, Any]] = []

    def step(phase: str, balancer: Balancer | None, sizes: NDArray[np.int64] | None = None) -> None:
        sizes = balancer.sizes if balancer is not None else sizes
        row = iterate(leader, learner, batch, sizes)
        if balancer is not None:
            balancer.update(row["nodes"])
        trace.append({"phase": phase, **row})

    for _ in range(4):
        step("warm-up", Balancer(rows, NODES, "equal"))
    for _ in range(options["calibration"]):
        share = draw.dirichlet(np.full(NODES, 3.0) * (1.0 if draw.random() < 0.5 else np.array(options["shares"]) * 3))
        sizes = np.maximum(4, np.floor(share * (rows - 4 * NODES))).astype(np.int64)
        sizes[0] += rows - sizes.sum()
        step("calibration", None, sizes)
    equal, affine = Balancer(rows, NODES, "equal"), Balancer(rows, NODES, options.get("sizer", "affine"))
    for _ in range(8):
        step("settling", affine)
    for _ in range(options["blocks"]):
        for _ in range(options["length"]):
            step("equal", equal)
        for _ in range(options["length"]):
            step("affine", affine)
    if options["switch"]:
        quotas = [options["shares"][-1], *options["shares"][1:-1], options["shares"][0]]
        controller = CpuController.find()
        for group, share in zip(groups, quotas, strict=True):
            QuotaGroup(controller, group.path.name, share)  # the same group with another quota
        for _ in range(30):
            step("switched", affine)
    return trace


def rate(leader: Leader, learner: Learner, config: Config, groups: list[QuotaGroup], options: dict[str, Any]) -> Any:
    """Seconds an update with the sizes that the leader's own sizer gives."""
    batch = batch_of(SPEC, config.learner.batch_size)
    return [iterate(leader, learner, batch, None)["seconds"] for _ in range(options["iterations"])][5:]


def waits(leader: Leader, learner: Learner, config: Config, groups: list[QuotaGroup], options: dict[str, Any]) -> Any:
    """Seconds until the first K gradients, where each node sleeps for an exponential time."""
    batch = batch_of(SPEC, config.learner.batch_size)
    waited: list[float] = []
    for _ in range(options["iterations"]):
        waited.append(iterate(leader, learner, batch, None)["waited"])
        leader._wait(lambda: len(leader._free()) == NODES)
    return waited


def reduce(options: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of the leader's gather, weighted sum and broadcast for two nodes, and of MPI_Allreduce between the two
    alone and with the weighting, in turn."""
    values = int(options["megabytes"] * 1e6 / 4)
    mine = np.ones(values, np.float32)
    memory = [np.ones(values, np.float32) for _ in range(NODES)]
    pair = WORLD.Split(0 if WORLD.rank else 1, WORLD.rank)
    found: dict[str, list[float]] = {"leader": [], "allreduce": [], "weighted_allreduce": []}

    def leader() -> None:
        if WORLD.rank:
            WORLD.Send(mine, 0, 2)
            WORLD.Recv(mine, 0, 2)
            return
        for node in range(NODES):
            WORLD.Recv(memory[node], node + 1, 2)
        total = weighted_sum([[torch.from_numpy(vector)] for vector in memory], [0.75, 0.25])[0].numpy()
        MPI.Request.Waitall([WORLD.Isend(total, node + 1, 2) for node in range(NODES)])

    def allreduce() -> None:
        if WORLD.rank:
            pair.Allreduce(MPI.IN_PLACE, mine)

    def weighted_allreduce() -> None:
        if WORLD.rank:
            np.multiply(mine, 0.5, out=mine)
            pair.Allreduce(MPI.IN_PLACE, mine)

    for turn in range(options["iterations"]):
        for case in (leader, allreduce, weighted_allreduce):
            mine[:] = 1.0
            WORLD.Barrier()
            begin = time.perf_counter()
            case()
            seconds = WORLD.gather(time.perf_counter() - begin)
            if seconds is not None and turn >= 2:
                found[case.__name__].append(max(seconds))
    return found


CASES = {"unequal": unequal, "rate": rate, "waits": waits}


def sleeper(learner: Learner, seed: int, iterations: int, mean: float) -> None:
    """Make the algorithm sleep an exponential time before each gradient; its draws are stratified over the run."""
    strata = (np.random.default_rng(seed).permutation(iterations) + 0.5) / iterations
    seconds = iter((-mean * np.log1p(-strata)).tolist())
    evaluations = learner.algorithm.evaluations

    def wait(batch: Any, part: str) -> Any:
        time.sleep(next(seconds))
        return evaluations(batch, part)

    learner.algorithm.evaluations = wait


def main() -> None:
    torch.set_num_threads(1)
    case, options = sys.argv[1], json.loads(sys.argv[2])
    if case == "reduce":
        found = reduce(options)
        if WORLD.rank == 0:
            print(json.dumps(found), flush=True)
        return
    config = config_of(options["rows"], options["hidden"], NODES, **options.get("balance", {}))
    groups = enter(options["shares"]) if options.get("shares") else []
    try:
        if WORLD.rank:

            def make() -> Exchange:
                torch.set_flush_denormal(True)
                learner = Learner.of(config, SPEC)
                if case == "waits":
                    sleeper(learner, WORLD.rank, options["iterations"], options["mean"])
                return Exchange(learner)

            serve(WORLD, make, None, lambda: True)
        else:
            learner = Learner.of(config, SPEC)
            leader = Leader(WORLD, Exchange(learner), config)
            found = CASES[case](leader, learner, config, groups, options)
            leader.close()
            print(json.dumps(found), flush=True)
    finally:
        WORLD.barrier()
        for group in groups:
            group.remove()


if __name__ == "__main__":
    main()

"""A leader and gradient nodes as they run under mpirun, without environments: what `real` times. One JSON line.

python -m benchmarks.microbatch.real_ranks CASE; each node runs within its share of a core, by a quota of the kernel."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from benchmarks.microbatch.work import (
    SPEC,
    Transitions,
    batch_of,
    config_of,
    lessons_of,
)
from ddrl.balance import Balancer
from ddrl.balance.exchange import Exchange
from ddrl.balance.leader import Leader
from ddrl.balance.nodes import serve
from ddrl.balance.sizes import proportional_sizes
from ddrl.channels.segment import Segment
from ddrl.core.config import Config
from ddrl.learner import Learner
from ddrl.pool.devices import CpuController, QuotaGroup

FIXED = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)  # sizes of the slow node beside the filter's
WORLD = MPI.COMM_WORLD
NODES = WORLD.size - 1


def enter(shares: list[float]) -> list[QuotaGroup]:
    """Put every node into a group of its share, and the leader into one without a limit, whose weight is the same: in
    the group of all other processes it would wait for the nodes' cores. A node stays on one core: one that moves within
    a period leaves there what is left of its quota. All groups, the leader's last, at rank 0."""
    controller = CpuController.find()
    assert controller is not None, "quotas need the cgroup cpu controller"
    name = WORLD.bcast(f"ddrl-nodes-{os.getpid()}")
    groups: list[QuotaGroup] = []
    if not WORLD.rank:
        everybody = [*shares, float(os.cpu_count() or 1)]
        groups = [QuotaGroup(controller, f"{name}-{node}", share) for node, share in enumerate(everybody)]
        groups[-1].enter()
    WORLD.barrier()
    if WORLD.rank:
        QuotaGroup(controller, f"{name}-{WORLD.rank - 1}", shares[WORLD.rank - 1]).enter()
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[WORLD.rank % len(cores)]})
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
    """Calibration by random sizes; equal, balanced and fixed sizes in blocks, in turn; then another node is slow."""
    rows = config.learner.batch_size
    draw = np.random.default_rng(1)
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
    sizers = {name: Balancer(rows, NODES, name) for name in ("equal", "affine", "ddqn")}
    sizers["affine, jitter kept"] = Balancer(rows, NODES, "affine", settings={"jitter_learning": 0.0})
    for name in list(sizers)[1:]:
        for _ in range(8):
            step("settling", sizers[name])
    found = sizers["affine"].sizes
    for _ in range(options["blocks"]):
        for name, balancer in sizers.items():
            for _ in range(options["length"]):
                step(name, balancer)
        for factor in FIXED:
            for _ in range(options["length"]):
                step(f"fixed {factor}", None, with_last(found, factor))
    set_shares(groups, [options["shares"][-1], *options["shares"][1:-1], options["shares"][0]])
    for _ in range(10 if options["blocks"] == 1 else 30):
        step("switched", sizers["affine"])
    return trace


def with_last(sizes: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """These sizes with the last node's times `factor`; the others share the rest as before."""
    lower = np.ones_like(sizes)
    upper = np.full_like(sizes, sizes.sum())
    lower[-1] = upper[-1] = round(factor * int(sizes[-1]))
    return proportional_sizes(sizes.sum(), sizes.astype(float), lower, upper)


def set_shares(groups: list[QuotaGroup], shares: list[float]) -> None:
    """Give the nodes' groups, which stand, other shares: by the controller that made them, for one looked for now would
    make others below the leader's."""
    for group, share in zip(groups[:-1], shares, strict=True):
        QuotaGroup(group.controller, group.path.name, share)


def target(leader: Leader, learner: Learner, config: Config, groups: list[QuotaGroup], options: dict[str, Any]) -> Any:
    """Seconds and updates from fresh parameters and sizes to a loss of `loss`, by the leader's own sizer."""
    batches = lessons_of(SPEC, config.learner.batch_size)
    leader._wait(lambda: not leader._absent)
    begin = time.perf_counter()
    for update in range(1, options["most"] + 1):
        gradient = leader.gradient(batches[update % len(batches)], "value")
        assert gradient is not None
        learner.apply(gradient)
        loss = float(gradient.figures["loss"])
        if loss <= options["loss"]:
            break
    return {"seconds": time.perf_counter() - begin, "updates": update, "loss": loss}


CASES = {"unequal": unequal, "target": target}


def main() -> None:
    torch.set_num_threads(1)
    case = sys.argv[1]
    options = json.loads(sys.argv[2])
    config = config_of(options["rows"], options["hidden"], NODES, **options.get("balance", {}))
    groups = enter(options["shares"])
    try:
        if WORLD.rank:

            def make() -> Exchange:
                torch.set_flush_denormal(True)
                return Exchange(Learner.of(config, SPEC))

            serve(WORLD, make, None, lambda: True)
        else:
            learner = Learner.of(config, SPEC)
            made: list[Segment] = []

            def make_segment(kind: str, nbytes: int) -> Segment:
                made.append(Segment.create(f"ddrl-{os.getpid()}-h0-{kind}-0", kind, nbytes))
                return made[-1]

            leader = Leader(WORLD, Exchange(learner), config, make_segment=make_segment)
            found = CASES[case](leader, learner, config, groups, options)
            leader.close()
            for segment in made:
                segment.unlink()
            print(json.dumps(found), flush=True)
    except BaseException:  # the other ranks wait for this one
        traceback.print_exc()
        WORLD.Abort(1)
    finally:
        if not WORLD.rank:
            groups[-1].leave()  # before the last message: the kernel needs a moment until a group is empty
        WORLD.barrier()
        for group in groups:
            with contextlib.suppress(OSError):  # one that the kernel still holds: it is empty, and costs nothing
                group.remove()


if __name__ == "__main__":
    main()

"""A leader and gradient nodes as they run under mpirun, without environments: what `real` times. One JSON line.

python -m benchmarks.microbatch.real_ranks CASE; each node runs within its share of a core, by a quota of the kernel."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from benchmarks.microbatch.work import SPEC, Transitions, batch_of, config_of, exponential_times, lessons_of
from ddrl.balance import Balancer
from ddrl.balance.exchange import Exchange, weighted_mean
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
    if options["switch"]:
        set_shares(groups, [options["shares"][-1], *options["shares"][1:-1], options["shares"][0]])
        for _ in range(30):
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


def waits(leader: Leader, learner: Learner, config: Config, groups: list[QuotaGroup], options: dict[str, Any]) -> Any:
    """Seconds until the first K gradients, K from 1 to N, where each node sleeps for an exponential time: by K, then by
    update. Every other update is one without sleep."""
    batch = batch_of(SPEC, config.learner.batch_size)
    collection = leader.parts["value"].collection
    waited: list[list[float]] = []
    for first in range(1, NODES + 1):
        collection.settings = replace(collection.settings, first=first)
        seconds: list[float] = []
        for _ in range(2 * options["iterations"]):
            seconds.append(iterate(leader, learner, batch, None)["waited"])
            leader._wait(lambda: len(leader._free()) == NODES)
        waited.append(seconds[1::2])
    return waited


def reduce(options: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds from two gradients at their nodes until both nodes have what the leader made of them, in turn: as the
    leader does it where nodes map its memory (`shared`), for the first K of N or nodes of other hosts (`sent`), and by
    MPI_Allreduce of the three (`allreduce`)."""
    values = int(options["megabytes"] * 1e6 / 4)
    mine = np.ones(values, np.float32)
    token = np.zeros(1, np.uint8)
    memory = np.ones((1 + NODES, values), np.float32)
    segment = Segment.create(f"ddrl-{os.getpid()}-h0-reduce-0", "reduce", memory.nbytes) if not WORLD.rank else None
    name = WORLD.bcast(segment.name if segment else None)
    segment = segment or Segment.attach(name, "reduce")
    common = segment.array.view(np.float32).reshape(memory.shape)  # a row for each rank
    common[WORLD.rank] = 1.0
    weights = [0.75, 0.25]
    nodes = range(1, 1 + NODES)

    def receive(into: NDArray[np.float32]) -> None:
        MPI.Request.Waitall([WORLD.Irecv(into[node], node, 2) for node in nodes])

    def send(what: NDArray[Any]) -> None:
        MPI.Request.Waitall([WORLD.Isend(what, node, 2) for node in nodes])

    def mean(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return weighted_mean([[torch.from_numpy(row)] for row in rows[1:]], weights)[0].numpy()

    def hear() -> None:
        """A word of each node; the messages that go to and fro anyway are small as well."""
        for node in nodes:
            WORLD.Recv(token, node, 3)

    def shared() -> None:
        if WORLD.rank:
            WORLD.Send(token, 0, 3)
            WORLD.Recv(token, 0, 2)  # nodes read parameters where the leader steps them
            return
        hear()
        mean(common)
        for node in nodes:
            WORLD.Send(token, node, 2)

    def sent() -> None:
        if WORLD.rank:
            WORLD.Send(mine, 0, 2)
            WORLD.Recv(mine, 0, 2)
            return
        receive(memory)
        send(mean(memory))

    def allreduce() -> None:
        WORLD.Allreduce(MPI.IN_PLACE, mine)

    cases = (shared, sent, allreduce)
    found: dict[str, list[float]] = {case.__name__: [] for case in cases}
    for turn in range(options["iterations"]):
        for case in cases:
            mine[:] = 1.0
            WORLD.Barrier()
            begin = time.perf_counter()
            case()
            seconds = WORLD.gather(time.perf_counter() - begin)
            if seconds is not None and turn >= 2:
                found[case.__name__].append(max(seconds))
    WORLD.Barrier()
    if not WORLD.rank:
        segment.unlink()
    return found


CASES = {"unequal": unequal, "waits": waits, "target": target}


def sleeper(learner: Learner, times: list[float]) -> None:
    """Make the algorithm sleep before every second gradient, for the next of these times."""
    seconds = itertools.cycle([value for one in times for value in (0.0, one)])
    evaluations = learner.algorithm.evaluations

    def wait(batch: Any, part: str) -> Any:
        time.sleep(next(seconds))
        return evaluations(batch, part)

    learner.algorithm.evaluations = wait


def main() -> None:
    torch.set_num_threads(1)
    case = sys.argv[1]
    options = json.loads(sys.argv[2])
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
                    times = exponential_times(options["iterations"], NODES, options["mean"])
                    sleeper(learner, times[:, WORLD.rank - 1].tolist())
                return Exchange(learner)

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
    finally:
        if groups:
            groups[-1].leave()  # before the last message: the kernel needs a moment until a group is empty
        WORLD.barrier()
        for group in groups:
            with contextlib.suppress(OSError):  # one that the kernel still holds: it is empty, and costs nothing
                group.remove()


if __name__ == "__main__":
    main()

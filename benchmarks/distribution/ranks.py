"""What the distribution benchmarks run on each host of a cluster: relays that carry models by one plan after another,
timed at the root.

`python -m benchmarks.distribution.ranks REQUEST.json OUT.json`; one rank a host. A request holds groups, one after
another, each on the first `hosts` hosts with relays of its own; a group's cases are {scheme, parameters, models,
versions_in_flight}, and it may name a codec with the model's manifest, and a file of versions to send. The relays are
the library's own; the root publishes whenever a model may leave, and takes the times of the confirmations. Rank 0 asks
on stdout for other rates of the links (`RATES {...}`) and reads a line from stdin when they are set, and says `GROUP n`
when n groups have ended."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import ddrl.distribution.relay as relay_module
from benchmarks.distribution.mpi import measure
from benchmarks.distribution.root import Root, ask_for_rates, connect, drive, replan
from benchmarks.distribution.traces import merge_traces
from ddrl.channels.board import Board, Command, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.rows import ParameterLayout
from ddrl.distribution.membership import Membership
from ddrl.distribution.models import PaceWatch
from ddrl.distribution.relay import LocalHost, Relay, host_relay, readers_needed, root_relay, slots_needed
from ddrl.distribution.waits import wait

ROW = np.dtype([("payload", np.uint8, (64,))])


def host(
    comm: MPI.Comm, nbytes: int, versions_in_flight: int, trace: bool, codec: str, manifest: str
) -> tuple[Relay, Mailbox, Board, Membership]:
    """A relay over private memory."""
    config = ClusterConfig(scheme="auto", versions_in_flight=versions_in_flight, codec=codec)
    layout = ParameterLayout.from_json(manifest.encode()) if manifest else None
    board = Board.create(None)
    mailbox = Mailbox.create(None, nbytes, slots_needed(config), readers_needed(config))
    counters = Counters.create(None, 1)
    lanes = [Lane.create(None, ROW, 64) for _ in range(comm.size - 1)] if comm.rank == 0 else []
    mirrors = [Counters.create(None, 1) for _ in lanes]
    readers = [mailbox.reader(index, firm=True) for index in range(readers_needed(config))]
    local = LocalHost(mailbox, readers, board, counters.row(0), ROW, layout)
    membership = Membership(comm)
    whole = Config(cluster=config)
    relay = (
        host_relay(membership, whole, local, lanes=LaneSet([]), table=counters, trace=trace)
        if comm.rank
        else root_relay(membership, whole, local, lanes=lanes, mirrors=mirrors, trace=trace)
    )
    return relay, mailbox, board, membership


def meet(comm: MPI.Comm) -> None:
    """A barrier that sleeps."""
    wait([comm.Ibarrier()])


def notes(relay: Relay) -> list[Any]:
    """What the relay's last executor noted, where it was asked to."""
    return list(relay.models.executor.traffic.trace) if relay.models.executor is not None else []


def run_group(comm: MPI.Comm, group: dict[str, Any], out: Any) -> None:
    """One set of relays from start to end; rank 0 puts its findings into `out` and saves them case by case."""
    most = max(
        [case["versions_in_flight"] for case in group["cases"]] + [group.get("replan", {}).get("versions_in_flight", 1)]
    )
    relay, mailbox, board, membership = host(
        comm, group["nbytes"], most, group.get("trace", False), group.get("codec", "none"), group.get("manifest", "")
    )
    sent: list[tuple[int, float]] = []  # bytes, and seconds of the processor, by each plan
    if comm.rank:
        before = 0
        used = time.process_time()
        executor = relay.models.executor
        while not relay.finished:
            relay.step()
            if relay.models.executor is not executor or relay.finished:
                executor = relay.models.executor
                total = relay.models.totals().bytes_sent
                sent.append((total - before, time.process_time() - used))
                before = total
                used = time.process_time()
                if (
                    len(sent) > 1 and not relay.finished and executor is not None and "replan" not in group
                ):  # the root's first plan is never used
                    connect(comm, executor.plan)
        membership.leave()
        comm.gather(sent)
        comm.gather(notes(relay))
        return
    root = Root(comm, relay, mailbox, np.load(group["versions"], mmap_mode="r") if "versions" in group else None)
    save = out["save"]
    root.sender._watch = PaceWatch(math.inf)  # the case says what is used
    found: dict[str, Any] = {"links": asdict(relay.models.links), "results": []}
    out["groups"].append(found)
    while len(root.sender.ready) < relay.hosts:
        relay.step()

    def timed(case: dict[str, Any]) -> dict[str, Any]:
        figures = drive(root, case)
        found["results"].append(figures)
        save()
        if os.environ.get("DDRL_BENCHMARK_VERBOSE"):
            shown = {name: value for name, value in figures["parameters"].items() if not isinstance(value, list)}
            print(
                figures["label"],
                figures["scheme"],
                shown,
                figures["versions_in_flight"],
                f"{figures['period']:.3f} s",
                f"cpu {figures['cpu']:.2f}",
                [round(value, 3) for value in figures["seconds"]][:6],
                figures["problems"],
                flush=True,
            )
        return figures

    for _ in range(group.get("rounds", 1)):
        for case in group["cases"]:
            timed(case)
    if "duel" in group:  # the first case against the best of the others, in turn
        best = min(found["results"][1:], key=lambda result: result["period"])
        rival = {
            **{name: best[name] for name in ("scheme", "parameters", "versions_in_flight", "label", "warm")},
            "limit": best["limit"],
        }
        for _ in range(group["duel"]["rounds"]):
            for case in (group["cases"][0], rival):
                timed({**case, "models": group["duel"]["models"]})
    if "replan" in group:
        found["replan"] = replan(root, group["replan"])
    board.command = Command.STOP
    relay.run()
    membership.leave()
    everyone = comm.gather(sent)
    for index, figures in enumerate(
        found["results"]
    ):  # noted when a plan took over: before the first, of the first, of each case
        counted = [sent[index + 2] for sent in everyone[1:] if len(sent) > index + 2]
        figures["relay_bytes"] = [nbytes / len(figures["seconds"]) for nbytes, _ in counted]
        figures["relay_seconds"] = float(np.mean([seconds for _, seconds in counted] or [math.nan]))
        figures["relay_seconds"] /= len(figures["seconds"])
    traces = comm.gather(notes(relay))
    if any(traces):
        plan = root.sender.executor.plan
        merged = merge_traces(plan, traces)
        last = merged[
            merged[:, 5] >= plan.messages * (len(found["results"][-1]["seconds"]) - 1)
        ]  # the first models open connections
        last[:, :3] -= last[:, 0].min()
        found["trace"] = np.round(last, 6).tolist()
    save()


def run_rivals(comm: MPI.Comm, group: dict[str, Any], out: Any) -> None:
    """What is compared with, one after another on the same processes: a group's `rivals` are arguments of
    `mpi.measure`."""
    found: dict[str, Any] = {"results": []}
    out["groups"].append(found)
    for rival in group["rivals"]:
        figures = measure(comm, group["nbytes"], **rival)
        found["results"].append(figures)
        if comm.rank == 0:
            out["save"]()
            shown = [round(second, 3) for second in figures["seconds"]]
            print(figures["label"], f"cpu {figures['cpu']:.2f}", shown[:6], figures["problems"], flush=True)


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whenever the run is ended."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    for name, value in request.get("tune", {}).items():
        setattr(relay_module, name, value)
    world = MPI.COMM_WORLD
    out: dict[str, Any] = {"groups": []}
    out["save"] = lambda: write_whole(Path(sys.argv[2]), json.dumps({"groups": out["groups"]}))
    for group in request["groups"]:
        hosts = group.get("hosts", world.size - 1)
        if world.rank == 0 and "rates" in group:
            ask_for_rates(group["rates"])
        if world.rank == 0 and "sending_rates" in group:
            ask_for_rates(group["sending_rates"], up_only=True)
        meet(world)
        comm = world.Split(int(world.rank > hosts), world.rank)
        if world.rank <= hosts:
            (run_rivals if "rivals" in group else run_group)(comm, group, out)
        if world.rank == 0:
            print(f"GROUP {len(out['groups'])}", flush=True)
        meet(world)
        comm.Free()


if __name__ == "__main__":
    main()

"""What `benchmarks.distribution` runs on each host of a cluster: relays that carry models by one plan after another, timed at the root.

`python -m benchmarks.distribution_ranks CASES.json OUT.json`; one rank a host. A case: {scheme, parameters, models, versions_in_flight}. The
relays are the library's own; the root publishes whenever a model may leave, and takes the times of the confirmations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import ddrl.distribution.relay as relay_module
from ddrl.channels.board import Board, Command
from ddrl.channels.counters import Counters
from ddrl.channels.lane import Lane
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import ClusterConfig
from ddrl.distribution.planner import Choice, choose_best
from ddrl.distribution.relay import Relay, readers_needed

ROW = np.dtype([("payload", np.uint8, (64,))])


def host(nbytes: int, versions_in_flight: int, trace: bool = False) -> tuple[Relay, Mailbox, Board, Counters]:
    """A relay over private memory."""
    config = ClusterConfig(scheme="auto", versions_in_flight=versions_in_flight)
    board, comm = Board.create(None), MPI.COMM_WORLD
    mailbox = Mailbox.create(None, nbytes, 2 * versions_in_flight + 4, readers_needed(config))
    counters = Counters.create(None, 1)
    lanes = [Lane.create(None, ROW, 64) for _ in range(comm.size - 1)] if comm.rank == 0 else []
    relay = Relay(comm, mailbox, board, config, counters.row(0), row_dtype=ROW, lanes_down=lanes, trace=trace,
                  readers=[mailbox.reader(index, firm=True) for index in range(readers_needed(config))])
    return relay, mailbox, board, counters


def busy() -> tuple[float, float]:
    """Busy and total processor time of the machine so far, in ticks."""
    fields = [float(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def drive(relay: Relay, mailbox: Mailbox, case: dict[str, Any], version: int, vector: np.ndarray) -> tuple[dict[str, Any], int]:
    """Send a case's models from the root; its figures, and the next free version."""
    sender = relay.sender
    assert sender is not None
    while not sender.settled:
        relay.step()
    begun = time.perf_counter()
    choice = Choice(case["scheme"], case["parameters"])
    if case["scheme"] == "auto":
        choice = choose_best(sender.links.network(), mailbox.nbytes, case["versions_in_flight"], budget_seconds=5.0, **case["parameters"])
    sender.plan_with(choice, case["versions_in_flight"])
    executor, hosts = sender.executor, relay.hosts
    while len(sender.ready) < hosts:
        relay.step()
    planned = time.perf_counter() - begun
    sender.confirms.clear()
    started, ended, left = [], [], {}
    models, sent_before = case["models"], executor.traffic.bytes_sent
    busy_before = busy()
    limit = time.perf_counter() + case.get("limit", 60.0)
    deadline = False
    while len(ended) < models and not deadline:
        if len(started) < models and len(started) - len(ended) < case["versions_in_flight"] and mailbox.newest < version:
            vector[:8].view(np.int64)[0] = version
            mailbox.publish(vector, version)
        before = executor.next_sequence
        relay.step()
        if executor.next_sequence > before:
            started.append(time.perf_counter())
            left[executor.next_sequence - 1] = hosts
            version += 1
        now = time.perf_counter()
        for _, confirm in sender.confirms:
            left[confirm.sequence] -= 1
            if not left[confirm.sequence]:
                ended.append(now)
        sender.confirms.clear()
        deadline = now > limit and len(started) == len(ended)
        models = min(models, len(started)) if now > limit else models
    busy_after = busy()
    closed = case["versions_in_flight"] == 1
    seconds = [end - start for start, end in zip(started, ended, strict=True)]
    warm = min(case.get("warm", 1), len(ended) - 1)
    figures = {**case, "scheme": choice.scheme, "parameters": choice.parameters, "expected": choice.seconds, "seconds": seconds,
               "planned": planned, "root_bytes": (executor.traffic.bytes_sent - sent_before) / len(ended),
               "cpu": (busy_after[0] - busy_before[0]) / max(1.0, busy_after[1] - busy_before[1]), "problems": list(sender.problems)[-3:]}
    figures["period"] = float(np.median(seconds[warm:])) if closed else (ended[-1] - ended[warm - 1]) / (len(ended) - warm) if warm else seconds[0]
    return figures, version


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    for name, value in request.get("tune", {}).items():
        setattr(relay_module, name, value)
    comm = MPI.COMM_WORLD
    most = max(case["versions_in_flight"] for case in request["cases"])
    relay, mailbox, board, _ = host(request["nbytes"], most)
    if comm.rank:
        relay.run()
        return
    vector, version, results = np.random.default_rng(1).integers(0, 256, request["nbytes"], dtype=np.uint8), 0, []
    for case in request["cases"]:
        figures, version = drive(relay, mailbox, case, version, vector)
        results.append(figures)
        Path(sys.argv[2]).write_text(json.dumps({"links": asdict(relay.models.links), "results": results}))
        if os.environ.get("DDRL_BENCHMARK_VERBOSE"):
            shown = {name: value for name, value in figures["parameters"].items() if not isinstance(value, list)}
            print(figures["label"], figures["scheme"], shown, figures["versions_in_flight"], f"{figures['period']:.3f} s",
                  f"cpu {figures['cpu']:.2f}", [round(value, 3) for value in figures["seconds"]][:6], figures["problems"], flush=True)
    board.command = Command.STOP
    relay.run()


if __name__ == "__main__":
    main()

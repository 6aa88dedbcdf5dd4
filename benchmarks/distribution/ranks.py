"""What `benchmarks.distribution` runs on each host of a cluster: models carried by one plan after another, and the
broadcasts that they are compared with.

`python -m benchmarks.distribution.ranks REQUEST.json OUT.json`; one rank a host. A request is a list of groups, one
after another. A group has either `rivals` (arguments of `mpi.measure`) or `cases`
{scheme, parameters, models, versions_in_flight}, which the library's own relays carry.
The root publishes whenever a model may leave, and takes the times of the hosts' confirmations.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.distribution.mpi import busy, measure
from ddrl.channels.board import Board, Command, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.files import write_atomically
from ddrl.distribution.membership import Membership
from ddrl.distribution.models import PaceWatch
from ddrl.distribution.plan import Plan
from ddrl.distribution.relay import LocalHost, Relay, host_relay, readers_needed, root_relay, slots_needed
from ddrl.distribution.requests import wait
from ddrl.distribution.schemes import Choice, Situation, choose_best

ROW = np.dtype([("payload", np.uint8, (64,))])
CONNECT_TAG = 99
PLANNING_SECONDS = 5.0  # that auto may simulate


class Host:
    """A relay over private memory, with what it needs."""

    def __init__(self, comm: MPI.Comm, group: dict[str, Any]) -> None:
        most = max(case["versions_in_flight"] for case in group["cases"])
        config = ClusterConfig(scheme="auto", versions_in_flight=most)
        count = readers_needed(config)
        self.comm = comm
        self.board = Board.create(None)
        self.mailbox = Mailbox.create(None, group["nbytes"], slots_needed(config), count)
        self.membership = Membership(comm)
        counters = Counters.create(None, 1)
        readers = [self.mailbox.reader(index, firm=True) for index in range(count)]
        local = LocalHost(self.mailbox, readers, self.board, counters.row(0), ROW)
        whole = Config(cluster=config)
        if comm.rank:
            self.relay = host_relay(self.membership, whole, local, lanes=LaneSet([]), table=counters)
        else:
            lanes = [Lane.create(None, ROW, 64) for _ in range(comm.size - 1)]
            mirrors = [Counters.create(None, 1) for _ in lanes]
            self.relay = root_relay(self.membership, whole, local, lanes=lanes, mirrors=mirrors)


def connect(comm: MPI.Comm, plan: Plan) -> None:
    """Open the connections that a plan needs, each by an empty message, while the links are idle: no model should wait
    for handshakes."""
    nothing = np.zeros(1, np.uint8)
    sources = np.unique(plan.source[plan.target == comm.rank])
    targets = np.unique(plan.target[plan.source == comm.rank])
    requests = [comm.Irecv(nothing, int(source), CONNECT_TAG) for source in sources]
    requests += [comm.Isend(np.zeros(1, np.uint8), int(target), CONNECT_TAG) for target in targets]
    wait(requests)


def forward(host: Host) -> list[tuple[int, float]]:
    """Run another host's relay to its end; bytes sent and processor seconds used, by plan."""
    relay = host.relay
    executor = relay.models.executor
    sent: list[tuple[int, float]] = []
    before = 0
    used = time.process_time()
    while not relay.finished:
        relay.step()
        if relay.models.executor is executor and not relay.finished:
            continue
        executor = relay.models.executor
        total = relay.models.totals().bytes_sent
        sent.append((total - before, time.process_time() - used))
        before = total
        used = time.process_time()
        if len(sent) > 1 and not relay.finished and executor is not None:  # the root's first plan is never used
            connect(host.comm, executor.plan)
    return sent


class Root:
    """Drives the root's relay: publishes versions one after another, and notes when each began and ended."""

    def __init__(self, host: Host) -> None:
        self.comm = host.comm
        self.relay: Relay = host.relay
        self.sender: Any = host.relay.models
        self.sender._watch = PaceWatch(math.inf)  # plans change with the cases alone
        self.mailbox = host.mailbox
        self.version = 0
        self.vector = np.random.default_rng(1).integers(0, 256, self.mailbox.nbytes, dtype=np.uint8)
        self.started: list[float] = []
        self.ended: list[float] = []
        self._unconfirmed: dict[int, int] = {}  # hosts, by version
        self._choices: dict[str, Choice] = {}  # of auto, by case: the links of a group are measured once

    def wait_until_ready(self) -> None:
        """Until every host has the plan in force."""
        while len(self.sender.ready) < self.relay.hosts:
            self.relay.step()

    def plan(self, case: dict[str, Any]) -> Choice:
        """Put the case's plan into force on all hosts."""
        while not self.sender.settled:
            self.relay.step()
        parameters = case["parameters"]
        in_flight = case["versions_in_flight"]
        choice = Choice(case["scheme"], parameters)
        if case["scheme"] == "auto":
            key = f"{in_flight} {parameters}"
            if key not in self._choices:
                situation = Situation(self.sender.links.network(), self.mailbox.nbytes, in_flight, **parameters)
                self._choices[key] = choose_best(situation, budget_seconds=PLANNING_SECONDS)
            choice = self._choices[key]
        self.sender.plan_with(choice, in_flight)
        self.wait_until_ready()
        connect(self.comm, self.sender.executor.plan)
        self.sender.confirms.clear()
        return choice

    def step(self, may_publish: bool) -> None:
        """Publish if the newest version has left, move the relay, and note what has left and what all hosts have."""
        if may_publish and self.mailbox.newest < self.version:
            self.vector[:8].view(np.int64)[0] = self.version
            self.mailbox.publish(self.vector, self.version)
        sent = self.sender.sent_version
        begun = time.perf_counter()
        self.relay.step()
        if self.sender.sent_version > sent:
            self.started.append(begun)
            self._unconfirmed[self.sender.sent_version] = self.relay.hosts
            self.version += 1
        now = time.perf_counter()
        for _, confirm in self.sender.confirms:
            if confirm.version in self._unconfirmed:
                self._unconfirmed[confirm.version] -= 1
                if not self._unconfirmed[confirm.version]:
                    self.ended.append(now)
        self.sender.confirms.clear()

    def drive(self, case: dict[str, Any]) -> dict[str, Any]:
        """Send a case's models; its figures."""
        choice = self.plan(case)
        executor = self.sender.executor
        # Each slot of the mailbox is used once before the clock starts: its pages and MPI's datatypes of its chunks
        # are made at the first use, which a long run meets in its first versions alone.
        self.carry(self.mailbox.slots, case)
        before = len(self.ended)
        sent_before = executor.traffic.bytes_sent
        busy_before = busy()
        self.carry(case["models"], case)
        busy_after = busy()
        seconds = [end - start for start, end in zip(self.started, self.ended, strict=True)]
        return {
            **case,
            "scheme": choice.scheme,
            "parameters": choice.parameters,
            "expected": choice.seconds,
            "seconds": seconds,
            "carried": before + len(seconds),
            "periods": self.periods(seconds, case["versions_in_flight"]),
            "root_bytes": (executor.traffic.bytes_sent - sent_before) / len(self.ended),
            "cpu": (busy_after[0] - busy_before[0]) / max(1.0, busy_after[1] - busy_before[1]),
            "problems": list(self.sender.problems)[-3:],
        }

    def carry(self, models: int, case: dict[str, Any]) -> None:
        """Send so many models of a case; at its limit of time what has begun still ends."""
        self.started = []
        self.ended = []
        limit = time.perf_counter() + case["limit"]
        while len(self.ended) < models:
            self.step(len(self.started) < min(models, len(self.ended) + case["versions_in_flight"]))
            if time.perf_counter() > limit:
                models = len(self.started)

    def periods(self, seconds: list[float], in_flight: int) -> list[float]:
        """Seconds a model in the steady state: the first models find idle links, the last ones have them alone."""
        if in_flight == 1:
            return seconds
        first = in_flight - 1
        last = len(seconds) - in_flight
        if last > first:
            return [(self.ended[last] - self.ended[first]) / (last - first)]
        return [(self.ended[-1] - self.started[0]) / len(seconds)]


def run_cases(comm: MPI.Comm, group: dict[str, Any], found: dict[str, Any], save: Any) -> None:
    """A group of cases from the start of its relays to their end; rank 0 saves after each case."""
    host = Host(comm, group)
    if comm.rank:
        sent = forward(host)
        host.membership.leave()
        comm.gather(sent)
        return
    root = Root(host)
    root.wait_until_ready()
    found["links"] = asdict(host.relay.models.links)
    for case in group["cases"]:
        figures = root.drive(case)
        found["results"].append(figures)
        save()
        report(figures)
    host.board.command = Command.STOP
    host.relay.run()
    host.membership.leave()
    everyone = comm.gather([])
    for index, figures in enumerate(found["results"]):
        # A relay notes what it sent when a plan takes over: before the first plan, of the root's first, of each case.
        counted = [sent[index + 2] for sent in everyone[1:] if len(sent) > index + 2]
        models = figures["carried"]
        figures["relay_bytes"] = [nbytes / models for nbytes, _ in counted]
        figures["relay_seconds"] = float(np.mean([used for _, used in counted] or [math.nan])) / models
    save()


def run_rivals(comm: MPI.Comm, group: dict[str, Any], found: dict[str, Any], save: Any) -> None:
    """A group of rivals, one after another on the same processes."""
    for rival in group["rivals"]:
        figures = measure(comm, group["nbytes"], **rival)
        found["results"].append(figures)
        if comm.rank == 0:
            save()
            report(figures)


def report(figures: dict[str, Any]) -> None:
    """One line of what was just timed."""
    seconds = [round(second, 3) for second in figures["seconds"][:6]]
    print(figures["label"], f"cpu {figures['cpu']:.2f}", seconds, *figures["problems"], flush=True)


def main() -> None:
    groups = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    world = MPI.COMM_WORLD
    done: list[dict[str, Any]] = []

    def save() -> None:
        write_atomically(out, json.dumps(done).encode())

    for group in groups:
        done.append({"results": []})
        (run_rivals if "rivals" in group else run_cases)(world, group, done[-1], save)
        wait([world.Ibarrier()])


if __name__ == "__main__":
    main()

"""What the distribution benchmarks run on each host of a cluster: relays that carry models by one plan after another,
timed at the root.

`python -m benchmarks.distribution_ranks REQUEST.json OUT.json`; one rank a host. A request holds groups, one after
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
from numpy.typing import NDArray

import ddrl.distribution.relay.core as relay_module
from ddrl.channels.board import Board, Command
from ddrl.channels.counters import Counters
from ddrl.channels.lane import Lane
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.layouts import ParameterLayout
from ddrl.distribution.plans.plan import Plan
from ddrl.distribution.plans.planner import choose_best
from ddrl.distribution.plans.scheme import Choice, Situation
from ddrl.distribution.relay import HostRelay, LocalHost, Membership, RootRelay, readers_needed, slots_needed
from ddrl.distribution.transport.links import PaceWatch
from ddrl.distribution.transport.traces import merge_traces

CONNECT_TAG = 99
ROW = np.dtype([("payload", np.uint8, (64,))])


def host(
    comm: MPI.Comm, nbytes: int, versions_in_flight: int, trace: bool, codec: str, manifest: str
) -> tuple[RootRelay | HostRelay, Mailbox, Board, Membership]:
    """A relay over private memory."""
    config = ClusterConfig(scheme="auto", versions_in_flight=versions_in_flight, codec=codec)
    layout = ParameterLayout.from_json(manifest.encode()) if manifest else None
    board = Board.create(None)
    mailbox = Mailbox.create(None, nbytes, slots_needed(config), readers_needed(config))
    counters = Counters.create(None, 1)
    lanes = [Lane.create(None, ROW, 64) for _ in range(comm.size - 1)] if comm.rank == 0 else []
    readers = [mailbox.reader(index, firm=True) for index in range(readers_needed(config))]
    local = LocalHost(mailbox, readers, board, counters.row(0), ROW, layout)
    membership, whole = Membership(comm), Config(cluster=config)
    relay = (
        HostRelay(membership, whole, local, trace=trace)
        if comm.rank
        else RootRelay(membership, whole, local, lanes=lanes, trace=trace)
    )
    return relay, mailbox, board, membership


def busy() -> tuple[float, float]:
    """Busy and total processor time of the machine so far, in ticks."""
    fields = [float(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def ask_for_rates(rates: dict[str, str], *, up_only: bool = False) -> None:
    """Have the links of some hosts shaped anew, {host: rate}; returns when that is done."""
    print("RATES " + json.dumps({"rates": rates, "up_only": up_only}), flush=True)
    sys.stdin.readline()


def meet(comm: MPI.Comm) -> None:
    """A barrier that sleeps."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def connect(comm: MPI.Comm, plan: Plan) -> None:
    """Open the connections that a plan needs, each by an empty message, while the links are idle: a model should not
    wait for handshakes."""
    nothing = np.zeros(1, np.uint8)
    sources, targets = (
        np.unique(plan.source[plan.target == comm.rank]),
        np.unique(plan.target[plan.source == comm.rank]),
    )
    requests = [comm.Irecv(nothing, int(source), CONNECT_TAG) for source in sources]
    requests += [comm.Isend(np.zeros(1, np.uint8), int(target), CONNECT_TAG) for target in targets]
    while not MPI.Request.Testall(requests):
        time.sleep(0.02)


class Root:
    """Drives the root's relay: publishes versions one after another, and notes when each began and ended."""

    def __init__(
        self, comm: MPI.Comm, relay: RootRelay, mailbox: Mailbox, versions: NDArray[np.uint8] | None = None
    ) -> None:
        self.comm, self.relay, self.mailbox, self.version = comm, relay, mailbox, 0
        self.vector = np.random.default_rng(1).integers(0, 256, mailbox.nbytes, dtype=np.uint8)
        self.started: list[float] = []
        self.ended: list[float] = []
        self.sent: list[int] = []  # bytes that the root had sent when a model ended
        self._versions, self._first = (
            versions,
            0,
        )  # models to send in place of random bytes [N, nbytes], each case from the first on
        self._left: dict[int, int] = {}
        self._choices: dict[
            str, Choice
        ] = {}  # what auto chose, by case: one choice a group, for its links are measured once

    @property
    def sender(self) -> Any:
        """The relay's end that sends."""
        return self.relay.sender

    def plan(self, case: dict[str, Any]) -> tuple[Choice, float]:
        """Let the case's plan stand everywhere; it, and the seconds that this took."""
        while not self.sender.settled:
            self.relay.step()
        begun = time.perf_counter()
        choice = Choice(case["scheme"], case["parameters"])
        if case["scheme"] == "auto":
            asked = f"{case['versions_in_flight']} {case['parameters']}"
            if asked not in self._choices:
                self._choices[asked] = choose_best(
                    Situation(
                        self.sender.links.network(),
                        self.mailbox.nbytes,
                        case["versions_in_flight"],
                        **case["parameters"],
                    ),
                    budget_seconds=5.0,
                )
            choice = self._choices[asked]
        self.sender.plan_with(choice, case["versions_in_flight"])
        while len(self.sender.ready) < self.relay.hosts:
            self.relay.step()
        if case.get("connect", True):
            connect(self.comm, self.sender.executor.plan)
        self.sender.confirms.clear()
        self.started, self.ended, self.sent, self._left, self._first = [], [], [], {}, self.version
        return choice, time.perf_counter() - begun

    def step(self, may_publish: bool) -> None:
        """One look: publish if nothing newer stands ready, and see what has left and what has ended everywhere."""
        if may_publish and self.mailbox.newest < self.version:
            self.vector[:8].view(np.int64)[0] = self.version
            vector = self.vector if self._versions is None else self._versions[self.version - self._first]
            self.mailbox.publish(vector, self.version)
        sent = self.sender.sent_version
        self.relay.step()
        if self.sender.sent_version > sent:
            self.started.append(time.perf_counter())
            self._left[self.sender.sent_version] = self.relay.hosts
            self.version += 1
        now = time.perf_counter()
        for _, confirm in self.sender.confirms:
            self._left[confirm.version] -= 1
            if not self._left[confirm.version]:
                self.ended.append(now)
                self.sent.append(self.sender.executor.traffic.bytes_sent)
        self.sender.confirms.clear()


def drive(root: Root, case: dict[str, Any]) -> dict[str, Any]:
    """Send a case's models; its figures."""
    choice, planned = root.plan(case)
    executor, models, in_flight = root.sender.executor, case["models"], case["versions_in_flight"]
    sent_before, busy_before = executor.traffic.bytes_sent, busy()
    limit = time.perf_counter() + case.get("limit", 60.0)
    while len(root.ended) < models:
        root.step(len(root.started) < models and len(root.started) - len(root.ended) < in_flight)
        if time.perf_counter() > limit:  # what has begun still ends
            models = len(root.started)
    busy_after = busy()
    seconds = [end - start for start, end in zip(root.started, root.ended, strict=True)]
    figures = {
        **case,
        "scheme": choice.scheme,
        "parameters": choice.parameters,
        "expected": choice.seconds,
        "seconds": seconds,
        "planned": planned,
        "root_bytes": (executor.traffic.bytes_sent - sent_before) / len(root.ended),
        "cpu": (busy_after[0] - busy_before[0]) / max(1.0, busy_after[1] - busy_before[1]),
        "problems": list(root.sender.problems)[-3:],
    }
    figures["sent_at_ends"] = [sent - sent_before for sent in root.sent]
    # In the steady state: the first models find idle links, the last ones have them to themselves.
    first, last = max(case.get("warm", 1), in_flight) - 1, len(seconds) - in_flight
    if in_flight == 1:
        figures["periods"] = seconds[min(case.get("warm", 1), len(seconds) - 1) :]
    elif last > first:
        figures["periods"] = [(root.ended[last] - root.ended[first]) / (last - first)]
    else:
        figures["periods"] = [(root.ended[-1] - root.started[0]) / len(seconds)]
    figures["period"] = float(np.median(figures["periods"]))
    return figures


def replan(root: Root, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Stream by what auto chooses while one host's way up becomes slow; every model with its end and the plan in force.

    The relay notices by itself: nothing here asks it to measure.
    """
    root.plan(
        {"scheme": "auto", "parameters": {}, "versions_in_flight": request["versions_in_flight"], "connect": False}
    )
    root.sender._watch = PaceWatch(request["rest"])
    begun, changed, seen, log = time.perf_counter(), False, 0, list[dict[str, Any]]()
    while (now := time.perf_counter() - begun) < request["seconds"]:
        root.step(len(root.started) - len(root.ended) < request["versions_in_flight"])
        for end in root.ended[seen:]:
            choice = root.sender.choice
            log.append(
                {
                    "at": end - begun,
                    "plan": root.sender._epoch,
                    "scheme": choice.scheme,
                    "parameters": choice.parameters,
                    "changed": changed,
                }
            )
        seen = len(root.ended)
        if not changed and now > request["change_at"]:
            ask_for_rates(request["rates"], up_only=True)
            changed = True
    while len(root.ended) < len(root.started):
        root.step(False)
    return log


def notes(relay: RootRelay | HostRelay) -> list[Any]:
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
    sent: list[int] = []
    if comm.rank:
        before = 0
        executor = relay.models.executor
        while not relay.finished:
            relay.step()
            if relay.models.executor is not executor or relay.finished:
                executor, total = relay.models.executor, relay.models.totals().bytes_sent
                sent.append(total - before)
                before = total
                if (
                    len(sent) > 1 and not relay.finished and executor is not None and "replan" not in group
                ):  # the root's first plan is never used
                    connect(comm, executor.plan)
        membership.leave()
        comm.gather(sent)
        comm.gather(notes(relay))
        return
    assert isinstance(relay, RootRelay)
    root, save = (
        Root(comm, relay, mailbox, np.load(group["versions"], mmap_mode="r") if "versions" in group else None),
        out["save"],
    )
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
        figures["relay_bytes"] = [
            sent[index + 2] / len(figures["seconds"]) for sent in everyone[1:] if len(sent) > index + 2
        ]
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
        meet(world)
        comm = world.Split(int(world.rank > hosts), world.rank)
        if world.rank <= hosts:
            run_group(comm, group, out)
        if world.rank == 0:
            print(f"GROUP {len(out['groups'])}", flush=True)
        meet(world)
        comm.Free()


if __name__ == "__main__":
    main()

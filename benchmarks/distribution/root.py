"""The root's side of the distribution benchmarks: it publishes models one after another, and times each from its first
byte to the last host's confirmation.

`drive` sends the models of one case, `replan` streams while a link changes. Used by `ranks` on rank 0."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ddrl.channels.mailbox import Mailbox
from ddrl.distribution.models import PaceWatch
from ddrl.distribution.plan import Plan
from ddrl.distribution.relay import Relay
from ddrl.distribution.schemes import Choice, Situation, choose_best
from ddrl.distribution.waits import wait

CONNECT_TAG = 99


def busy() -> tuple[float, float]:
    """Busy and total processor time of the machine so far, in ticks."""
    fields = [float(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def ask_for_rates(rates: dict[str, str], *, up_only: bool = False) -> None:
    """Have the links of some hosts shaped anew, {host: rate}; returns when that is done."""
    print("RATES " + json.dumps({"rates": rates, "up_only": up_only}), flush=True)
    sys.stdin.readline()


def connect(comm: MPI.Comm, plan: Plan) -> None:
    """Open the connections that a plan needs, each by an empty message, while the links are idle: a model should not
    wait for handshakes."""
    nothing = np.zeros(1, np.uint8)
    sources = np.unique(plan.source[plan.target == comm.rank])
    targets = np.unique(plan.target[plan.source == comm.rank])
    requests = [comm.Irecv(nothing, int(source), CONNECT_TAG) for source in sources]
    requests += [comm.Isend(np.zeros(1, np.uint8), int(target), CONNECT_TAG) for target in targets]
    wait(requests)


class Root:
    """Drives the root's relay: publishes versions one after another, and notes when each began and ended."""

    def __init__(
        self, comm: MPI.Comm, relay: Relay, mailbox: Mailbox, versions: NDArray[np.uint8] | None = None
    ) -> None:
        self.comm = comm
        self.relay = relay
        self.mailbox = mailbox
        self.version = 0
        self.vector = np.random.default_rng(1).integers(0, 256, mailbox.nbytes, dtype=np.uint8)
        self.started: list[float] = []
        self.ended: list[float] = []
        self.sent: list[int] = []  # bytes that the root had sent when a model ended
        self._versions = versions  # models to send in place of random bytes [N, nbytes], each case from the first on
        self._first = 0
        self._left: dict[int, int] = {}
        self._epoch = self.cut_off = 0  # plan in force; models that a new one cut off
        self._choices: dict[
            str, Choice
        ] = {}  # what auto chose, by case: one choice a group, for its links are measured once

    @property
    def sender(self) -> Any:
        """The relay's end that sends."""
        return self.relay.models

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
        self._epoch = self.sender._epoch
        self.started = []
        self.ended = []
        self.sent = []
        self._left = {}
        self._first = self.version
        return choice, time.perf_counter() - begun

    def step(self, may_publish: bool) -> None:
        """One look: publish if nothing newer stands ready, and see what has left and what has ended everywhere."""
        if may_publish and self.mailbox.newest < self.version:
            self.vector[:8].view(np.int64)[0] = self.version
            vector = self.vector if self._versions is None else self._versions[self.version - self._first]
            self.mailbox.publish(vector, self.version)
        sent = self.sender.sent_version
        begun = time.perf_counter()
        self.relay.step()
        if self.sender.sent_version > sent:
            self.started.append(begun)
            self._left[self.sender.sent_version] = self.relay.hosts
            self.version += 1
        now = time.perf_counter()
        if self.sender._epoch != self._epoch:
            self._epoch = self.sender._epoch
            for version in [version for version, left in self._left.items() if left]:
                del self._left[version]  # the newest may leave again, unless a newer one is there
                self.cut_off += 1
        for _, confirm in self.sender.confirms:
            if confirm.version not in self._left:
                continue
            self._left[confirm.version] -= 1
            if not self._left[confirm.version]:
                self.ended.append(now)
                self.sent.append(self.sender.executor.traffic.bytes_sent)
        self.sender.confirms.clear()


def drive(root: Root, case: dict[str, Any]) -> dict[str, Any]:
    """Send a case's models; its figures."""
    choice, planned = root.plan(case)
    executor = root.sender.executor
    models = case["models"]
    in_flight = case["versions_in_flight"]
    sent_before = executor.traffic.bytes_sent
    busy_before = busy()
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
    first = max(case.get("warm", 1), in_flight) - 1
    last = len(seconds) - in_flight
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
    begun = time.perf_counter()
    changed = False
    seen = 0
    log = list[dict[str, Any]]()
    while (now := time.perf_counter() - begun) < request["seconds"]:
        root.step(len(root.started) - len(root.ended) - root.cut_off < request["versions_in_flight"])
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
    while not root.sender.settled:
        root.step(False)
    return log

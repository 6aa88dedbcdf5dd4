"""What the distribution benchmarks share: bringing up a cluster, running cases on it, and laying efficiency beside
every figure."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.distribution import cluster
from ddrl.distribution.links import Links
from ddrl.distribution.schemes import make_plan
from ddrl.distribution.simulator import Network, bound_unequal, simulate

SOURCES = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
SEALED = "sealed loop"  # the next model leaves when every host has sealed the last
HEADERS = 52  # bytes of a packet: of TCP and IP within the MTU, of the frame beside it
WIRE = 14


def case(
    scheme: str, models: int = 6, in_flight: int = 1, *, label: str = "", limit: float = 60.0, **parameters: Any
) -> dict[str, Any]:
    """One thing to time."""
    return {
        "scheme": scheme,
        "parameters": parameters,
        "models": models,
        "versions_in_flight": in_flight,
        "label": label or scheme.rpartition(":")[2],
        "limit": limit,
        "warm": 1 if in_flight == 1 else in_flight,
    }


@contextmanager
def made(rates: Sequence[str], mtu: int = 1500) -> Iterable[None]:
    """A cluster for a while; skips politely where it cannot be."""
    if problem := cluster.available():
        raise SystemExit(f"skipped: {problem}")
    cluster.up(rates, mtu=mtu)
    try:
        yield
    finally:
        cluster.down()


def run_groups(
    groups: Sequence[dict[str, Any]],
    *,
    timeout: float = 600,
    hosts: int | None = None,
    verbose: bool = True,
    tune: dict[str, float] | None = None,
    ended: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Time groups of cases in one mpirun (processes and their connections stay); one {"links", "results"} a group, in
    order.

    What was done when `timeout` ended it counts. A group with "rates" {host: rate} has those links shaped anew first,
    with "sending_rates" what those hosts send.
    `ended` is told of each group as soon as it has ended: its index and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        out = Path(folder) / "out.json"
        request.write_text(json.dumps({"groups": list(groups), "tune": tune or {}}))
        environment = {"PYTHONPATH": SOURCES, "DDRL_ADDRESS": cluster.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
        environment["DDRL_CLUSTER"] = cluster.NAME
        environment |= {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"} | (
            {"DDRL_BENCHMARK_VERBOSE": "1"} if verbose else {}
        )
        command = cluster.mpirun(
            [sys.executable, "-m", "benchmarks.distribution.ranks", str(request), str(out)],
            hosts=hosts,
            environment=environment,
        )
        with (
            open(Path(folder) / "errors", "w+") as errors,
            subprocess.Popen(
                command,
                env=cluster.mpi_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            stoppers = [threading.Timer(timeout, process.terminate), threading.Timer(timeout + 10, process.kill)]
            read = threading.Event()
            ender = threading.Thread(target=_end_with, args=(process, read))
            for thread in (*stoppers, ender):
                thread.daemon = True
                thread.start()
            for line in process.stdout:
                if line.startswith("RATES "):
                    wanted = json.loads(line.removeprefix("RATES "))
                    for host, rate in wanted["rates"].items():
                        cluster.change_rate(int(host), rate, up_only=wanted["up_only"])
                    process.stdin.write("done\n")
                    process.stdin.flush()
                elif line.startswith("GROUP "):
                    if ended is not None:
                        done = json.loads(out.read_text())["groups"]
                        ended(len(done) - 1, done[-1])
                else:
                    print(line, end="", flush=True)
            read.set()
            code = process.wait()
            for stopper in stoppers:
                stopper.cancel()
            errors.seek(0)
            said = errors.read()
        if not out.exists():
            raise SystemExit(f"the relays ended without a result:\n{said[-3000:]}")
        if code:
            print(
                f"the relays ended early ({code}, limit {timeout:.0f} s): what was done until then "
                f"counts\n{said[-1500:]}"
            )
        return json.loads(out.read_text())["groups"]


def _end_with(process: subprocess.Popen[str], read: threading.Event) -> None:
    """Where mpirun has died, end the daemons that it left behind: they hold the pipe open that we read to its end."""
    process.wait()
    if not read.wait(5):
        cluster.end_processes()


def run_cases(
    nbytes: int,
    cases: Sequence[dict[str, Any]],
    *,
    rounds: int = 1,
    timeout: float = 600,
    hosts: int | None = None,
    verbose: bool = True,
) -> dict[str, Any]:
    """Time the cases, the whole list `rounds` times; {"links": measured links, "results": one a case and round}."""
    return run_groups(
        [{"nbytes": nbytes, "cases": list(cases), "rounds": rounds}], timeout=timeout, hosts=hosts, verbose=verbose
    )[0]


def efficiency(rates: Sequence[float], nbytes: int, seconds: float) -> float:
    """Bound over measured, on the raw rate of the links (a link carries at most 0.956 of it as payload at MTU 1500)."""
    return bound_unequal(rates, rates, nbytes) / seconds


def modeled(rates: Sequence[float], links: dict[str, Any], mtu: int = 1500) -> Network:
    """The emulated cluster as the simulator sees it: the links as shaped, costs as measured."""
    payload = [rate * (mtu - HEADERS) / (mtu + WIRE) for rate in rates]
    return replace(Links(**links).network(), up=payload, down=payload)


def summarize(
    results: Sequence[dict[str, Any]], rates: Sequence[float], nbytes: int, network: Network
) -> list[dict[str, Any]]:
    """One row a case (rounds of the same case together): medians, extremes, efficiency, what was sent, and what the
    simulator says."""
    cases: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in results:
        cases.setdefault((result["label"], result["versions_in_flight"]), []).append(result)
    rows: list[dict[str, Any]] = []
    for (label, in_flight), rounds in cases.items():
        periods = [period for result in rounds for period in result["periods"]]
        measured = statistics.median(periods)
        middle = min(
            rounds, key=lambda result: abs(result["period"] - measured)
        )  # auto may choose another plan another time
        simulated = statistics.median([predicted(result, nbytes, network) for result in rounds[:3]])
        counted = max(middle.get("relay_bytes") or [math.nan])  # where the run was ended before relays could say
        rows.append(
            {
                "scheme": label,
                "mode": SEALED if in_flight == 1 else f"{in_flight} in flight",
                "seconds": measured,
                "low": min(periods),
                "high": max(periods),
                "models": sum(len(result["seconds"]) for result in rounds),
                "rounds": len(rounds),
                "models_per_second": 1 / measured,
                "efficiency": efficiency(rates, nbytes, measured),
                "simulated": simulated,
                "root_sends": middle["root_bytes"] / nbytes,
                "busiest_relay_sends": None if math.isnan(counted) else counted / nbytes,
                "cpu": statistics.median(result["cpu"] for result in rounds),
                "is": [middle["scheme"], middle["parameters"]],
            }
        )
    return rows


def predicted(result: dict[str, Any], nbytes: int, network: Network) -> float:
    """Simulated seconds a model of what was measured."""
    plan = make_plan(result["scheme"], len(network.up) - 1, nbytes, **result["parameters"])
    in_flight = result["versions_in_flight"]
    if in_flight == 1:
        return simulate(plan, network).seconds
    return simulate(plan, network, models=3 * in_flight + 2, versions_in_flight=in_flight).period

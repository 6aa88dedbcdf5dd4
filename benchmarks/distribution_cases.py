"""What the distribution benchmarks share: bringing up a cluster, running cases on it, and laying efficiency beside every figure."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import cluster
from ddrl.distribution.costs import bound_unequal
from ddrl.distribution.links import Links
from ddrl.distribution.schemes import make_plan
from ddrl.distribution.simulator import Network, simulate

BCAST_ALGORITHMS = {0: "MPI's choice", 1: "linear", 2: "chain", 3: "pipeline", 4: "split binary", 5: "binary", 6: "binomial", 7: "k-nomial",
                    8: "scatter + allgather", 9: "scatter + ring"}
PACKET, FRAME = 1448, 1514  # bytes of payload and on the wire, of a full packet at MTU 1500


def case(scheme: str, models: int = 6, in_flight: int = 1, *, label: str = "", limit: float = 60.0, **parameters: Any) -> dict[str, Any]:
    """One thing to time."""
    return {"scheme": scheme, "parameters": parameters, "models": models, "versions_in_flight": in_flight, "label": label or scheme,
            "limit": limit, "warm": 1 if in_flight == 1 else in_flight}


@contextmanager
def made(rates: Sequence[str]) -> Iterable[None]:
    """A cluster for a while; skips politely where it cannot be."""
    if problem := cluster.available():
        raise SystemExit(f"skipped: {problem}")
    cluster.up(rates)
    try:
        yield
    finally:
        cluster.down()


def run_cases(nbytes: int, cases: Sequence[dict[str, Any]], *, timeout: float = 600, hosts: int | None = None,
              verbose: bool = True) -> dict[str, Any]:
    """Time the cases in one mpirun (connections stay); {"links": measured links, "results": one a case}."""
    with tempfile.TemporaryDirectory() as folder:
        request, out = Path(folder) / "cases.json", Path(folder) / "out.json"
        request.write_text(json.dumps({"nbytes": nbytes, "cases": cases}))
        environment = {"PYTHONPATH": str(Path(__file__).parent.parent)} | ({"DDRL_BENCHMARK_VERBOSE": "1"} if verbose else {})
        command = cluster.mpirun([sys.executable, "-m", "benchmarks.distribution_ranks", str(request), str(out)], hosts=hosts,
                                 environment=environment)
        with subprocess.Popen(command, env=cluster.mpi_environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                _, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.terminate()
                _, errors = process.communicate()
                print(f"stopped after {timeout:.0f} s; the cases done until then count")
        if not out.exists():
            raise SystemExit(f"the relays ended without a result:\n{errors[-3000:]}")
        return json.loads(out.read_text())


def run_mpi(kind: str, nbytes: int, models: int, *, algorithm: int = 0, timeout: float = 300) -> list[float]:
    """Seconds of each broadcast by MPI or gloo; empty where it failed or took too long."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "DDRL_ADDRESS": cluster.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
        if algorithm:
            environment |= {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_bcast_algorithm": str(algorithm)}
        command = cluster.mpirun([sys.executable, "-m", "benchmarks.distribution_mpi", kind, str(nbytes), str(models), str(out)],
                                 environment=environment)
        try:
            subprocess.run(command, env=cluster.mpi_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return []
        return json.loads(out.read_text()) if out.exists() else []


def efficiency(rates: Sequence[float], nbytes: int, seconds: float) -> float:
    """Bound over measured, on the raw rate of the links (a link carries at most 0.956 of it as payload at MTU 1500)."""
    return bound_unequal(rates, rates, nbytes) / seconds


def modeled(rates: Sequence[float], links: dict[str, Any]) -> Network:
    """The emulated cluster as the simulator sees it: the links as shaped, costs as measured."""
    payload = [rate * PACKET / FRAME for rate in rates]
    return replace(Links(**links).network(), up=payload, down=payload)


def predicted(result: dict[str, Any], nbytes: int, network: Network) -> float:
    """Simulated seconds a model of what was measured."""
    plan = make_plan(result["scheme"], len(network.up) - 1, nbytes, **result["parameters"])
    in_flight = result["versions_in_flight"]
    if in_flight == 1:
        return simulate(plan, network).seconds
    return simulate(plan, network, models=3 * in_flight + 2, versions_in_flight=in_flight).period

"""Every scheme on 16 emulated hosts at 200 Mbit/s each way, S = 5 MB, beside MPI_Bcast with each of its algorithms; simulator beside measurement.

`python -m benchmarks.distribution`; needs root (network namespaces). Closed loop: the next model leaves when every host has confirmed the
last. Streaming: three models on their way. Efficiency is bound / measured, the bound on the links' raw rate.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks import cluster
from benchmarks.distribution_cases import BCAST_ALGORITHMS, case, efficiency, made, modeled, predicted, run_cases, run_mpi
from benchmarks.harness import arguments, print_table, save


def schemes(short: bool) -> list[dict[str, Any]]:
    """What is timed, closed loop and streaming in turn."""
    closed = [
        case("sharded", label="sharded, 20 kB chunks on arrival", chunk_bytes=20_000),
        case("stripes", label="stripes 4", fanout=4, chunk_bytes=1 << 15),
        case("auto", label="auto"),
        case("sharded", 3, label="sharded m=4, whole shards", relays=4),
        case("sharded", 3, label="sharded m=16, whole shards"),
        case("two_tree", chunk_bytes=1 << 15),
        case("chain", chunk_bytes=1 << 15),
        case("scatter_ring", 3),
        case("binomial", 3),
        case("tree", 2, label="tree 4 x 4", fanout=4, depth=2),
        case("direct", 1),
    ]
    streaming = [
        case("sharded", 16, 3, label="sharded, 20 kB chunks on arrival", chunk_bytes=20_000),
        case("stripes", 16, 3, label="stripes 4", fanout=4, chunk_bytes=1 << 15),
        case("sharded", 16, 3, label="sharded, 64 kB chunks on arrival", chunk_bytes=64_000),
        case("auto", 16, 3, label="auto"),
        case("two_tree", 12, 3, chunk_bytes=1 << 15),
        case("chain", 12, 3, chunk_bytes=1 << 15),
        case("scatter_ring", 6, 3),
    ]
    return closed[:3] + streaming[:2] if short else closed + streaming


def main() -> None:
    parser = arguments("distribution", __doc__ or "")
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--bytes", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="the whole list is run so often; medians count")
    parser.add_argument("--no-mpi", action="store_true", help="leave MPI's and torch's broadcasts out")
    chosen = parser.parse_args()
    rates = [cluster.rate_bytes(chosen.rate)] * (chosen.hosts + 1)
    nbytes, rounds = chosen.bytes, 1 if chosen.short else chosen.rounds
    with made([chosen.rate] * (chosen.hosts + 1)):
        runs = []
        for _ in range(rounds):
            runs.append(run_cases(nbytes, schemes(chosen.short), timeout=400))
            time.sleep(0.5)
        baselines: list[dict[str, Any]] = []
        if not chosen.no_mpi:
            kinds = [("MPI_Bcast, " + name, "bcast", number) for number, name in BCAST_ALGORITHMS.items()]
            kinds += [("MPI_Scatter + MPI_Allgather", "scatter_allgather", 0), ("torch gloo broadcast", "gloo", 0)]
            for label, kind, number in kinds[:1] if chosen.short else kinds:
                seconds = run_mpi(kind, nbytes, 3, algorithm=number, timeout=120)
                if seconds:
                    baselines.append({"label": label, "seconds": seconds, "period": statistics.median(seconds)})
                    print(label, f"{baselines[-1]['period']:.3f} s", flush=True)
    rows, table, errors = [], [], []
    links = runs[-1]["links"]
    network = modeled(rates, links)
    for index, first in enumerate(runs[0]["results"]):
        periods = [run["results"][index]["period"] for run in runs if index < len(run["results"])]
        measured = statistics.median(periods)
        simulated = predicted(first, nbytes, network)
        errors.append(abs(simulated / measured - 1))
        mode = "closed loop" if first["versions_in_flight"] == 1 else f"{first['versions_in_flight']} in flight"
        cpu = statistics.median(run["results"][index]["cpu"] for run in runs if index < len(run["results"]))
        row = {"scheme": first["label"], "mode": mode, "seconds": measured, "low": min(periods), "high": max(periods),
               "models_per_second": 1 / measured, "efficiency": efficiency(rates, nbytes, measured), "simulated": simulated,
               "root_sends_models": first["root_bytes"] / nbytes, "cpu": cpu, "is": [first["scheme"], first["parameters"]]}
        rows.append(row)
        table.append([row["scheme"], mode, measured, row["low"], row["high"], row["models_per_second"], row["efficiency"], simulated,
                      row["root_sends_models"], cpu])
    for baseline in baselines:
        measured = baseline["period"]
        rows.append({"scheme": baseline["label"], "mode": "closed loop", "seconds": measured, "low": min(baseline["seconds"]),
                     "high": max(baseline["seconds"]), "models_per_second": 1 / measured, "efficiency": efficiency(rates, nbytes, measured)})
        table.append([baseline["label"], "closed loop", measured, min(baseline["seconds"]), max(baseline["seconds"]), 1 / measured,
                      efficiency(rates, nbytes, measured), "", "", ""])
    print(f"\n{chosen.hosts} hosts, {chosen.rate} each way, S = {nbytes / 1e6:g} MB, bound {efficiency(rates, nbytes, 1.0):.3f} s a model")
    print_table(["scheme", "mode", "s a model", "low", "high", "models/s", "efficiency", "simulated s", "root sends S x", "cpu busy"], table)
    print(f"simulator against measurement: median error {statistics.median(errors):.1%}")
    save(chosen.json, {"hosts": chosen.hosts, "rate": chosen.rate, "bytes": nbytes, "bound_seconds": efficiency(rates, nbytes, 1.0), "links": links,
                       "rows": rows, "simulator_median_error": statistics.median(errors)})


if __name__ == "__main__":
    main()

"""Random unequal clusters: 4 to 16 hosts, each link 50 to 400 Mbit/s. What auto chooses, against the best of a full sweep of schemes.

`python -m benchmarks.distribution_unequal [--clusters 50]`; needs root. Closed loop, S = 2.5 MB. The sweep is measured, not predicted; the best of
many noisy figures is a hard rival, so the sweep's winner is measured once more, beside auto, and those two figures are compared.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks import cluster
from benchmarks.distribution_cases import case, efficiency, made, modeled, predicted, run_cases
from benchmarks.harness import arguments, print_table, save
from ddrl.distribution.planner import budgets
from ddrl.distribution.simulator import Network

NBYTES = 2_500_000


def sweep(rates: list[float]) -> list[dict[str, Any]]:
    """Every scheme with several settings."""
    network = Network(rates, rates)
    cases = [case("weighted", 4, label=f"weighted {size >> 10}k", up=rates, chunk_bytes=size) for size in (1 << 14, 1 << 15, 1 << 16)]
    for fanout in (2, 3, 4):
        if fanout < len(rates):
            cases += [case("stripes", 4, label=f"stripes {fanout}", fanout=fanout, chunk_bytes=1 << 15),
                      case("stripes", 4, label=f"stripes {fanout} by rate", fanout=fanout, chunk_bytes=1 << 15, budgets=budgets(network, fanout))]
    cases += [case("sharded", 4, label="sharded 20k", chunk_bytes=20_000), case("two_tree", 4, chunk_bytes=1 << 15),
              case("chain", 4, chunk_bytes=1 << 15), case("scatter_ring", 3), case("binomial", 3)]
    return cases


def main() -> None:
    parser = arguments("distribution_unequal", __doc__ or "")
    parser.add_argument("--clusters", type=int, default=50)
    chosen = parser.parse_args()
    count = 3 if chosen.short else chosen.clusters
    rows, table, errors = [], [], []
    for seed in range(count):
        draw = random.Random(seed)
        texts = [f"{draw.randint(50, 400)}mbit" for _ in range(draw.randint(4, 16) + 1)]
        rates = [cluster.rate_bytes(text) for text in texts]
        with made(texts):
            first = run_cases(NBYTES, [case("auto", 4), *sweep(rates)], timeout=120, verbose=False)
            best = min(first["results"][1:], key=lambda result: result["period"])
            rival = {**case(best["scheme"], 6, label=best["label"]), "parameters": best["parameters"]}
            final = run_cases(NBYTES, [case("auto", 6, label="auto"), rival] * 2, timeout=120, verbose=False)
        auto = statistics.median([seconds for result in final["results"][::2] for seconds in result["seconds"][1:]])
        other = statistics.median([seconds for result in final["results"][1::2] for seconds in result["seconds"][1:]])
        network = modeled(rates, final["links"])
        errors += [abs(predicted(result, NBYTES, network) / result["period"] - 1) for result in first["results"]]
        row = {"hosts": len(rates) - 1, "rates": texts, "auto": final["results"][0]["scheme"], "auto_seconds": auto, "best": best["label"],
               "best_seconds": other, "auto_over_best": auto / other, "efficiency": efficiency(rates, NBYTES, auto)}
        rows.append(row)
        table.append([seed, row["hosts"], row["auto"], auto, row["best"], other, row["auto_over_best"], row["efficiency"]])
        print(f"{seed}: {row['hosts']} hosts, auto {row['auto']} {auto:.3f} s, best of the sweep {best['label']} {other:.3f} s, "
              f"efficiency {row['efficiency']:.2f}", flush=True)
    print_table(["cluster", "hosts", "auto is", "s a model", "best of the sweep", "s a model", "auto / best", "efficiency"], table)
    ratio = [row["auto_over_best"] for row in rows]
    figures = {"median_efficiency": statistics.median(row["efficiency"] for row in rows), "median_auto_over_best": statistics.median(ratio),
               "share_within_5_percent": sum(value <= 1.05 for value in ratio) / len(ratio), "simulator_median_error": statistics.median(errors)}
    print("  ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    save(chosen.json, {**figures, "bytes": NBYTES, "rows": rows})


if __name__ == "__main__":
    main()

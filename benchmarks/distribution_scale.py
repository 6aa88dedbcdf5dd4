"""The source's experiment at 100 and 298 emulated hosts: models a second, tree against sharded, each with its best m (table 1), the busiest
relay's egress (table 2), and our own scheme beside them.

`python -m benchmarks.distribution_scale [--hosts 100,298]`; needs root. Rates and S are scaled down together so that the machine's cores are not
the limit: what counts is S/B, and the table says how long that is. Closed loop is the source's rule.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import cluster
from benchmarks.distribution_cases import case, efficiency, made, modeled, predicted, run_cases
from benchmarks.harness import arguments, print_table, save
from ddrl.distribution.schemes import make_plan
from ddrl.distribution.simulator import Network, simulate

SCALE = {100: ("5mbit", 2_000_000, 10), 298: ("1mbit", 1_000_000, 30)}  # rate, bytes, the source's m


def cases(hosts: int, relays: int, short: bool) -> list[dict[str, Any]]:
    """Our own first, then the source's, each with the best setting that the simulator finds for it."""
    rate, nbytes, _ = SCALE[hosts]
    ideal = Network.equal(hosts, cluster.rate_bytes(rate), latency=1e-3, message_seconds=1e-4)

    def best(scheme: str, name: str, values: list[int]) -> int:
        return min(values, key=lambda value: simulate(make_plan(scheme, hosts, nbytes, **{name: value}), ideal).seconds)

    fanout = best("tree", "fanout", list(range(4, 25)))
    ours = [case("auto", 3, label="auto", limit=90), case("auto", 8, 2, label="auto", limit=90),
            case("stripes", 3, label="stripes 4, 32 kB chunks", fanout=4, chunk_bytes=1 << 15, limit=90)]
    theirs = [case("sharded", 1, label=f"sharded m={relays} (source's preset)", relays=relays),
              case("sharded", 2, label="sharded, whole shards, best m", relays=best("sharded", "relays", [relays, hosts // 3, hosts // 2, hosts])),
              case("sharded", 2, label="sharded m=n, chunks on arrival", chunk_bytes=1 << 14),
              case("tree", 1, label=f"tree, 2 levels, best fan-out {fanout}", fanout=fanout, depth=2, limit=300)]
    return ours[:1] + theirs[:1] if short else ours + theirs


def main() -> None:
    parser = arguments("distribution_scale", __doc__ or "")
    parser.add_argument("--hosts", default="100,298")
    chosen = parser.parse_args()
    figures: dict[str, Any] = {}
    for hosts in (int(text) for text in chosen.hosts.split(",")):
        rate, nbytes, relays = SCALE[hosts]
        rates = [cluster.rate_bytes(rate)] * (hosts + 1)
        with made([rate] * (hosts + 1)):
            begun = time.monotonic()
            run = run_cases(nbytes, cases(hosts, relays, chosen.short), timeout=2400)
            print(f"{hosts} hosts took {time.monotonic() - begun:.0f} s")
        network = modeled(rates, run["links"])
        rows, table = [], []
        for result in run["results"]:
            plan = make_plan(result["scheme"], hosts, nbytes, **result["parameters"])
            egress = float(plan.egress()[1:].max()) / nbytes
            seconds = result["period"]
            mode = "closed loop" if result["versions_in_flight"] == 1 else f"{result['versions_in_flight']} in flight"
            row = {"scheme": result["label"], "mode": mode, "seconds": seconds, "models_per_second": 1 / seconds,
                   "efficiency": efficiency(rates, nbytes, seconds), "busiest_relay_sends": egress, "root_sends": result["root_bytes"] / nbytes,
                   "relay_bytes_per_second": egress * nbytes / seconds, "simulated": predicted(result, nbytes, network), "cpu": result["cpu"],
                   "is": [result["scheme"], result["parameters"]]}
            rows.append(row)
            table.append([row["scheme"], mode, seconds, row["models_per_second"], row["efficiency"], egress, row["root_sends"],
                          row["relay_bytes_per_second"] / rates[0], row["simulated"], row["cpu"]])
        print(f"\n{hosts} hosts, {rate} each way, S = {nbytes / 1e6:g} MB, bound {efficiency(rates, nbytes, 1.0):.2f} s a model")
        print_table(["scheme", "mode", "s a model", "models/s", "efficiency", "busiest relay sends S x", "root sends S x", "its link busy",
                     "simulated s", "cpu busy"], table)
        figures[str(hosts)] = {"rate": rate, "bytes": nbytes, "bound_seconds": efficiency(rates, nbytes, 1.0), "links": run["links"], "rows": rows}
        save(chosen.json, figures)


if __name__ == "__main__":
    main()

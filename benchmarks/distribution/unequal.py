"""Random unequal clusters: 4 to 16 hosts, each link 50 to 400 Mbit/s. What auto chooses, against the best of a full
sweep of schemes.

`python -m benchmarks.distribution.unequal [--clusters 50] [--minutes 18]`; needs root. Sealed loop, S = 1 MB. The sweep
is measured, not predicted. The best of many noisy figures is a hard rival, so the sweep's winner is measured again in
turn with auto, and those figures are compared. One mpirun serves all clusters: links are shaped anew, and relays start
afresh on the first hosts. Figures are saved after each cluster; run again, it goes on where the JSON ends.
`--simulated` runs all clusters in the simulator instead, with a wider sweep."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

from benchmarks.distribution import cluster
from benchmarks.distribution.cases import case, efficiency, made, modeled, predicted, run_groups
from benchmarks.distribution.schemes import BINOMIAL, SCATTER_RING, TWO_TREE
from benchmarks.harness import arguments, print_table, save
from ddrl.distribution.schemes import Choice, Situation, budgets, candidates, choose_best, predict
from ddrl.distribution.simulator import Network

NBYTES = 1_000_000
MOST = 16
DUEL = {"rounds": 5, "models": 4}  # of auto and the winner in turn; the first model of each turn is not counted


def draw(seed: int) -> list[str]:
    """Rates of one cluster, the root's first."""
    dice = random.Random(seed)
    hosts = dice.randint(4, MOST)
    return [f"{dice.randint(50, 400)}mbit" for _ in range(hosts + 1)]


def sweep(rates: list[float]) -> list[dict[str, Any]]:
    """Every scheme with several settings."""
    network = Network(rates, rates)
    hosts = len(rates) - 1
    cases = [
        case("weighted", 3, label=f"weighted {size >> 10}k", up=rates, chunk_bytes=size)
        for size in (1 << 13, 1 << 14, 1 << 15)
    ]
    for fanout in (2, 3, 4):
        if fanout < hosts:
            cases += [
                case("stripes", 3, label=f"stripes {fanout}", fanout=fanout, chunk_bytes=1 << 14),
                case(
                    "stripes",
                    3,
                    label=f"stripes {fanout} by rate",
                    fanout=fanout,
                    chunk_bytes=1 << 14,
                    budgets=budgets(network, fanout),
                ),
            ]
    return [
        *cases,
        case("sharded", 3, label="sharded, on arrival", chunk_bytes=1 << 14),
        case("sharded", 2, label="sharded, whole shards"),
        case("chain", 3, chunk_bytes=1 << 14),
        case(TWO_TREE, 3, chunk_bytes=1 << 14),
        case(SCATTER_RING, 2),
        case(BINOMIAL, 2),
        case("tree", 2, fanout=2, depth=0),
    ]


def simulated(count: int) -> dict[str, Any]:
    """All clusters in the simulator: auto against everything the planner knows and every baseline."""
    rows: list[dict[str, Any]] = []
    for seed in range(count):
        rates = [cluster.rate_bytes(text) for text in draw(seed)]
        hosts = len(rates) - 1
        network = Network(rates, rates, latency=3e-4, message_seconds=3e-5)
        chosen = choose_best(Situation(network, NBYTES))
        everything = [
            *candidates(Situation(network, NBYTES)),
            Choice(SCATTER_RING, {}),
            Choice("direct", {}),
            *(Choice("chain", {"chunk_bytes": size}) for size in (1 << 14, 1 << 15, 1 << 16)),
            *(Choice(TWO_TREE, {"chunk_bytes": size}) for size in (1 << 14, 1 << 15, 1 << 16)),
            *(Choice("tree", {"fanout": fanout, "depth": depth}) for fanout in (2, 3, 4) for depth in (0, 2)),
            *(Choice("sharded", {"relays": relays}) for relays in range(1, hosts + 1)),
        ]
        seconds = {f"{choice.scheme} {choice.parameters}": predict(choice, network, NBYTES, 1) for choice in everything}
        best = min(seconds, key=lambda name: seconds[name])
        rows.append(
            {
                "hosts": hosts,
                "rates": draw(seed),
                "auto": chosen.scheme,
                "auto_seconds": chosen.seconds,
                "best": best.partition(" ")[0],
                "best_seconds": seconds[best],
                "auto_over_best": chosen.seconds / seconds[best],
                "swept": len(everything),
                "efficiency": efficiency(rates, NBYTES, chosen.seconds),
            }
        )
    return {"bytes": NBYTES, "rows": rows}


def judged(found: dict[str, Any], seed: int, rates: list[float]) -> dict[str, Any]:
    """One measured cluster as a row."""
    texts = draw(seed)
    cases = len(sweep(rates)) + 1
    results = found["results"][:cases]
    duels = found["results"][cases:]
    auto = statistics.median(period for result in duels[::2] for period in result["periods"])
    other = statistics.median(period for result in duels[1::2] for period in result["periods"])
    network = modeled(rates, found["links"])
    errors = [abs(predicted(result, NBYTES, network) / result["period"] - 1) for result in results]
    return {
        "seed": seed,
        "hosts": len(rates) - 1,
        "rates": texts,
        "auto": duels[0]["scheme"],
        "auto_seconds": auto,
        "best": duels[1]["label"],
        "best_seconds": other,
        "auto_over_best": auto / other,
        "efficiency": efficiency(rates, NBYTES, auto),
        "simulator_errors": errors,
        "links": {name: value for name, value in found["links"].items() if name not in ("up", "down")},
        "sweep": {result["label"]: result["period"] for result in results},
    }


def report(path: Any, figures: dict[str, Any]) -> None:
    """Tables and JSON."""
    for name in ("measured", "simulated"):
        if not (rows := figures.get(name, {}).get("rows")):
            continue
        print(f"\n{name}, S = {figures[name]['bytes'] / 1e6:g} MB")
        print_table(
            ["cluster", "hosts", "auto is", "s a model", "best of the sweep", "s a model", "auto / best", "efficiency"],
            [
                [
                    index,
                    row["hosts"],
                    row["auto"],
                    row["auto_seconds"],
                    row["best"],
                    row["best_seconds"],
                    row["auto_over_best"],
                    row["efficiency"],
                ]
                for index, row in enumerate(rows)
            ],
        )
        ratio = [row["auto_over_best"] for row in rows]
        summary = {
            "clusters": len(rows),
            "median_efficiency": statistics.median(row["efficiency"] for row in rows),
            "median_auto_over_best": statistics.median(ratio),
            "worst_auto_over_best": max(ratio),
            "share_within_5_percent": sum(value <= 1.05 for value in ratio) / len(ratio),
        }
        if name == "measured":
            summary["simulator_median_error"] = statistics.median(
                error for row in rows for error in row["simulator_errors"]
            )
        figures[name]["summary"] = summary
        print("  ".join(f"{key} {value:.3f}" for key, value in summary.items()))
    save(path, figures)


def main() -> None:
    parser = arguments("distribution_unequal", __doc__ or "")
    parser.add_argument("--clusters", type=int, default=50)
    parser.add_argument(
        "--minutes", type=float, default=18.0, help="measured clusters that do not fit are left for the next run"
    )
    parser.add_argument("--simulated", action="store_true", help="all clusters in the simulator, no root needed")
    parser.add_argument("--afresh", action="store_true", help="forget what the JSON holds of measured clusters")
    chosen = parser.parse_args()
    known: dict[str, Any] = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    figures = {
        name: known[name]
        for name in ("measured", "simulated")
        if name in known and not (name == "measured" and chosen.afresh)
    }
    count = 3 if chosen.short else chosen.clusters
    if chosen.simulated:
        figures["simulated"] = simulated(count)
        report(chosen.json, figures)
        return
    rows = figures.setdefault("measured", {"bytes": NBYTES, "rows": []})["rows"]
    seeds = [seed for seed in range(count) if seed not in {row["seed"] for row in rows}]
    groups = []
    for seed in seeds:
        texts = draw(seed)
        rates = [cluster.rate_bytes(text) for text in texts]
        groups.append(
            {
                "nbytes": NBYTES,
                "hosts": len(rates) - 1,
                "rates": dict(enumerate(texts)),
                "duel": DUEL,
                "cases": [case("auto", 3, label="auto"), *sweep(rates)],
            }
        )

    def ended(index: int, found: dict[str, Any]) -> None:
        rows.append(judged(found, seeds[index], [cluster.rate_bytes(text) for text in draw(seeds[index])]))
        save(chosen.json, figures)
        row = rows[-1]
        print(
            f"cluster {row['seed']}: {row['hosts']} hosts, auto is {row['auto']}, {row['auto_seconds']:.3f} s a "
            f"model, best of the sweep is {row['best']}, {row['best_seconds']:.3f} s, efficiency "
            f"{row['efficiency']:.2f}",
            flush=True,
        )

    with made(["200mbit"] * (MOST + 1)):
        run_groups(groups, timeout=chosen.minutes * 60, verbose=False, ended=ended)
    report(chosen.json, figures)


if __name__ == "__main__":
    main()

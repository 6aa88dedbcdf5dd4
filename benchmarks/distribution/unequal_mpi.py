"""Unequal links: auto against MPI's own broadcast at its best, in turn.

`python -m benchmarks.distribution.unequal_mpi [--minutes 5]`; needs root. Sealed loop, S = 2 MB, three kinds of
clusters: "both ways", each link 50 to 400 Mbit/s, the same each way (the clusters of `unequal`); "sending", all receive
at 400 Mbit/s and send at 50 to 400; "one slow sender", 16 hosts of 200 Mbit/s one of which sends at 20, as after the
change of `replan`. MPI's best is the quickest, afterwards, of its algorithms and segment sizes; beside it the same with
the ranks sorted by what they can send, slowest last, as somebody who knows the links would place them. Each round times
auto, then all of MPI's. Where links are unequal but the same each way, the slowest host must receive a whole model,
which a pipeline through all hosts does not make worse: there nobody can win much. Figures are saved after each cluster;
run again, it goes on where the JSON ends."""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

from benchmarks.distribution import cluster
from benchmarks.distribution.cases import case, made, run_groups
from benchmarks.distribution.mpi import BCAST_ALGORITHMS
from benchmarks.distribution.unequal import draw
from benchmarks.harness import arguments, print_table, save
from ddrl.distribution.simulator import bound_unequal

NBYTES = 2_000_000
MOST = 16
ROUNDS = 2
KINDS = ("both ways", "sending", "one slow sender")
KIB = 1 << 10
TUNINGS = [(3, 8 * KIB), (3, 16 * KIB), (3, 32 * KIB), (5, 32 * KIB), (4, 32 * KIB), (9, 0), (0, 0)]
SORTED = TUNINGS[:3]  # a tree's inner ranks are not the first of an order: only pipelines gain by it


def links(kind: str, seed: int) -> tuple[list[str], list[str]]:
    """What each host sends and receives, the root first."""
    if kind == "both ways":
        return (rates := draw(seed)), rates
    if kind == "one slow sender":
        return ["20mbit" if host == 5 else "200mbit" for host in range(17)], ["200mbit"] * 17
    dice = random.Random(1000 + seed)
    hosts = dice.randint(8, MOST)
    return ["400mbit", *(f"{dice.randint(50, 400)}mbit" for _ in range(hosts))], ["400mbit"] * (hosts + 1)


def rivals(up: list[float]) -> list[dict[str, Any]]:
    """MPI's tunings, as `mpi.measure` takes them."""
    order = [0, *sorted(range(1, len(up)), key=lambda host: -up[host])]
    named = [(number, size, None, "") for number, size in TUNINGS]
    named += [(number, size, order, ", sorted") for number, size in SORTED]
    return [
        {
            "kind": "bcast",
            "label": f"{BCAST_ALGORITHMS[number]}{f', {size // KIB} KiB' if size else ''}{end}",
            "algorithm": number,
            "segment": size,
            "order": places,
            "models": 2,
            "limit": 6.0,
        }
        for number, size, places, end in named
    ]


def judged(kind: str, seed: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """One cluster as a row."""
    up, down = ([cluster.rate_bytes(text) for text in rates] for rates in links(kind, seed))
    together: dict[str, list[float]] = {}
    for result in (result for group in groups for result in group["results"]):
        if result["problems"]:
            raise SystemExit(f"{kind} {seed}, {result['label']}: {result['problems'][0]}")
        together.setdefault(result["label"], []).extend(result["periods"])
    seconds = {label: statistics.median(periods) for label, periods in together.items()}
    placed = [label for label in seconds if label.endswith(", sorted")]
    best = min((label for label in seconds if label != "auto" and label not in placed), key=seconds.__getitem__)
    best_placed = min(placed, key=seconds.__getitem__)
    return {
        "kind": kind,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        "hosts": len(up) - 1,
        "bound_seconds": bound_unequal(up, down, NBYTES),
        "auto": groups[0]["results"][0]["scheme"],
        "auto_seconds": seconds["auto"],
        "auto_low": min(together["auto"]),
        "auto_high": max(together["auto"]),
        "mpi": best,
        "mpi_over_auto": seconds[best] / seconds["auto"],
        "sorted_mpi": best_placed,
        "sorted_mpi_over_auto": min(seconds[best], seconds[best_placed]) / seconds["auto"],
        "cpu": groups[0]["results"][0]["cpu"],
        "seconds": seconds,
    }


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A table, and medians by kind."""
    print_table(
        ["links", "hosts", "bound / auto", "auto is", "auto [s]", "MPI / auto", "MPI's best", "sorted / auto", "busy"],
        [
            [
                row["kind"],
                row["hosts"],
                row["bound_seconds"] / row["auto_seconds"],
                row["auto"],
                row["auto_seconds"],
                row["mpi_over_auto"],
                row["mpi"],
                row["sorted_mpi_over_auto"],
                row["cpu"],
            ]
            for row in rows
        ],
    )
    by_kind: dict[str, Any] = {}
    for kind in KINDS:
        if some := [row for row in rows if row["kind"] == kind]:
            by_kind[kind] = {
                "clusters": len(some),
                **{
                    name: statistics.median(row[name] for row in some)
                    for name in ("mpi_over_auto", "sorted_mpi_over_auto")
                },
                "efficiency": statistics.median(row["bound_seconds"] / row["auto_seconds"] for row in some),
            }
            print(f"{kind}: " + ", ".join(f"{name} {value:.3g}" for name, value in by_kind[kind].items()))
    return by_kind


def main() -> None:
    parser = arguments("distribution_unequal_mpi", __doc__ or "")
    parser.add_argument("--clusters", type=int, default=5, help="of each kind that is drawn (%(default)s)")
    parser.add_argument("--minutes", type=float, default=5.0, help="what does not fit is left for the next run")
    chosen = parser.parse_args()
    known: dict[str, Any] = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    rows: list[dict[str, Any]] = known.get("rows", [])
    count = 1 if chosen.short else chosen.clusters
    wanted = [(KINDS[2], 0)] + [(kind, seed) for seed in range(count) for kind in KINDS[:2]]
    wanted = [place for place in wanted if place not in {(row["kind"], row["seed"]) for row in rows}]
    groups: list[dict[str, Any]] = []
    for place in wanted:
        sends, receives = links(*place)
        shape = {"rates": dict(enumerate(receives)), "sending_rates": dict(enumerate(sends))}
        mpi = rivals([cluster.rate_bytes(text) for text in sends])
        both = [{"cases": [case("auto", 4, label="auto", limit=10.0)]}, {"rivals": mpi}]
        groups += [{"nbytes": NBYTES, "hosts": len(sends) - 1, **part} for part in both * ROUNDS]
        groups[-2 * ROUNDS] |= shape
    found: list[dict[str, Any]] = []

    def ended(index: int, group: dict[str, Any]) -> None:
        found.append(group)
        if len(found) == 2 * ROUNDS:
            rows.append(judged(*wanted[index // (2 * ROUNDS)], found))
            save(chosen.json, {"bytes": NBYTES, "rows": rows, "kinds": report(rows)})
            found.clear()

    with made(["400mbit"] * (MOST + 1)):
        run_groups(groups, timeout=chosen.minutes * 60, ended=ended)


if __name__ == "__main__":
    main()

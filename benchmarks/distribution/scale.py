"""The source's experiment on 30, 100 and 298 emulated hosts: models a second, tree against sharded, each with its best
parameter (table 1), the busiest relay's bandwidth (table 2), and our own schemes beside them.

`python -m benchmarks.distribution.scale --hosts 100` (or 30, or 298); needs root. Rates and S are scaled down so that
the machine's cores are not the limit: what counts is S/B, which the table gives as the bound. Sealed loop: the next
model leaves when every host has sealed the last. Bytes are those that each relay's executor counted, headers included;
where the run was ended before relays could say them, there are none."""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.distribution import cluster
from benchmarks.distribution.cases import SEALED, case, efficiency, made, modeled, run_cases, summarize
from benchmarks.distribution.schemes import BINOMIAL, SCATTER_RING, TWO_TREE
from benchmarks.harness import arguments, print_table, save
from ddrl.distribution.schemes import make_plan, preset_relays
from ddrl.distribution.simulator import Network, simulate

# Rate, bytes, the source's m (at 30 hosts a tenth of them, as in its presets), bytes of a packet (fewer and larger: 299
# hosts share these cores).
SCALE = {
    30: ("10mbit", 4_000_000, 3, 1500),
    100: ("2500kbit", 1_000_000, preset_relays(100), 1500),
    298: ("2mbit", 2_000_000, preset_relays(298), 9000),
}
LIMIT = 900  # s of measurement; what was done until then counts


def cases(
    hosts: int, relays: int, rate: str, nbytes: int, short: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ours, which are quick and run several times, and theirs; the tree with the fan-out that the simulator finds
    best."""
    ideal = Network.equal(hosts, cluster.rate_bytes(rate), latency=1e-3, message_seconds=1e-4)
    fanout = min(
        range(4, 25), key=lambda value: simulate(make_plan("tree", hosts, nbytes, fanout=value), ideal).seconds
    )
    ours = [case("auto", 3, label="auto"), case("auto", 9 if hosts <= 100 else 7, 2, label="auto")]
    if hosts <= 100:
        ours.insert(1, case("stripes", 3, label="stripes 3, 8 kB chunks", fanout=3, chunk_bytes=1 << 13))
    middle = round((relays * hosts) ** 0.5)
    theirs = [
        case("sharded", 1, label=f"sharded m={relays}, whole shards (the source's preset)", relays=relays),
        case("tree", 1, label=f"tree, 2 levels, best fan-out {fanout}", fanout=fanout, depth=2),
        case("sharded", 2, label=f"sharded m={middle}, whole shards", relays=middle, limit=45),
        case(TWO_TREE, 2, label="two_tree, 8 kB chunks", chunk_bytes=1 << 13),
    ]
    if (
        hosts <= 100
    ):  # a relay on each of 298 hosts would open 88,000 connections, which takes two cores longer than all the rest
        theirs += [
            case("sharded", 2, label=f"sharded m={hosts}, whole shards", relays=hosts, limit=30),
            case("chain", 2, label="chain, 8 kB chunks", chunk_bytes=1 << 13),
            case(BINOMIAL, 1),
            case(SCATTER_RING, 2, limit=45),
        ]
    if hosts <= 30:
        theirs.append(case("direct", 1))
    return ours[:1] if short else ours, theirs[:1] if short else theirs


def report(
    path: Any,
    found: dict[str, Any],
    hosts: int,
    rate: str,
    nbytes: int,
    run: dict[str, Any],
    extra: list[dict[str, Any]],
) -> None:
    """Both tables, and the JSON of all sizes measured so far."""
    rates = [cluster.rate_bytes(rate)] * (hosts + 1)
    bound = efficiency(rates, nbytes, 1.0)
    today = {"date": time.strftime("%Y-%m-%d")}
    rows = [
        row | today for row in summarize(run["results"], rates, nbytes, modeled(rates, run["links"], SCALE[hosts][3]))
    ]
    fresh = {(row["scheme"], row["mode"]) for row in rows}
    rows += [row for row in extra if (row["scheme"], row["mode"]) not in fresh]
    print(
        f"\n{hosts} hosts, {rate} each way, S = {nbytes / 1e6:g} MB, bound {bound:.2f} s a model\ntable 1: models a "
        "second"
    )
    names = (
        "scheme",
        "mode",
        "models",
        "seconds",
        "low",
        "high",
        "models_per_second",
        "efficiency",
        "simulated",
        "cpu",
    )
    print_table(
        ["scheme", "mode", "models", "s a model", "low", "high", "models/s", "efficiency", "simulated s", "cpu busy"],
        [[row.get(name, "") for name in names] for row in rows],
    )
    print("table 2: bandwidth of the busiest relay")
    print_table(
        ["scheme", "mode", "it sends S x", "bytes/s", "of its link", "root sends S x", "efficiency"],
        [
            [
                row["scheme"],
                row["mode"],
                row["busiest_relay_sends"],
                row["busiest_relay_sends"] * nbytes / row["seconds"],
                row["busiest_relay_sends"] * nbytes / row["seconds"] / rates[0],
                row["root_sends"],
                row["efficiency"],
            ]
            for row in rows
            if row.get("busiest_relay_sends")
        ],
    )
    closed = {row["scheme"]: row["models_per_second"] for row in rows if row["mode"] == SEALED}
    sharded = {name: value for name, value in closed.items() if name.startswith("sharded")}
    trees = [value for name, value in closed.items() if name.startswith("tree")]
    preset = [value for name, value in sharded.items() if "preset" in name]
    auto = closed.get("auto", 0.0)
    ratios: dict[str, float] = {}
    if trees and sharded:
        ratios = {
            "sharded_preset_over_tree": preset[0] / trees[0],
            "auto_over_tree": auto / trees[0],
            "auto_over_sharded_preset": auto / preset[0],
        }
        if len(sharded) > 1:
            ratios |= {
                "sharded_best_over_tree": max(sharded.values()) / trees[0],
                "auto_over_sharded_best": auto / max(sharded.values()),
            }
        print("  ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    found[str(hosts)] = {
        "rate": rate,
        "bytes": nbytes,
        "mtu": SCALE[hosts][3],
        "bound_seconds": bound,
        "links": run["links"],
        "rows": rows,
        "ratios": ratios,
    }
    save(path, found)


def main() -> None:
    parser = arguments("distribution_scale", __doc__ or "")
    parser.add_argument(
        "--hosts", type=int, choices=sorted(SCALE), default=100, help="beside the trainer's (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of our own schemes (%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="s of measurement; what was done until then counts (%(default)s)"
    )
    parser.add_argument(
        "--only",
        default="",
        help="time only schemes whose names begin so (auto,sharded), beside what the JSON holds of the others",
    )
    chosen = parser.parse_args()
    hosts = chosen.hosts
    rate, nbytes, relays, mtu = SCALE[hosts]
    found: dict[str, Any] = {}
    path = chosen.json.with_stem(f"{chosen.json.stem}_{hosts}")
    ours, theirs = cases(hosts, relays, rate, nbytes, chosen.short)
    others: list[dict[str, Any]] = []
    if chosen.only and path.exists():
        names = tuple(chosen.only.split(","))
        ours, theirs = ([one for one in some if one["label"].startswith(names)] for some in (ours, theirs))
        known = json.loads(path.read_text())[str(hosts)]
        if (known["rate"], known["bytes"]) != (rate, nbytes):
            raise SystemExit(
                f"{path} holds figures of {known['rate']} and {known['bytes']} bytes, not of {rate} and {nbytes}: "
                "leave out --only"
            )
        others = known["rows"]
    with made([rate] * (hosts + 1), mtu):
        begun = time.monotonic()
        run = run_cases(nbytes, ours + theirs + ours * (0 if chosen.short else chosen.rounds - 1), timeout=chosen.limit)
        print(f"{time.monotonic() - begun:.0f} s")
        report(path, found, hosts, rate, nbytes, run, others)


if __name__ == "__main__":
    main()

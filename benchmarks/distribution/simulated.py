"""Simulated only: 298 to 10,000 hosts, S = 20 MB, 10 GbE each way, 50 us a message: each scheme with its best settings,
and the bound.

`python -m benchmarks.distribution.simulated`. Stripes run in the simulator; the others by their closed forms, which the
simulator meets on equal links (tests/distribution/test_simulator.py)."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import arguments, print_table, save
from ddrl.distribution import simulator as costs
from ddrl.distribution.schemes import make_plan
from ddrl.distribution.simulator import Network, simulate

S = 20e6
B = 1.25e9
a = 50e-6


def stripes(hosts: int) -> tuple[float, dict[str, int]]:
    """The best of a few settings that the closed form likes."""
    settings = [
        {"fanout": fanout, "chunk_bytes": size} for fanout in (2, 3, 4, 6) for size in (1 << 17, 1 << 18, 1 << 19)
    ]
    settings.sort(
        key=lambda chosen: costs.stripes_seconds(hosts, S, B, a, chosen["fanout"], -(-int(S) // chosen["chunk_bytes"]))
    )
    network = Network.equal(hosts, B, message_seconds=a)
    return min(
        ((simulate(make_plan("stripes", hosts, int(S), **chosen), network).seconds, chosen) for chosen in settings[:3]),
        key=lambda result: result[0],
    )


def main() -> None:
    parser = arguments("distribution_simulated", __doc__ or "")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = []
    for hosts in (298, 1000) if chosen.short else (298, 1000, 3000, 10_000):
        own, settings = stripes(hosts)
        fanouts = range(2, 200)
        seconds = {
            "direct": costs.direct_seconds(hosts, S, B, a),
            "tree, best fan-out": min(costs.tree_seconds(hosts, S, B, a, fanout) for fanout in fanouts),
            "sharded m=30": costs.sharded_seconds(hosts, S, B, a, 30),
            "sharded, best m": costs.sharded_seconds(hosts, S, B, a, costs.best_relays(hosts, S, B, a)),
            "binomial": costs.binomial_seconds(hosts, S, B, a),
            "scatter + ring": costs.ring_seconds(hosts, S, B, a),
            "chain": costs.chain_seconds(hosts, S, B, a, costs.best_chunks(hosts, S, B, a)),
            "two trees": costs.two_tree_seconds(hosts, S, B, a, costs.best_two_tree_chunks(hosts, S, B, a)),
            f"stripes {settings['fanout']}, {settings['chunk_bytes'] >> 10} KiB chunks (simulated)": own,
        }
        bound = costs.bound_seconds(hosts, S, B, a)
        for name, value in seconds.items():
            rows.append({"hosts": hosts, "scheme": name, "seconds": value, "efficiency": bound / value, "bound": bound})
            table.append([hosts, name, value * 1e3, bound / value])
    print_table(["hosts", "scheme", "ms to the last host", "efficiency"], table)
    save(chosen.json, {"bytes": S, "bytes_per_second": B, "message_seconds": a, "rows": rows})


if __name__ == "__main__":
    main()

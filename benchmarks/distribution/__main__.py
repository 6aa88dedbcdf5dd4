"""Every scheme on 16 emulated hosts at 200 Mbit/s each way, S = 5 MB, beside Ray's object store; simulator beside
measurement. Beside the tuned broadcasts of others: `benchmarks.distribution.tuned`.

`python -m benchmarks.distribution [--ray-python PYTHON]`; needs root (network namespaces). Sealed loop: the next model
leaves when every host has sealed the last. Streaming: several models on their way, timed in the steady state.
Efficiency is bound / measured, the bound on the links' raw rate, of which a packet's frame takes 4.4 %. The whole list
is run several times; medians over all rounds count, lows and highs stand beside them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.distribution import cluster
from benchmarks.distribution.cases import SEALED, case, efficiency, made, modeled, run_groups, summarize
from benchmarks.distribution.schemes import BINOMIAL, SCATTER_RING, TWO_TREE
from benchmarks.harness import arguments, print_table, save


def schemes(short: bool) -> list[dict[str, Any]]:
    """What is timed, sealed loop and streaming in turn."""
    closed = [
        case("auto", label="auto"),
        case("stripes", label="stripes 3, 32 kB chunks", fanout=3, chunk_bytes=1 << 15),
        case("stripes", label="stripes 4, 32 kB chunks", fanout=4, chunk_bytes=1 << 15),
        case("sharded", label="sharded, 20 kB chunks on arrival", chunk_bytes=20_000),
        case("sharded", label="sharded, 64 kB chunks on arrival", chunk_bytes=64_000),
        case(TWO_TREE, label="two_tree, 32 kB chunks", chunk_bytes=1 << 15),
        case("chain", 4, label="chain, 32 kB chunks", chunk_bytes=1 << 15),
        case("sharded", 3, label="sharded m=4, whole shards", relays=4),
        case("sharded", 3, label="sharded m=16, whole shards"),
        case(SCATTER_RING, 3),
        case(BINOMIAL, 3),
        case("tree", 2, label="tree 4 x 4", fanout=4, depth=2),
        case("direct", 1),
    ]
    streaming = [
        case("auto", 20, 3, label="auto"),
        case("stripes", 20, 3, label="stripes 4, 32 kB chunks", fanout=4, chunk_bytes=1 << 15),
        case("sharded", 20, 3, label="sharded, 20 kB chunks on arrival", chunk_bytes=20_000),
        case("sharded", 20, 3, label="sharded, 64 kB chunks on arrival", chunk_bytes=64_000),
        case(TWO_TREE, 16, 3, label="two_tree, 32 kB chunks", chunk_bytes=1 << 15),
        case("chain", 16, 3, label="chain, 32 kB chunks", chunk_bytes=1 << 15),
        case(SCATTER_RING, 9, 3),
    ]
    return closed[:3] + streaming[:2] if short else closed + streaming


def ray(python: str, hosts: int, nbytes: int) -> dict[str, Any]:
    """Ray's object store on the same cluster: {"seconds"} or {"failed"}."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ray.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.distribution.ray",
                "--hosts",
                str(hosts),
                "--bytes",
                str(nbytes),
                "--ray-python",
                python,
                str(out),
            ],
            check=False,
            timeout=400,
        )
        return json.loads(out.read_text()) if out.exists() else {"failed": "it gave no result"}


def report(chosen: Any, run: dict[str, Any], others: list[dict[str, Any]], rays: dict[str, Any]) -> None:
    """Print the table and write the JSON."""
    rates = [cluster.rate_bytes(chosen.rate)] * (chosen.hosts + 1)
    nbytes = chosen.bytes
    if "seconds" in rays:
        others = [*others, {"label": f"Ray {rays['version']}, object store", "periods": rays["seconds"]}]
    rows = summarize(run["results"], rates, nbytes, modeled(rates, run["links"]))
    for other in others:
        measured = statistics.median(other["periods"])
        rows.append(
            {
                "scheme": other["label"],
                "mode": SEALED,
                "seconds": measured,
                "low": min(other["periods"]),
                "high": max(other["periods"]),
                "models": len(other["periods"]),
                "models_per_second": 1 / measured,
                "efficiency": efficiency(rates, nbytes, measured),
            }
        )
    errors = [abs(row["simulated"] / row["seconds"] - 1) for row in rows if "simulated" in row]
    print(
        f"\n{chosen.hosts} hosts, {chosen.rate} each way, S = {nbytes / 1e6:g} MB, bound "
        f"{efficiency(rates, nbytes, 1.0):.3f} s a model"
    )
    columns = (
        "scheme",
        "mode",
        "seconds",
        "low",
        "high",
        "models_per_second",
        "efficiency",
        "simulated",
        "root_sends",
        "busiest_relay_sends",
        "cpu",
    )
    print_table(
        [
            "scheme",
            "mode",
            "s a model",
            "low",
            "high",
            "models/s",
            "efficiency",
            "simulated s",
            "root sends S x",
            "busiest relay S x",
            "cpu busy",
        ],
        [[row.get(name, "") for name in columns] for row in rows],
    )
    print(f"simulator against measurement: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    save(
        chosen.json,
        {
            "hosts": chosen.hosts,
            "rate": chosen.rate,
            "bytes": nbytes,
            "bound_seconds": efficiency(rates, nbytes, 1.0),
            "links": run["links"],
            "rows": rows,
            "simulator_median_error": statistics.median(errors),
            "ray": rays,
            "trace": run["traced"],
        },
    )


def main() -> None:
    parser = arguments("distribution", __doc__ or "")
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--bytes", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="the whole list is run so often (%(default)s)")
    parser.add_argument(
        "--ours", action="store_true", help="time our own schemes only, beside what the JSON holds of the others"
    )
    parser.add_argument("--ray-python", default="", help="an interpreter with Ray, to time its object store too")
    chosen = parser.parse_args()
    with made([chosen.rate] * (chosen.hosts + 1)):
        traced = case("stripes", 3, fanout=3, chunk_bytes=1 << 15)
        run, small = run_groups(
            [
                {
                    "nbytes": chosen.bytes,
                    "cases": schemes(chosen.short),
                    "rounds": 1 if chosen.short else chosen.rounds,
                },
                {"nbytes": 1_000_000, "hosts": min(8, chosen.hosts), "cases": [traced], "trace": True},
            ],
            timeout=400,
        )
        run["traced"] = {
            "scheme": traced["scheme"],
            "parameters": traced["parameters"],
            "hosts": min(8, chosen.hosts),
            "bytes": 1_000_000,
            "sends": small["trace"],
        }
        if chosen.ours:
            known = json.loads(chosen.json.read_text())
            kept = [
                {"label": row["scheme"], "periods": [row["low"], row["seconds"], row["high"]]}
                for row in known["rows"]
                if "is" not in row
            ]
            report(chosen, run, kept, {name: value for name, value in known["ray"].items() if name != "seconds"})
            return
        report(chosen, run, [], {})
        if chosen.ray_python:
            report(chosen, run, [], ray(chosen.ray_python, chosen.hosts, chosen.bytes))


if __name__ == "__main__":
    main()

"""The broadcasts at their best tuning, in turn: our own schemes by chunk size, MPI's algorithms by segment size, a
pipeline in plain mpi4py, the same plans over ZeroMQ, and torch's gloo.

`python -m benchmarks.distribution.tuned sweep`, then `... duel`; --hosts, --rate, --bytes (16, 100mbit, 5 MB). Needs
root (network namespaces). The sweep runs everything a few times. The duel takes the best of each kind, by the sweep,
and times it round by round with auto: one job, the same processes and connections. All are sealed loops: the next model
leaves when every host has the last one. MPI's ranks spin and give way (mpi_yield_when_idle), as its users would set it
here. Processor seconds are those of the ranks themselves, a relay's share; what the kernel does for packets counts only
where it does it in a rank's name."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from benchmarks.distribution import cluster
from benchmarks.distribution.cases import case, efficiency, made, run_groups
from benchmarks.distribution.mpi import BCAST_ALGORITHMS
from benchmarks.distribution.schemes import TWO_TREE
from benchmarks.harness import arguments, print_table, ratios, save

KIB = 1 << 10
SEGMENTED = (3, 5, 4, 2)  # MPI's algorithms that pipeline segments: pipeline, binary, split binary, chain
WHOLE = (0, 9)  # its own choice, and the best of those that send parts of models
KINDS = ("MPI_Bcast", "mpi4py pipeline", "ZeroMQ", "gloo")


def ours(sizes: Sequence[int], models: int, limit: float) -> list[dict[str, Any]]:
    """Schemes by chunk size, auto first."""
    cases = [case("auto", models, label="auto", limit=limit)]
    for size in sizes:
        shown = f"{size / KIB:g} KiB"
        cases.append(case(TWO_TREE, models, label=f"two_tree, {shown}", limit=limit, chunk_bytes=size))
        for fanout in (3, 4):
            label = f"stripes {fanout}, {shown}"
            cases.append(case("stripes", models, label=label, limit=limit, fanout=fanout, chunk_bytes=size))
        cases.append(case("chain", models, label=f"chain, {shown}", limit=limit, chunk_bytes=size))
    return cases


def theirs(sizes: Sequence[int], models: int, limit: float) -> list[dict[str, Any]]:
    """Everything compared with."""
    rivals: list[dict[str, Any]] = []

    def add(label: str, kind: str, **options: Any) -> None:
        rivals.append({"label": label, "kind": kind, "models": models, "limit": limit, **options})

    for size in sizes:
        shown = f"{size / KIB:g} KiB"
        for number in SEGMENTED:
            add(f"MPI_Bcast, {BCAST_ALGORITHMS[number]}, {shown}", "bcast", algorithm=number, segment=size)
        add(f"mpi4py pipeline, {shown}", "pipeline", chunk=size)
        for scheme, extra in (("chain", {}), ("stripes", {"fanout": 3})):
            add(f"ZeroMQ, {scheme}, {shown}", "zeromq", scheme=scheme, chunk_bytes=size, **extra)
        add(f"gloo, {8 * size / KIB:g} KiB", "gloo", piece=8 * size)
    for number in WHOLE:
        add(f"MPI_Bcast, {BCAST_ALGORITHMS[number]}", "bcast", algorithm=number, segment=0)
    return rivals


def rows_of(results: Iterable[dict[str, Any]], hosts: int, rate: str, nbytes: int) -> list[dict[str, Any]]:
    """One row a label: rounds of the same together."""
    together: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        together.setdefault(result["label"], []).append(result)
    rates = [cluster.rate_bytes(rate)] * (hosts + 1)
    rows: list[dict[str, Any]] = []
    for label, rounds in together.items():
        periods = [period for result in rounds for period in result["periods"]]
        middle = statistics.median(periods)
        cpu = statistics.median(result["cpu"] for result in rounds)
        spent = [result["relay_seconds"] for result in rounds if "relay_seconds" in result]  # else it was ended early
        rows.append(
            {
                "label": label,
                "date": time.strftime("%Y-%m-%d"),
                "seconds": middle,
                "low": min(periods),
                "high": max(periods),
                "models": len(periods),
                "efficiency": efficiency(rates, nbytes, middle),
                "cpu": cpu,
                "processor_seconds_per_gb_and_relay": statistics.median(spent) / (nbytes / 1e9) if spent else None,
                "is": [rounds[0].get("scheme"), rounds[0].get("parameters")],
                "problems": [problem for result in rounds for problem in result["problems"]][:3],
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table, quickest first."""
    names = ("label", "seconds", "low", "high", "models", "efficiency", "cpu", "processor_seconds_per_gb_and_relay")
    print_table(
        ["scheme", "s a model", "low", "high", "models", "efficiency", "cpu busy", "cpu s/GB/relay"],
        [[row[name] for name in names] for row in sorted(rows, key=lambda row: row["seconds"])],
    )


def finalists(swept: dict[str, list[dict[str, Any]]], models: int, limit: float) -> tuple[list[Any], list[Any]]:
    """Of the sweep: auto and the best other scheme of ours; the two best of MPI, and the best of each other kind."""
    order = sorted(swept["rows"], key=lambda row: row["seconds"])
    labels = [row["label"] for row in order if not row["problems"]]
    own = {one["label"]: one for one in swept["ours"]}
    others = {one["label"]: one for one in swept["theirs"]}
    best = next(label for label in labels if label in own and label != "auto")
    chosen = [
        label
        for kind in KINDS
        for label in [label for label in labels if label in others and label.startswith(kind)][: 1 + (kind == KINDS[0])]
    ]
    length = {"models": models, "limit": limit}
    return [{**own[label], **length} for label in ("auto", best)], [{**others[label], **length} for label in chosen]


def main() -> None:
    parser = arguments("distribution_tuned", __doc__ or "")
    parser.add_argument("action", choices=("sweep", "duel"))
    parser.add_argument("--hosts", type=int, default=16, help="beside the trainer's (%(default)s)")
    parser.add_argument("--rate", default="100mbit", help="of every link each way (%(default)s)")
    parser.add_argument("--bytes", type=int, default=5_000_000, help="of a model (%(default)s)")
    parser.add_argument(
        "--mtu", type=int, default=1500, help="bytes of a packet (%(default)s; 9000 where very many share few cores)"
    )
    parser.add_argument("--sizes", default="8,16,32", help="KiB of chunks and segments (%(default)s)")
    parser.add_argument("--only", default="", help="sweep only labels that begin so, separated by semicolons")
    parser.add_argument("--models", type=int, default=4, help="of each, and round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="of the duel (%(default)s)")
    parser.add_argument("--seconds", type=float, default=150, help="of measurement at most (%(default)s)")
    parser.add_argument("--standing", action="store_true", help="the cluster has been made with `cluster up` already")
    chosen = parser.parse_args()
    hosts = chosen.hosts
    rate = chosen.rate
    nbytes = chosen.bytes
    path = chosen.json.with_stem(f"{chosen.json.stem}_{hosts}")
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found = {name: known[name] for name in ("sweep", "duel") if name in known}
    limit = 0.1 * chosen.seconds
    asked = {"hosts": hosts, "rate": rate, "bytes": nbytes, "mtu": chosen.mtu}
    if chosen.action == "sweep":
        sizes = [int(float(size) * KIB) for size in chosen.sizes.split(",")]
        own = ours(sizes, chosen.models, limit)
        others = theirs(sizes, chosen.models, limit)
        names = tuple(chosen.only.split(";"))
        own, others = ([one for one in some if one["label"].startswith(names)] for some in (own, others))
        groups = [{"nbytes": nbytes, "rivals": others}, {"nbytes": nbytes, "cases": own}]
    else:
        if "sweep" not in known or any(known.get(name, 1500) != value for name, value in asked.items()):
            raise SystemExit(f"{path} holds no sweep of {asked}: run it first")
        own, others = finalists(known["sweep"], chosen.models, limit)
        streaming = case("auto", 3 * chosen.models, 3, label="auto, 3 in flight", limit=limit)
        groups = [{"nbytes": nbytes, "cases": [*own, streaming]}, {"nbytes": nbytes, "rivals": others}] * chosen.rounds
    with nullcontext() if chosen.standing else made([rate] * (hosts + 1), chosen.mtu):
        groups = run_groups(groups, timeout=chosen.seconds)
    results = [result for group in groups for result in group["results"]]
    rows = rows_of(results, hosts, rate, nbytes)
    show(rows)
    if chosen.action == "sweep":
        found["sweep"] = {"rows": rows, "ours": own, "theirs": others}
    else:
        medians: dict[str, list[float]] = {}
        for result in results:
            medians.setdefault(result["label"], []).append(statistics.median(result["periods"]))
        against = {
            label: ratios(values[: len(medians["auto"])], medians["auto"][: len(values)])
            for label, values in medians.items()
            if label != "auto"
        }
        for label, ratio in against.items():
            print(f"{label}: {ratio.median:.3f} x auto's seconds, round by round {ratio.low:.3f} to {ratio.high:.3f}")
        found["duel"] = {"rows": rows, "seconds_over_auto": against}
    save(path, {**asked, "bound_seconds": nbytes / cluster.rate_bytes(rate), **found})


if __name__ == "__main__":
    main()

"""Codecs in models a second: real versions of Pong's network by the library's relays to emulated hosts, each codec in
turn.

`python -m benchmarks.distribution.coded [--versions FOLDER]`; needs root (network namespaces). The versions are a
short training's, 10 updates apart, kept in FOLDER for the next run. Every codec goes by the same plan, sealed loop and
streaming; rounds alternate. The first model of a case goes whole in every codec and is not counted, nor are those on
their way with it. Efficiency against two bounds: of the model's own bytes (a codec can exceed 1), and of the bytes that
the root sent, counted with headers."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distribution import cluster
from benchmarks.distribution.cases import case, made, run_groups
from benchmarks.harness import arguments, print_table, save
from ddrl.core.rows import ParameterLayout
from ddrl.distribution.simulator import bound_unequal

CODECS = ("none", "bf16", "int8", "xor_zstd")
IN_FLIGHT = 3  # versions; models of a case
CLOSED = 4
STREAMED = 12
SPARED = 5  # first models of a streaming case that are not counted: those told whole, and those begun beside them
CLUSTERS = ((8, "50mbit", 2), (2, "1gbit", 5))  # hosts beside the trainer's, rate of every link each way, rounds
PERIOD = 10  # updates between versions; environment steps of training
TASK = "pong"
STEPS = 2_000


def train_versions(folder: Path, short: bool) -> None:
    """Train for a while and keep the last versions, `PERIOD` updates apart: FOLDER/versions.npy [STREAMED, nbytes] and
    FOLDER/manifest.json."""
    from benchmarks.distribution.codecs import SHORT, Diary, train

    class Last(Diary):
        """Keeps the last versions."""

        def __init__(self, updates: int) -> None:
            super().__init__(updates)
            self.wanted = {updates - 50 - PERIOD * place for place in range(STREAMED)}

    task, steps = ("lunarlander", SHORT["lunarlander"]) if short else (TASK, STEPS)
    with tempfile.TemporaryDirectory() as run:
        diary, _, _, layout, _ = train(task, steps, Path(run), Last)
    if len(diary.kept) < STREAMED:
        raise SystemExit(f"only {len(diary.kept)} of {STREAMED} versions were kept: train for more than {steps} steps")
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "versions.npy", np.stack([diary.kept[update] for update in sorted(diary.kept)]))
    (folder / "manifest.json").write_bytes(layout.to_json())


def measure(folder: Path, hosts: int, rate: str, rounds: int, timeout: float) -> list[dict[str, Any]]:
    """Each codec on a cluster of that rate, `rounds` times in turn: one row a codec and mode."""
    manifest = (folder / "manifest.json").read_text()
    nbytes = ParameterLayout.from_json(manifest.encode()).nbytes
    plan = {"fanout": min(3, hosts), "chunk_bytes": 1 << 16}
    cases = [case("stripes", CLOSED, **plan), case("stripes", STREAMED, IN_FLIGHT, **plan) | {"warm": SPARED}]
    groups = [
        {
            "nbytes": nbytes,
            "codec": codec,
            "manifest": manifest,
            "versions": str(folder / "versions.npy"),
            "cases": cases,
        }
        for _ in range(rounds)
        for codec in CODECS
    ]
    with made([rate] * (hosts + 1)):
        found = run_groups(groups, timeout=timeout)
    links = [cluster.rate_bytes(rate)] * (hosts + 1)
    rows = list[dict[str, Any]]()
    for index, mode in enumerate(("sealed loop", f"{IN_FLIGHT} in flight")):
        for place, codec in enumerate(CODECS):
            results = [one["results"][index] for one in found[place :: len(CODECS)] if len(one["results"]) > index]
            if not results:
                continue
            periods = [period for result in results for period in result["periods"]]
            seconds = statistics.median(periods)
            sent = statistics.median(steady_bytes(result) for result in results)
            rows.append(
                {
                    "rate": rate,
                    "hosts": hosts,
                    "mode": mode,
                    "codec": codec,
                    "seconds": seconds,
                    "low": min(periods),
                    "high": max(periods),
                    "rounds": len(results),
                    "models_per_second": 1 / seconds,
                    "root_bytes": sent,
                    "times_smaller": nbytes / sent,
                    "efficiency": bound_unequal(links, links, nbytes) / seconds,
                    "efficiency_of_coded": bound_unequal(links, links, sent) / seconds,
                    "cpu": statistics.median(result["cpu"] for result in results),
                    "refused": sum(len(result["problems"]) for result in results),
                }
            )
    return rows


def steady_bytes(result: dict[str, Any]) -> float:
    """Bytes that the root sent a model, between the ends of the models that are counted."""
    sent = result["sent_at_ends"]
    in_flight = result["versions_in_flight"]
    first = max(result["warm"], in_flight) - 1
    last = len(sent) - in_flight
    return (sent[last] - sent[first]) / (last - first)


def main() -> None:
    parser = arguments("distribution_codecs", __doc__ or "")
    parser.add_argument("--seconds", type=float, default=220, help="most for each cluster")
    parser.add_argument(
        "--versions", type=Path, help="a folder that keeps the versions; trained anew where it has none"
    )
    parser.add_argument("--train-only", action="store_true", help="make the versions and stop")
    chosen = parser.parse_args()
    if problem := cluster.available():
        raise SystemExit(f"skipped: {problem}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (chosen.versions or Path(temporary)).absolute()
        if not (folder / "versions.npy").exists():
            train_versions(folder, chosen.short)
        if chosen.train_only:
            return
        rows: list[dict[str, Any]] = []
        for hosts, rate, rounds in CLUSTERS:
            rows += measure(folder, hosts, rate, 1 if chosen.short else rounds, chosen.seconds)
            nbytes = int(np.load(folder / "versions.npy", mmap_mode="r").shape[1])
            save(
                chosen.json,
                {
                    "task": "lunarlander" if chosen.short else TASK,
                    "bytes": nbytes,
                    "updates_between": PERIOD,
                    "plan": "stripes 3 (2 hosts: 2), chunks of 64 KiB",
                    "rows": rows,
                },
            )
    names = (
        "hosts",
        "rate",
        "mode",
        "codec",
        "seconds",
        "low",
        "high",
        "models_per_second",
        "root_bytes",
        "times_smaller",
        "efficiency",
        "efficiency_of_coded",
        "cpu",
        "refused",
    )
    print_table(names, [[row[name] for name in names] for row in rows])


if __name__ == "__main__":
    main()

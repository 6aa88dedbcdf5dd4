"""Models to the hosts of an emulated cluster: our schemes beside others' best, each at its best tuning.

`python -m benchmarks.distribution tuned`; needs root (network namespaces). All hosts have equal links: 16 hosts, 100
Mbit/s, models of 5 MB unless options say otherwise. Our schemes by chunk size, MPI's algorithms by segment size, a
pipeline in mpi4py, our plans over ZeroMQ and torch's gloo: all of it is swept a few times unless the JSON holds a sweep
of the same setting; then the best of each kind takes turns with auto, on the same processes and connections (--rounds
0: the sweep alone).

Sealed loop: the next model leaves when every host has sealed the last. Streaming: several models are under way, timed
in the steady state. Efficiency is bound / measured, the bound on the links' raw rate, of which a packet's frame takes
4.4 %. Bytes are those that each relay's executor counted, headers included; where the run was ended before relays could
say them, there are none. MPI's ranks spin and give way (mpi_yield_when_idle). Processor seconds are those of the ranks;
what the kernel does for packets counts only where it does it in a rank's name. Rows of an earlier run in the same
setting that this run does not time again (--only) are kept.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.distribution import cluster
from benchmarks.distribution.mpi import BCAST_ALGORITHMS
from benchmarks.distribution.schemes import TWO_TREE
from benchmarks.harness import arguments, continued, mpi_environment, print_rows, ratios, save
from ddrl.distribution.links import Links
from ddrl.distribution.plan import Network, bound_unequal, simulate
from ddrl.distribution.schemes import make_plan

Rows = list[dict[str, Any]]
KIB = 1 << 10
SEALED = "sealed loop"
HEADERS = 52  # bytes of TCP and IP in a packet, within the MTU
FRAME = 14  # bytes of a packet's frame, beside the MTU
SEGMENTED = (3, 5, 4, 2)  # MPI's algorithms that pipeline segments: pipeline, binary, split binary, chain
WHOLE = (0, 9)  # its own choice, and the best of those that send parts of models
KINDS = ("MPI_Bcast", "mpi4py pipeline", "ZeroMQ", "gloo")


@dataclass(frozen=True)
class Setting:
    """The cluster and the model: hosts beside the trainer's, rate of every link each way, bytes, bytes of a packet."""

    hosts: int = 16
    rate: str = "100mbit"
    bytes: int = 5_000_000
    mtu: int = 1500

    @property
    def rates(self) -> list[float]:
        """Bytes/s of each link, the trainer's first."""
        return [cluster.rate_bytes(self.rate)] * (self.hosts + 1)

    @property
    def bound(self) -> float:
        """Least seconds a model."""
        return bound_unequal(self.rates, self.rates, self.bytes)

    def network(self, links: dict[str, Any]) -> Network:
        """The cluster as the simulator sees it: the links as shaped, costs as measured."""
        payload = [rate * (self.mtu - HEADERS) / (self.mtu + FRAME) for rate in self.rates]
        return replace(Links(**links).network(), up=payload, down=payload)


SMALL = Setting(4, "100mbit", 500_000)  # of --short


def case(
    scheme: str, models: int = 6, in_flight: int = 1, *, label: str = "", limit: float = 60.0, **parameters: Any
) -> dict[str, Any]:
    """A scheme to time: models sent, versions under way at once, most seconds; chunk sizes are shown in the label."""
    shown = label or scheme.rpartition(":")[2]
    if "chunk_bytes" in parameters and scheme != "sharded":
        shown += f", {parameters['chunk_bytes'] / KIB:g} KiB"
    return {
        "scheme": scheme,
        "parameters": parameters,
        "models": models,
        "versions_in_flight": in_flight,
        "label": shown,
        "limit": limit,
    }


def sweep(setting: Setting, options: Any) -> list[dict[str, Any]]:
    """Our schemes by chunk size, and everything compared with by segment size."""
    sizes = [int(float(size) * KIB) for size in options.sizes.split(",")]
    length = {"limit": 0.1 * options.seconds}
    models = options.models
    own = [case("auto", models, **length)]
    others: list[dict[str, Any]] = []

    def rival(label: str, kind: str, **parameters: Any) -> None:
        others.append({"label": label, "kind": kind, "models": models, **length, **parameters})

    for size in sizes:
        shown = f"{size / KIB:g} KiB"
        own.append(case(TWO_TREE, models, label="two_tree", **length, chunk_bytes=size))
        for fanout in (3, 4):
            own.append(case("stripes", models, label=f"stripes {fanout}", **length, fanout=fanout, chunk_bytes=size))
        own.append(case("chain", models, **length, chunk_bytes=size))
        for number in SEGMENTED:
            rival(f"MPI_Bcast, {BCAST_ALGORITHMS[number]}, {shown}", "bcast", algorithm=number, segment=size)
        rival(f"mpi4py pipeline, {shown}", "pipeline", chunk=size)
        rival(f"ZeroMQ, chain, {shown}", "zeromq", scheme="chain", chunk_bytes=size)
        rival(f"ZeroMQ, stripes, {shown}", "zeromq", scheme="stripes", fanout=3, chunk_bytes=size)
        rival(f"gloo, {8 * size / KIB:g} KiB", "gloo", piece=8 * size)
    for number in WHOLE:
        rival(f"MPI_Bcast, {BCAST_ALGORITHMS[number]}", "bcast", algorithm=number, segment=0)
    return [group(setting, rivals=others), group(setting, cases=own)]


def duel(setting: Setting, options: Any, swept: Rows) -> list[dict[str, Any]]:
    """Of what was swept: auto and the best other scheme of ours, the two best of MPI, and the best of each other kind,
    in turn."""
    order = [row["scheme"] for row in sorted(swept, key=lambda row: row["seconds"]) if not row["problems"]]
    rivals, cases = sweep(setting, options)
    own = {one["label"]: one for one in cases["cases"]}
    others = {one["label"]: one for one in rivals["rivals"]}
    best = next((label for label in order if label in own and label != "auto"), None)
    if best is None:
        raise SystemExit(f"the sweep did not come to our own schemes within --seconds {options.seconds:g}: allow more")
    streaming = case("auto", 3 * options.models, 3, limit=own["auto"]["limit"])
    chosen: list[dict[str, Any]] = []
    for kind in KINDS:
        found = [others[label] for label in order if label in others and label.startswith(kind)]
        chosen += found[: 2 if kind == "MPI_Bcast" else 1]
    return [
        group(setting, cases=[own["auto"], own[best], streaming]),
        group(setting, rivals=chosen),
    ] * options.rounds


def group(setting: Setting, **what: Any) -> dict[str, Any]:
    """What `ranks` runs at once, of this setting's model."""
    return {"nbytes": setting.bytes, **what}


def run_groups(groups: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Time groups of cases in one mpirun, whose processes and connections stay; one {"links", "results"} a group, in
    order. What was done when `seconds` ended it counts."""
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        out = Path(folder) / "out.json"
        said = Path(folder) / "errors"
        request.write_text(json.dumps(list(groups)))
        program = [sys.executable, "-m", "benchmarks.distribution.ranks", str(request), str(out)]
        command = cluster.mpirun(program, environment=cluster.variables(OMPI_MCA_coll_tuned_use_dynamic_rules="1"))
        with said.open("w") as errors:
            process = subprocess.Popen(command, env=mpi_environment(), stdin=subprocess.DEVNULL, stderr=errors)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
            try:
                code = process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        if code:
            cluster.end_processes()  # mpirun's daemons may be left
            print(f"the relays ended early ({code}): what was done until then counts\n{said.read_text()[-2500:]}")
        if not out.exists():
            raise SystemExit("the relays ended without a result")
        return json.loads(out.read_text())


def summarize(setting: Setting, groups: Sequence[dict[str, Any]]) -> Rows:
    """One row a label and mode, rounds together: medians, extremes, efficiency, what was sent, what the simulator
    says."""
    links = next((one["links"] for one in groups if "links" in one), None)
    together: dict[tuple[str, int], Rows] = {}
    for result in (result for one in groups for result in one["results"]):
        together.setdefault((result["label"], result.get("versions_in_flight", 1)), []).append(result)
    rows: Rows = []
    for (label, in_flight), rounds in together.items():
        periods = [period for result in rounds for period in result["periods"]]
        seconds = statistics.median(periods)
        used = [result["relay_seconds"] for result in rounds if not math.isnan(result.get("relay_seconds", math.nan))]
        row = {
            "scheme": label,
            "mode": SEALED if in_flight == 1 else f"{in_flight} in flight",
            "date": time.strftime("%Y-%m-%d"),
            "seconds": seconds,
            "low": min(periods),
            "high": max(periods),
            "models": len(periods),
            "rounds": len(rounds),
            "models_per_second": 1 / seconds,
            "efficiency": setting.bound / seconds,
            "cpu": statistics.median(result["cpu"] for result in rounds),
            "processor_seconds_per_gb_and_relay": statistics.median(used) / (setting.bytes / 1e9) if used else None,
            "problems": [problem for result in rounds for problem in result["problems"]][:3],
        }
        if "scheme" in rounds[0] and "root_bytes" in rounds[0]:  # auto may choose another plan in another round
            middle = min(rounds, key=lambda result: abs(statistics.median(result["periods"]) - seconds))
            assert links is not None
            simulated = [predicted(setting, result, setting.network(links)) for result in rounds[:3]]
            counted = middle.get("relay_bytes")
            row |= {
                "simulated": statistics.median(simulated),
                "root_sends": middle["root_bytes"] / setting.bytes,
                "busiest_relay_sends": max(counted) / setting.bytes if counted else None,
                "is": [middle["scheme"], middle["parameters"]],
            }
        rows.append(row)
    return rows


def predicted(setting: Setting, result: dict[str, Any], network: Network) -> float:
    """Simulated seconds a model of what was measured."""
    plan = make_plan(result["scheme"], setting.hosts, setting.bytes, **result["parameters"])
    in_flight = result["versions_in_flight"]
    if in_flight == 1:
        return simulate(plan, network).seconds
    return simulate(plan, network, models=3 * in_flight + 2, versions_in_flight=in_flight).period


def over_auto(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of each rival of a duel over auto's, round by round."""
    medians: dict[str, list[float]] = {}
    for result in (result for one in groups for result in one["results"]):
        if result.get("versions_in_flight", 1) == 1:
            medians.setdefault(result["label"], []).append(statistics.median(result["periods"]))
    auto = medians.pop("auto")
    found = {label: ratios(values[: len(auto)], auto[: len(values)]) for label, values in medians.items()}
    for label, ratio in found.items():
        print(f"{label}: {ratio} of auto's seconds, round by round")
    return found


def show(setting: Setting, rows: Rows) -> None:
    """The rows, quickest first."""
    shown = ["scheme", "mode", "seconds", "low", "high", "models", "models_per_second", "efficiency", "simulated"]
    shown += ["root_sends", "busiest_relay_sends", "cpu", "processor_seconds_per_gb_and_relay"]
    print(f"\n{setting.hosts} hosts, {setting.rate} each way, S = {setting.bytes / 1e6:g} MB, {setting.bound:.3f} s")
    print_rows(sorted(rows, key=lambda row: (row["mode"], row["seconds"])), shown)
    errors = [abs(row["simulated"] / row["seconds"] - 1) for row in rows if row.get("simulated")]
    if errors:
        print(f"simulator against measurement: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def main() -> None:
    parser = arguments("distribution", __doc__ or "")
    parser.add_argument("study", choices=["tuned"], nargs="?")
    parser.add_argument("--hosts", type=int, help="beside the trainer's (16)")
    parser.add_argument("--rate", help="of every link each way, as 20mbit (100mbit)")
    parser.add_argument("--bytes", type=int, help="of a model (5000000)")
    parser.add_argument("--mtu", type=int, help="bytes of a packet (9000 where very many hosts share few cores; 1500)")
    parser.add_argument("--rounds", type=int, default=3, help="of the duel (%(default)s)")
    parser.add_argument("--seconds", type=float, default=900, help="most of a measurement (%(default)s)")
    parser.add_argument("--only", default="", help="time only labels that begin so, separated by semicolons")
    parser.add_argument("--sizes", default="8,16,32", help="KiB of chunks and segments (%(default)s)")
    parser.add_argument("--models", type=int, default=4, help="of each in a round (%(default)s)")
    options = parser.parse_args()
    if options.short:
        options.rounds = 1
        options.models = 1
        options.sizes = "32"
    given = {"hosts": options.hosts, "rate": options.rate, "bytes": options.bytes, "mtu": options.mtu}
    setting = replace(SMALL if options.short else Setting(), **{key: of for key, of in given.items() if of is not None})
    if options.json == parser.get_default("json"):
        options.json = options.json.with_stem(f"distribution_tuned_{setting.hosts}")
    found = known(options.json, setting)
    if problem := cluster.available():
        raise SystemExit(f"skipped: {problem}")
    with cluster.made([setting.rate] * (setting.hosts + 1), setting.mtu):
        if options.only or "rows" not in found:
            found |= time_sweep(setting, options, found.get("rows", []))
        if options.rounds:
            found["duel"] = time_duel(setting, options, found["rows"])
    save(options.json, {**asdict(setting), "bound_seconds": setting.bound, **found})


def known(path: Path, setting: Setting) -> dict[str, Any]:
    """The rows that the JSON holds of this setting and this commit."""
    held = continued(path)
    if any(held.get(key) != value for key, value in asdict(setting).items()):
        return {}
    return {key: held[key] for key in ("links", "rows", "duel") if key in held}


def time_sweep(setting: Setting, options: Any, known_rows: Rows) -> dict[str, Any]:
    """Time a sweep; its rows, with those known before of what is not timed now."""
    names = tuple(options.only.split(";"))
    groups = sweep(setting, options)
    for one in groups:
        kind = "rivals" if "rivals" in one else "cases"
        one[kind] = [each for each in one[kind] if each["label"].startswith(names)]
    groups = [one for one in groups if one.get("rivals") or one.get("cases")]
    done = run_groups(groups, options.seconds)
    rows = summarize(setting, done)
    labels = {(row["scheme"], row["mode"]) for row in rows}
    rows += [row for row in known_rows if (row["scheme"], row["mode"]) not in labels]
    show(setting, rows)
    return {"links": next((one["links"] for one in done if "links" in one), None), "rows": rows}


def time_duel(setting: Setting, options: Any, swept: Rows) -> dict[str, Any]:
    """Time the best of each kind in turn with auto."""
    done = run_groups(duel(setting, options, swept), options.seconds)
    rows = summarize(setting, done)
    show(setting, rows)
    return {"rows": rows, "seconds_over_auto": over_auto(done)}


if __name__ == "__main__":
    main()

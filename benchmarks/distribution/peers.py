"""Broadcasts without `ddrl.run` beside shardcast (HTTP, a tree of servers) and torch's gloo, to emulated hosts.

`python -m benchmarks.distribution.peers --shardcast-python PYTHON`; needs root (network namespaces). One model at a
time: the time from the publish until every host has all of it in memory. Ours is `ddrl.distribution.join` with
scheme = auto and one version in flight, each chunk verified; shardcast's nodes verify the whole file by its checksum;
gloo (`torch.distributed.broadcast`) verifies nothing. In each round all take turns, each in processes of its own; the
first model of each is not counted. shardcast is given its tree, period of polls, shards and downloads at once by
--shardcast, for by its defaults it polls each 30 s; its pause after a shard that its upstream lacks is lowered from 2 s
to the period of polls. Bound: model over link rate, which no broadcast can beat.

A late process: one that comes when a version is there. Ours reads its host's memory; a host that comes late cannot join
a communicator of MPI, where shardcast downloads the model to it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.distribution import cluster
from benchmarks.harness import ROOT, Timing, arguments, mpi_environment, print_rows, ratios, save

NODE = ROOT / "benchmarks" / "peers" / "shardcast_node.py"
PRIVATE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /tmp && exec "$@"', "sh"]
LIMIT = 600.0  # for a model, and for what starts [s]
# shardcast's: tree, period of polls [s], shards a model, downloads at once of a node. Its servers serve one client at a
# time, and refuse more than 5 that wait.
TUNING = ("chain", "0.05", "10", "1")
TUNED = ("tree", "poll_seconds", "shards", "downloads")
LARGE = 100_000_000  # bytes of a model from which one a round is timed
GLOO_PIECE = 1 << 18  # bytes, at most a 16th of a model: as many broadcasts at once take less time than a whole one


# -- on the hosts: ours and gloo ---------------------------------------------------------------------------------------


def ranks(request: Path) -> None:
    """On every host, one rank: the models of each size by ours, then by gloo; rank 0 writes seconds by name."""
    import numpy as np
    from mpi4py import MPI

    from benchmarks.distribution.mpi import measure
    from ddrl.distribution import join
    from ddrl.distribution.requests import wait

    world = MPI.COMM_WORLD
    asked = json.loads(request.read_text())
    found: dict[str, list[float]] = {}
    for nbytes in asked["sizes"]:
        model = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
        times = np.zeros(asked["models"] + 1)
        readers = 1 if world.rank == 1 else 0
        with join(world, model, versions_in_flight=1, readers=1, pins=1, limit=LIMIT) as feed:
            for version in range(len(times)):
                wait([world.Ibarrier()])
                begun = time.monotonic()
                if world.rank == 0:
                    feed.publish(model, version)
                feed.wait(version - 1)
                times[version] = begun if world.rank == 0 else time.monotonic()
                wait([world.Ibarrier()])  # none spins in MPI while a model travels
            if readers:
                late = subprocess.run(
                    [sys.executable, "-m", "benchmarks.distribution.peers", "late", feed.name],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                times = np.append(times, float(late.stdout))
            wait([world.Ibarrier()])
        everyone = world.gather(times)
        if world.rank == 0:
            ends = np.max([each[: len(times)] for each in everyone[1:]], axis=0)
            found[f"ours {nbytes}"] = (ends - times)[1:].tolist()
            found[f"ours late {nbytes}"] = [float(everyone[1][-1])]
        gloo = measure(world, nbytes, "gloo", models=asked["models"], piece=min(GLOO_PIECE, nbytes // 16))
        found[f"gloo {nbytes}"] = gloo["periods"]
    if world.rank == 0:
        Path(asked["out"]).write_text(json.dumps(found))


def late(name: str) -> None:
    """A process that comes late to a host: seconds until the newest version is in its own arrays."""
    import numpy as np

    from ddrl.distribution import subscribe

    begun = time.monotonic()
    with subscribe(name) as feed, feed.pin() as pinned:
        np.array(pinned.arrays["0"])
    print(time.monotonic() - begun)


def by_mpi(sizes: Sequence[int], models: int) -> dict[str, list[float]]:
    """Seconds of each model, by name and size."""
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        out = Path(folder) / "out.json"
        request.write_text(json.dumps({"sizes": list(sizes), "models": models, "out": str(out)}))
        program = [sys.executable, "-m", "benchmarks.distribution.peers", "ranks", str(request)]
        command = cluster.mpirun(program, environment=cluster.variables(OMP_NUM_THREADS="1"))
        subprocess.run(command, env=mpi_environment(), check=True)
        return json.loads(out.read_text())


# -- shardcast ---------------------------------------------------------------------------------------------------------


def parents(tree: str, hosts: int) -> list[int]:
    """Of hosts 1 to n, the one that each downloads from: "star", "chain", or the most children of a host."""
    width = {"star": hosts, "chain": 1}.get(tree) or int(tree)
    return [(host - 1) // width for host in range(1, hosts + 1)]


class Shardcast:
    """Its nodes on all hosts, one a host."""

    def __init__(self, python: str, hosts: int, tree: str, *options: str) -> None:
        """options: period of polls [s], bytes a shard, downloads at once."""
        self._python = python
        self._options = options
        upstream = parents(tree, hosts)
        self.nodes = [self._start(0, "origin", 0)]
        for host, parent in enumerate(upstream, start=1):
            self.nodes.append(self._start(host, "middle" if host in upstream else "leaf", parent))

    def _start(self, host: int, role: str, parent: int) -> subprocess.Popen[str]:
        words = [self._python, "-W", "ignore", str(NODE), role, f"http://{cluster.address(parent)}:8000"]
        command = [*cluster.on_host(host), *PRIVATE, *words, *self._options]
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._line(node) != "up":
            raise SystemExit(f"shardcast's {role} on host {host} does not start")
        return node

    def _line(self, node: subprocess.Popen[str]) -> str:
        assert node.stdout is not None
        found = node.stdout.readline().strip()
        if not found:
            raise SystemExit("a node of shardcast has ended")
        return found

    def _tell(self, node: subprocess.Popen[str], line: str) -> None:
        assert node.stdin is not None
        node.stdin.write(line + "\n")
        node.stdin.flush()

    def broadcast(self, nbytes: int) -> float:
        """Seconds from the publish until the last host has verified the model."""
        self._tell(self.nodes[0], str(nbytes))
        begun, *ended = [float(self._line(node)) for node in self.nodes]
        return max(ended) - begun

    def late(self) -> float:
        """Seconds in which a further client on the last host downloads the newest version from the origin."""
        node = self._start(len(self.nodes) - 1, "late", 0)
        self._tell(node, "go")
        seconds = float(self._line(node))
        node.communicate()
        return seconds

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.kill()
            node.communicate()


def by_shardcast(options: Any, nbytes: int, models: int, tuning: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each model by shardcast with a TUNING."""
    tree, poll, shards, downloads = tuning
    nodes = Shardcast(options.shardcast_python, options.hosts, tree, poll, str(-(-nbytes // int(shards))), downloads)
    try:
        seconds = [nodes.broadcast(nbytes) for _ in range(models + 1)][1:]
        return {f"shardcast {nbytes}": seconds, f"shardcast late {nbytes}": [nodes.late()]}
    finally:
        nodes.close()


# -- all in turn -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = arguments("distribution_peers", __doc__ or "")
    parser.add_argument("--hosts", type=int, default=4, help="beside the trainer's (%(default)s)")
    parser.add_argument("--rate", default="200mbit", help="of every link each way (%(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 20_000_000], help="of models [bytes]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=int, default=3, help="of each in a round; one from 100 MB on (%(default)s)")
    parser.add_argument("--shardcast-python", required=True, help="an interpreter that has shardcast")
    parser.add_argument("--shardcast", nargs=4, action="append", help="one for each size: as TUNING")
    options = parser.parse_args()
    if options.short:
        options.rounds = 1
        options.models = 1
        options.sizes = [1_000_000]
    tunings = dict(zip(options.sizes, options.shardcast or [TUNING] * len(options.sizes), strict=True))
    if problem := cluster.available():
        raise SystemExit(f"skipped: {problem}")
    with cluster.made([options.rate] * (options.hosts + 1)):
        loads: list[float] = []
        found: dict[str, list[list[float]]] = {}  # by name and size, by round
        for _ in range(options.rounds):
            for nbytes in options.sizes:
                loads.append(os.getloadavg()[0])
                models = options.models if nbytes < LARGE else 1
                both = by_mpi([nbytes], models) | by_shardcast(options, nbytes, models, tunings[nbytes])
                for name, seconds in both.items():
                    found.setdefault(name, []).append(seconds)
            print(f"{ {name: round(statistics.median(rounds[-1]), 4) for name, rounds in found.items()} }", flush=True)
    script = "from importlib.metadata import version; print(version('shardcast'))"
    version = subprocess.run([options.shardcast_python, "-c", script], capture_output=True, text=True, check=True)
    figures: dict[str, Any] = {
        "hosts": options.hosts,
        "rate": options.rate,
        "load": statistics.median(loads),  # of the machine, other work and this one's, before each size
        "versions": {"shardcast": version.stdout.strip(), "torch": metadata.version("torch")},
        "sizes": {
            str(nbytes): of_size(found, nbytes, options) | {"tuning": dict(zip(TUNED, tunings[nbytes], strict=True))}
            for nbytes in options.sizes
        },
    }
    rows = [{"bytes": nbytes, **one} for nbytes, of in figures["sizes"].items() for one in of["rows"]]
    print_rows([{**row, "seconds": row["seconds"].median} for row in rows])
    save(options.json.with_stem(f"{options.json.stem}_{options.hosts}"), figures)


def of_size(found: dict[str, list[list[float]]], nbytes: int, options: Any) -> dict[str, Any]:
    """The figures of one size: seconds over all models, share of the bound, and round by round over ours."""
    bound = nbytes / cluster.rate_bytes(options.rate)
    rounds = {
        name: [statistics.median(each) for each in found[f"{name} {nbytes}"]] for name in ("ours", "gloo", "shardcast")
    }
    rows = [
        {
            "what": name,
            "seconds": (timing := Timing.of([second for each in found[f"{name} {nbytes}"] for second in each])),
            "of_the_bound": bound / timing.median,
            "over_ours": ratios(medians, rounds["ours"]),
        }
        for name, medians in rounds.items()
    ]
    late = {name: Timing.of([each[0] for each in found[f"{name} late {nbytes}"]]) for name in ("ours", "shardcast")}
    return {"bound_seconds": bound, "rows": rows, "late": late}


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        ranks(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["late"]:
        late(sys.argv[2])
    else:
        main()

"""What `benchmarks.distribution` compares with: Ray's object store, a model put on the trainer's host and fetched on
every other.

`python -m benchmarks.distribution.ray --hosts 16 --bytes 5000000 --models 4 --ray-python PYTHON OUT.json` on a cluster
that stands already. Ray runs from an environment of its own (`--ray-python`): it is no dependency of ddrl. A Ray node
starts in every namespace; each model is one `ray.put` on the head, and a task pinned to each node takes it with
`ray.get` and looks at every page. The time runs from the put until all have it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.distribution import cluster

DRIVER = """
import json, sys, time
import numpy as np, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

address, nbytes, models, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ray.init(address=address, log_to_driver=False)

@ray.remote(num_cpus=0)
class Host:
    def take(self, box, version):
        model = ray.get(box[0])
        assert model[0] == version
        return int(model[::4096].sum())

nodes = [node for node in ray.nodes() if node["Alive"]]
others = [node["NodeID"] for node in nodes if node["NodeManagerAddress"] != address.split(":")[0]]
hosts = [Host.options(scheduling_strategy=On(node, soft=False)).remote() for node in others]
ray.get([host.take.remote([ray.put(np.zeros(8, np.uint8))], 0) for host in hosts])
seconds = []
for version in range(models):
    model = np.random.default_rng(version).integers(0, 256, nbytes, dtype=np.uint8)
    model[0] = version
    begun = time.perf_counter()
    ref = ray.put(model)
    ray.get([host.take.remote([ref], version) for host in hosts])
    seconds.append(time.perf_counter() - begun)
    print(seconds, flush=True)
json.dump({"seconds": seconds[1:], "hosts": len(hosts), "version": ray.__version__}, open(out, "w"))
"""


def inside(host: int, command: list[str], **options: object) -> subprocess.Popen[bytes]:
    """A process in a host's namespace."""
    return subprocess.Popen(
        ["ip", "netns", "exec", f"{cluster.PREFIX}{host}", *command], stdin=subprocess.DEVNULL, **options
    )  # type: ignore[call-overload]


def measure(python: str, hosts: int, nbytes: int, models: int, *, timeout: float = 240) -> dict[str, object]:
    """{"seconds", "hosts", "version"}; {"failed": why} where Ray does not come up or does not finish."""
    ray = str(Path(python).with_name("ray"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
    }  # else a token that another Ray left at home is asked for by some and shown by none
    head = f"{cluster.address(0)}:6379"
    common = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        started: list[subprocess.Popen[bytes]] = []
        log = (Path(folder) / "log").open("wb")
        options = {"env": environment, "stdout": log, "stderr": log}
        deadline = time.monotonic() + timeout
        try:
            started.append(
                inside(
                    0,
                    [
                        ray,
                        "start",
                        "--head",
                        f"--node-ip-address={cluster.address(0)}",
                        "--port=6379",
                        f"--temp-dir={folder}/0",
                        "--include-dashboard=false",
                        *common,
                    ],
                    **options,
                )
            )
            while b"Ray runtime started" not in (Path(folder) / "log").read_bytes() and time.monotonic() < deadline:
                time.sleep(0.2)
            for host in range(1, hosts + 1):
                started.append(
                    inside(
                        host,
                        [ray, "start", f"--address={head}", f"--node-ip-address={cluster.address(host)}", *common],
                        **options,
                    )
                )
                time.sleep(1.5)  # one after another, for they share this machine's cores
            out = Path(folder) / "out.json"
            program = Path(folder) / "driver.py"
            program.write_text(DRIVER)
            while time.monotonic() < deadline:  # until all nodes have joined
                count = (
                    "import ray,sys; ray.init(address=sys.argv[1], log_to_driver=False); "
                    "print(sum(n['Alive'] for n in ray.nodes()))"
                )
                asked = inside(0, [python, "-c", count, head], env=environment, stdout=subprocess.PIPE, stderr=log)
                said = asked.communicate()[0].decode().split()
                print("nodes", said, flush=True)
                if said and said[-1] == str(hosts + 1):
                    break
                time.sleep(3)
            else:
                return {"failed": f"{said} of {hosts + 1} nodes after {timeout:.0f} s"}
            driver = inside(
                0, [python, str(program), head, str(nbytes), str(models), str(out)], env=environment, stderr=log
            )
            try:
                driver.wait(max(5.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                driver.kill()
            log.flush()
            if out.exists():
                return json.loads(out.read_text())
            return {"failed": (Path(folder) / "log").read_text(errors="replace")[-1500:]}
        finally:
            for host in range(hosts + 1):
                name = f"{cluster.PREFIX}{host}"
                running = subprocess.run(
                    ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
                ).stdout.split()
                subprocess.run(["kill", "-9", *running], capture_output=True, check=False)
            for process in started:
                process.wait()
            log.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distribution.ray", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--bytes", type=int, default=5_000_000)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--ray-python", default=sys.executable)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    found = measure(chosen.ray_python, chosen.hosts, chosen.bytes, chosen.models, timeout=chosen.timeout)
    chosen.out.write_text(json.dumps(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

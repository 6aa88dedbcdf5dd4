"""A virtual cluster on one Linux machine, for root: network namespaces on a bridge, every link shaped each way.

`python -m benchmarks.distribution.cluster up --hosts 100 --rate 20mbit`, `... run -- PROGRAM ...`, and `... down`. Host
0 is the trainer's, hosts 1..N the others. `up` replaces what an earlier `up` left; `down` leaves
nothing: namespaces, bridge, neighbor table limits and files are as before. Needs iproute2."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import mpi_environment

NAME = os.environ.get("DDRL_CLUSTER", "ddrl")  # several clusters can exist side by side; at most 6 letters
if not NAME.isalnum() or len(NAME) > 6:
    raise SystemExit(f"DDRL_CLUSTER={NAME!r}: at most 6 letters and digits, for interfaces bear the name")
STATE = Path(f"/run/{NAME}-cluster")
BRIDGE = f"{NAME}-bridge"
PREFIX = f"{NAME}-h"
LINK = f"{NAME}-v"
SUBNET = f"10.{78 + zlib.crc32(NAME.encode()) % 100 if NAME != 'ddrl' else 77}"
NETWORK = f"{SUBNET}.0.0/16"
BRIDGE_ADDRESS = f"{SUBNET}.255.254/16"
QUEUE_SECONDS = 0.02  # of a link's time that a connection may hold in its socket, where links are slow
MIN_SOCKET_BYTES = 8192
NEIGHBORS = ("gc_thresh1", "gc_thresh2", "gc_thresh3")


def available() -> str:
    """Why this machine cannot carry a virtual cluster; empty: it can."""
    if os.geteuid() != 0:
        return "a virtual cluster needs root (network namespaces)"
    missing = [tool for tool in ("ip", "tc", "bridge", "unshare") if shutil.which(tool) is None]
    return f"a virtual cluster needs {', '.join(missing)} (iproute2, util-linux)" if missing else ""


def address(host: int) -> str:
    """Host's address in the cluster's network."""
    return f"{SUBNET}.{host // 250}.{host % 250 + 1}"


def rate_bytes(rate: str) -> float:
    """Bytes/s of a rate as tc writes it: 20mbit, 1gbit, 500kbit."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor / 8
    raise ValueError(f"rate {rate!r}: write it as 20mbit, 1gbit or 500kbit")


def up(rates: Sequence[str], *, mtu: int = 1500) -> None:
    """One host for each rate (each way), the trainer's first."""
    down()
    STATE.mkdir(parents=True)
    neighbors = {name: _neighbors(name).read_text().strip() for name in NEIGHBORS}
    (STATE / "state.json").write_text(
        json.dumps({"hosts": len(rates), "rates": list(rates), "neighbors": neighbors, "mtu": mtu})
    )
    for name, least in zip(
        NEIGHBORS, (1 << 17, 1 << 18, 1 << 19), strict=True
    ):  # one table for all namespaces: n^2 entries
        _neighbors(name).write_text(str(max(int(neighbors[name]), least)))
    _batch(
        ["ip"],
        [
            f"link add {BRIDGE} type bridge",
            f"link set {BRIDGE} mtu {mtu} up",
            f"address add {BRIDGE_ADDRESS} dev {BRIDGE}",
        ],
    )
    _batch(["ip"], [f"netns add {PREFIX}{host}" for host in range(len(rates))])
    for host, rate in enumerate(rates):
        name = f"{PREFIX}{host}"
        burst = _burst(rate, mtu)
        gso = min(65536, burst * 3 // 4)  # tbf cuts up in software what is, headers counted, larger than its burst
        hardware = f"02:dd:00:00:{host >> 8:02x}:{host & 255:02x}"
        _batch(
            ["ip"],
            [
                f"link add {LINK}{host} mtu {mtu} gso_max_size {gso} type veth peer name eth0 address {hardware} "
                f"netns {name} mtu {mtu} gso_max_size {gso}",
                f"link set {LINK}{host} master {BRIDGE} up",
                f"neigh replace {address(host)} lladdr {hardware} dev {BRIDGE} nud permanent",
            ],
        )
        # The bridge answers who is where by itself: else each of n^2 questions is put to all n hosts.
        _batch(
            ["bridge"],
            [f"fdb replace {hardware} dev {LINK}{host} master static", f"link set dev {LINK}{host} neigh_suppress on"],
        )
        _batch(
            ["ip", "-n", name],
            [
                f"address add {address(host)}/16 dev eth0",
                "link set eth0 up",
                "link set lo up",
                # Slow links make slow queues: without a least timeout, TCP would take what waits there for lost, and
                # stall. Congestion control is Linux's default: BBR empties each link's queue for a fifth of a second
                # every ten, unless it falls idle by itself, and the links of a chain take turns with it.
                f"route replace {NETWORK} dev eth0 proto kernel scope link src {address(host)} rto_min "
                f"{_min_timeout(rate, len(rates))}s congctl cubic",
            ],
        )
        shape = f"root tbf rate {rate} burst {burst} limit"
        _batch(["tc"], [f"qdisc add dev {LINK}{host} {shape} 16000000"])
        _batch(["tc", "-n", name], [f"qdisc add dev eth0 {shape} 4000000"])
    agent = STATE / "agent"
    agent.write_text(
        "#!/bin/sh\n# called by mpirun as: agent [options] ADDRESS COMMAND...\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\naddress=$1; shift\n'
        "number=$(echo $address | awk -F. '{print $3 * 250 + $4 - 1}')\n"
        # Ranks that share memory are taken for one host, so each host mounts a /dev/shm of its own.
        f"exec ip netns exec {PREFIX}$number unshare --uts --mount "
        f'sh -c "mount -t tmpfs tmpfs /dev/shm; hostname {PREFIX}$number; $*"\n'
    )
    agent.chmod(0o755)


def _burst(rate: str, mtu: int) -> int:
    """Bytes that tbf lets through at once: 2 ms at the link's rate, two packets and 6000 at least; an idle link must
    not gain many chunks."""
    return max(6000, 2 * (mtu + 14), int(rate_bytes(rate) * 2e-3))


def _min_timeout(rate: str, hosts: int) -> int:
    """Seconds before TCP may take for lost what waits: longer than a host that serves all others at once keeps full
    sockets waiting."""
    return max(3, math.ceil(2 * (hosts - 1) * MIN_SOCKET_BYTES / rate_bytes(rate)))


@contextlib.contextmanager
def made(rates: Sequence[str], mtu: int = 1500) -> Iterator[None]:
    """A cluster for a while."""
    up(rates, mtu=mtu)
    try:
        yield
    finally:
        down()


def down() -> None:
    """Take everything away again; without a cluster it does nothing."""
    names = end_processes()  # a process there would keep the namespace alive
    if names:
        _batch(["ip"], [f"netns delete {name}" for name in names])
    deadline = time.monotonic() + 60
    while _links(LINK):  # a namespace's interfaces go some time after it
        for link in _links(LINK):
            subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
        if time.monotonic() > deadline:
            raise SystemExit(f"interfaces are still there after 60 s: {_links(LINK)[:5]}")
        time.sleep(0.05)
    if _links(BRIDGE):
        _batch(["ip"], [f"link delete {BRIDGE}"])
    if (STATE / "state.json").exists():
        for name, value in json.loads((STATE / "state.json").read_text())["neighbors"].items():
            _neighbors(name).write_text(value)
    shutil.rmtree(STATE, ignore_errors=True)


def on_host(host: int) -> list[str]:
    """What begins a command that runs in the network of a host."""
    return ["ip", "netns", "exec", f"{PREFIX}{host}"]


def set_link(host: int, state: str) -> None:
    """Cut a host off, or connect it again. state: "down" or "up"."""
    _batch(["ip"], [f"link set {LINK}{host} {state}"])


def end_processes() -> list[str]:
    """Kill whatever runs on the hosts; their namespaces."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]
    for name in names:
        for pid in subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        ).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    return names


def variables(**further: str) -> dict[str, str]:
    """The environment of a benchmark's ranks on the hosts, gloo's network included."""
    sources = mpi_environment()["PYTHONPATH"]
    own = {"PYTHONPATH": sources, "DDRL_ADDRESS": address(0), "DDRL_CLUSTER": NAME, "GLOO_SOCKET_IFNAME": "eth0"}
    return own | further


def mpirun(
    program: Sequence[str],
    *,
    hosts: int | None = None,
    ranks: Sequence[int] | None = None,
    environment: dict[str, str] | None = None,
) -> list[str]:
    """The command that runs `program` on each host of the cluster (the first `hosts`): one rank on each, or as many as
    `ranks` says, in the hosts' order."""
    state = json.loads((STATE / "state.json").read_text())
    count = state["hosts"] if hosts is None else hosts
    found = Path(sys.executable).with_name("mpirun")
    settings = {  # sent data must leave in the order of the plan: small socket buffers; chunks go without a handshake
        "btl": "tcp,self" if ranks is None else "tcp,self,sm",
        "btl_tcp_if_include": NETWORK,
        "btl_tcp_eager_limit": str(1 << 18),
        "btl_tcp_rndv_eager_limit": str(1 << 18),
        "btl_tcp_max_send_size": str(1 << 18),
        "pml": "ob1",
        "mpi_yield_when_idle": "1",
    }
    held = int(min(rate_bytes(rate) for rate in state["rates"]) * QUEUE_SECONDS)
    if held < 1 << 17:  # else the system's own choice, which grows with need
        settings["btl_tcp_sndbuf"] = str(max(MIN_SOCKET_BYTES, held))
    ranks = [1] * count if ranks is None else ranks
    command = [
        str(found if found.exists() else "mpirun"),
        "--host",
        ",".join(f"{address(host)}:{number}" for host, number in enumerate(ranks)),
        "-n",
        str(sum(ranks)),
        "--map-by",
        "slot",
        "--bind-to",
        "none",
        "--prtemca",
        "plm_ssh_agent",
        str(STATE / "agent"),
        "--prtemca",
        "prte_if_include",
        NETWORK,
        "--prtemca",
        "plm_ssh_no_tree_spawn",
        "1",
        "--prtemca",
        "plm_ssh_num_concurrent",
        str(count + 1),  # its agents stay
        "--prtemca",
        "routed_radix",
        str(count + 1),
        "--prtemca",
        "oob_tcp_peer_retries",
        "10",
    ]  # mpirun speaks to each host directly, not over slow links
    for name, value in settings.items():
        command += ["--mca", name, value]
    for name, value in (environment or {}).items():
        command += ["-x", f"{name}={value}"]
    return [*command, *program]


def _neighbors(name: str) -> Path:
    return Path(f"/proc/sys/net/ipv4/neigh/default/{name}")


def _links(prefix: str) -> list[str]:
    listed = subprocess.run(["ip", "-o", "link", "show"], capture_output=True, text=True, check=True).stdout
    names = [line.split(": ")[1].split("@")[0] for line in listed.splitlines()]
    return [name for name in names if name.startswith(prefix)]


def _batch(command: Sequence[str], lines: Sequence[str]) -> None:
    done = subprocess.run(
        [*command, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}\n  of: {lines[0]} ... {lines[-1]}")


def main() -> None:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distribution.cluster", description=description)
    actions = parser.add_subparsers(dest="action", required=True)
    make = actions.add_parser("up", help="make the cluster")
    make.add_argument("--hosts", type=int, default=16, help="hosts beside the trainer's (%(default)s)")
    make.add_argument(
        "--rate",
        default="200mbit",
        help="of every link each way; or one rate a host, separated by commas, the trainer's first",
    )
    make.add_argument("--mtu", type=int, default=1500)
    start = actions.add_parser("run", help="run a program on all hosts")
    start.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="on every host, and one more on the trainer's: trainer, relay and evaluator; relay and rollout "
        "(%(default)s)",
    )
    start.add_argument("program", nargs=argparse.REMAINDER)
    actions.add_parser("down", help="take it away")
    chosen = parser.parse_args()
    if problem := available():
        raise SystemExit(problem)
    if chosen.action == "up":
        rates = chosen.rate.split(",")
        up(rates * (chosen.hosts + 1) if len(rates) == 1 else rates, mtu=chosen.mtu)
    elif chosen.action == "run":
        program = [argument for index, argument in enumerate(chosen.program) if index or argument != "--"]
        count = json.loads((STATE / "state.json").read_text())["hosts"]
        command = mpirun(program, ranks=[chosen.ranks + 1] + [chosen.ranks] * (count - 1))
        raise SystemExit(subprocess.run(command, env=mpi_environment(), check=False).returncode)
    else:
        down()


if __name__ == "__main__":
    main()

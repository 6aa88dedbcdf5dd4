"""Does distribution slow the learner? Updates with relays that carry its models to other hosts of this machine, and
without, in turn.

`python -m benchmarks.distribution.step`; mpirun, no root. Three cases alternate, some updates each: "off" (nothing is
published, all relays are stopped by a signal), "publish" (versions go to the mailbox, relays stopped), "on" (relays
carry them to `--hosts` other hosts as fast as they can). On a real trainer's host the relay has a core of its own, so
relays are put on all cores but the first and the learner on the first ("pinned"); with few cores that is the only way
to see what distribution itself costs the learner, for relays of hosts that would be elsewhere run here too. The same
without pinning shows a machine that is overloaded: there wall time says how cores are shared, and the learner's own
processor time what remains of it."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distribution.cluster import mpi_environment
from benchmarks.harness import Timing, arguments, print_table, ratios, save
from ddrl.channels.board import Board, Command, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import segment_name
from ddrl.core.config import ClusterConfig, Config, LearnerConfig

CONFIG = ClusterConfig(scheme="auto")
ROW = np.dtype([("payload", np.uint8, (64,))])
CASES = ("off", "publish", "on")
PERIOD = 10  # updates between publishes, the default of learner.publish_period


def relay_process(run_id: str, nbytes: int, pinned: bool, told: str) -> None:
    """One rank: the root's relay on the learner's mailbox, or another host's on one of its own."""
    from mpi4py import MPI

    from ddrl.distribution.membership import Membership
    from ddrl.distribution.relay import LocalHost, Relay, host_relay, readers_needed, root_relay, slots_needed

    comm = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    if pinned and len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])
    board = Board.create(None)
    root = comm.rank == 0
    if root:
        board = Board.attach(segment_name(run_id, 0, "board"))
        mailbox = Mailbox.attach(segment_name(run_id, 0, "mailbox"))
    else:
        mailbox = Mailbox.create(None, nbytes, slots_needed(CONFIG), readers_needed(CONFIG))
    lanes = [Lane.create(None, ROW, 64) for _ in range(comm.size - 1)] if root else []
    counters = Counters.create(None, 1)
    readers = [mailbox.reader(index, firm=True) for index in range(readers_needed(CONFIG))]
    local = LocalHost(mailbox, readers, board, counters.row(0), ROW)
    membership = Membership(comm)
    config = Config(cluster=CONFIG)
    mirrors = [Counters.create(None, 1) for _ in lanes]
    relay = (
        root_relay(membership, config, local, lanes=lanes, mirrors=mirrors)
        if root
        else host_relay(membership, config, local, lanes=LaneSet([]), table=counters)
    )
    pids = comm.gather(os.getpid())
    if root:
        Path(told).write_text(json.dumps(pids))
        board.ready = 1
    sent = confirmed = 0
    while not relay.finished:
        relay.step()
        if isinstance(relay, Relay):
            sent = relay.models.sent_version
            confirmed = confirmed + len(relay.models.confirms)
            relay.models.confirms.clear()
            board.values[0], board.values[1] = sent, confirmed / max(1, comm.size - 1)
    membership.leave()


def measure(network: str, batch: int, hosts: int, pinned: bool, updates: int, rounds: int) -> dict[str, Any]:
    """Seconds an update, wall and the learner's processor time, of every case by round; models a second that reached
    all hosts."""
    import torch

    from benchmarks.learning.learner import IMAGE, VECTOR, random_batch
    from ddrl.distribution.relay import readers_needed, slots_needed
    from ddrl.learner import Learner

    torch.set_num_threads(1)
    spec = IMAGE if network == "nature_cnn" else VECTOR
    config = LearnerConfig(network=network, batch_size=batch)
    learner = Learner.of(Config(learner=config), spec)
    drawn = random_batch(spec, batch)
    nbytes = learner.parameters.layout.nbytes
    run_id = f"bench{os.getpid()}"
    board = Board.create(segment_name(run_id, 0, "board"))
    mailbox = Mailbox.create(segment_name(run_id, 0, "mailbox"), nbytes, slots_needed(CONFIG), readers_needed(CONFIG))
    cores = sorted(os.sched_getaffinity(0))
    seconds: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    rates = []
    deferred = 0
    version = 0
    pids = []
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "pids.json"
        command = [
            str(Path(sys.executable).with_name("mpirun")),
            "-n",
            str(hosts + 1),
            "--oversubscribe",
            "--bind-to",
            "none",
            sys.executable,
            "-m",
            "benchmarks.distribution.step",
            "--relay",
            run_id,
            str(nbytes),
            str(int(pinned)),
            str(told),
        ]
        job = subprocess.Popen(command, env={**mpi_environment(), "PYTHONPATH": str(Path(__file__).parents[2])})
        try:
            if not board.wait_ready(1, 120):
                raise SystemExit("the relays did not start")
            pids = json.loads(told.read_text())
            if pinned and len(cores) > 1:
                os.sched_setaffinity(0, cores[:1])
            for turn in range(rounds + 1):
                for case in CASES:
                    for pid in pids:
                        os.kill(pid, signal.SIGCONT if case == "on" else signal.SIGSTOP)
                    reached = float(board.values[1])
                    begun = time.perf_counter()
                    used = time.thread_time()
                    for update in range(updates):
                        learner.update(drawn, statistics=False)
                        if case != "off" and update % PERIOD == 0:
                            if mailbox.publish(learner.parameters.host_view(), version, (0.0, 0.0, 0.0)):
                                version += 1
                            else:
                                deferred += 1
                            board.rollout_bell.ring()
                            board.relay_bell.ring()
                    wall = time.perf_counter() - begun
                    if turn:  # the first round warms up
                        seconds[case].append((wall / updates, (time.thread_time() - used) / updates))
                        if case == "on":
                            rates.append((float(board.values[1]) - reached) / wall)
        finally:
            os.sched_setaffinity(0, cores)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            board.command = Command.STOP
            job.wait(60)
            mailbox.unlink()
            board.unlink()
    return {
        "network": network,
        "batch": batch,
        "model_bytes": nbytes,
        "hosts": hosts,
        "pinned": pinned,
        "updates": updates,
        "models_per_s_at_all_hosts": statistics.median(rates),
        "publish_deferred": deferred,
        "wall": {case: [wall for wall, _ in found] for case, found in seconds.items()},
        "processor": {case: [used for _, used in found] for case, found in seconds.items()},
    }


def main() -> None:
    if sys.argv[1:2] == ["--relay"]:
        run_id, nbytes, pinned, told = sys.argv[2:]
        relay_process(run_id, int(nbytes), pinned == "1", told)
        return
    parser = arguments("distribution_step", __doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4, help="hosts beside the trainer's that models go to")
    options = parser.parse_args()
    rounds = 4 if options.short else 12
    figures = []
    rows = []
    for network, batch, updates in (("mlp", 128, 400), ("nature_cnn", 32, 20 if options.short else 40)):
        for pinned in (True, False):
            found = measure(network, batch, options.hosts, pinned, updates, rounds)
            for clock in ("wall", "processor"):
                found[f"{clock}_ratio"] = {case: ratios(found[clock][case], found[clock]["off"]) for case in CASES[1:]}
                rows.append(
                    [
                        network,
                        found["model_bytes"],
                        "pinned" if pinned else "free",
                        clock,
                        *(1e3 * statistics.median(found[clock][case]) for case in CASES),
                        *(found[f"{clock}_ratio"][case].median for case in CASES[1:]),
                        found["models_per_s_at_all_hosts"],
                    ]
                )
                found[clock] = {case: Timing.of(values) for case, values in found[clock].items()}
            figures.append(found)
    print_table(
        [
            "network",
            "model bytes",
            "cores",
            "clock",
            "off ms",
            "publish ms",
            "on ms",
            "publish / off",
            "on / off",
            "models/s",
        ],
        rows,
    )
    save(options.json, {"cases": figures})


if __name__ == "__main__":
    main()

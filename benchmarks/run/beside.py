"""Is a rollout beside a relay as fast as others, also while models travel?

`python -m benchmarks.run.beside`; mpirun, no root, two cores. The first core holds the trainer's side: a publisher and
the root's relay. The second holds another host: its relay, which receives every version over TCP, and one rollout of
CartPole, 8 environments. The rollout plays in three cases that alternate: "no models"; "handed", a host without a
relay, where versions appear in the rollout's mailbox by themselves (the publisher writes them there); and "relayed",
the same versions at the same pace, received, verified and sealed by the relay beside it. Relay and rollout share one
core here, so what the relay takes is all taken from this one rollout; the rollouts of a host share that loss."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.distribution.cluster import mpi_environment
from benchmarks.harness import Timing, arguments, print_table, ratios, save
from benchmarks.run.rollout import EPSILON, Rollout
from ddrl.channels.board import Board, Command, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import segment_name
from ddrl.core.config import ClusterConfig, Config, EnvConfig, LearnerConfig
from ddrl.core.rows import row_schema
from ddrl.core.specs import EnvSpec
from ddrl.envs import make_vector_env

CONFIG = ClusterConfig()
CASES = ("no models", "handed", "relayed")
ENVS = 8
WINDOW = 1.0  # [s] of a case
MODELS = (([256, 256], 30.0), ([1024, 1024], 5.0))  # hidden layers, versions/s
ROOT, HOST, HANDED = range(3)  # whose mailbox


def learner_of(hidden: list[int], spec: EnvSpec) -> Any:
    from ddrl.learner import Learner

    return Learner.of(Config(learner=LearnerConfig(hidden=hidden)), spec)


def attached(run_id: str, owner: int) -> Mailbox:
    return Mailbox.attach(segment_name(run_id, owner, "mailbox"))


def relay(run_id: str) -> None:
    """One rank: the root's relay on the first core, or the other host's on the last."""
    from mpi4py import MPI

    from ddrl.distribution.membership import Membership
    from ddrl.distribution.relay import LocalHost, Relay, host_relay, readers_needed, root_relay

    comm = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1] if comm.rank else cores[0]})
    board = Board.attach(segment_name(run_id, comm.rank, "board"))
    mailbox = attached(run_id, comm.rank)
    row = row_schema(make_vector_env(EnvConfig(id="CartPole-v1"), 1).spec).dtype
    lanes = [] if comm.rank else [Lane.create(None, row, 64)]
    readers = [mailbox.reader(index, firm=True) for index in range(1, 1 + readers_needed(CONFIG))]
    counters = Counters.create(None, 1)
    local = LocalHost(mailbox, readers, board, counters.row(0), row)
    membership = Membership(comm)
    config = Config(cluster=CONFIG)
    mirrors = [Counters.create(None, 1) for _ in lanes]
    made = (
        host_relay(membership, config, local, lanes=LaneSet([]), table=counters)
        if comm.rank
        else root_relay(membership, config, local, lanes=lanes, mirrors=mirrors)
    )
    pids = comm.gather(os.getpid())
    if pids is not None:
        board.values[:2] = pids
        board.ready = 1
    while not made.finished:
        made.step()
        if isinstance(made, Relay):
            made.models.confirms.clear()
    membership.leave()


def rollout(run_id: str, hidden: list[int]) -> None:
    """The rollout on the last core: for each line it reads, a case, it plays for a window and writes what it saw."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    envs = [make_vector_env(EnvConfig(id="CartPole-v1"), ENVS) for _ in range(2)]
    model = learner_of(hidden, envs[0].spec).acting_model()
    readers = [attached(run_id, owner).reader(0) for owner in (HANDED, HOST)]
    players = dict(
        zip(("handed", "relayed"), (Rollout(e, model, r) for e, r in zip(envs, readers, strict=True)), strict=True)
    )
    players["no models"] = players["handed"]
    for line in sys.stdin:
        player = players[line.strip()]
        version = player.counters["policy_version"]
        steps = 0
        first = version.value
        begin = time.perf_counter()
        used = time.process_time()
        while (wall := time.perf_counter() - begin) < WINDOW:
            steps += player.play(50)
        used = time.process_time() - used
        print(json.dumps([steps / wall, used / wall, version.value - first]), flush=True)


def measure(hidden: list[int], pace: float, rounds: int) -> dict[str, Any]:
    """Env steps/s, share of the core and versions seen by the rollout, of every case by round.

    Args:
        hidden: layers of the network.
        pace: versions published each second.
        rounds: windows of each case.
    """
    from ddrl.distribution.relay import readers_needed, slots_needed

    spec = make_vector_env(EnvConfig(id="CartPole-v1"), 1).spec
    run_id = f"bench{os.getpid()}"
    vector = learner_of(hidden, spec).parameters.vector.numpy()
    boards = [Board.create(segment_name(run_id, host, "board")) for host in (ROOT, HOST)]
    sizes = vector.nbytes, slots_needed(CONFIG), 1 + readers_needed(CONFIG)  # and the rollout
    mailboxes = [Mailbox.create(segment_name(run_id, owner, "mailbox"), *sizes) for owner in (ROOT, HOST, HANDED)]
    environment = {**mpi_environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    module = [sys.executable, "-m", "benchmarks.run.beside"]
    launch = [str(Path(sys.executable).with_name("mpirun")), "-n", "2", "--oversubscribe", "--bind-to", "none"]
    tcp = ["--mca", "btl", "self,tcp", "--mca", "pml", "ob1"]
    versions = dict.fromkeys((ROOT, HANDED), 0)
    found: dict[str, list[list[float]]] = {case: [] for case in CASES}
    taken = []

    def publish(owner: int) -> None:
        versions[owner] += mailboxes[owner].publish(vector, versions[owner] + 1, (0.0, EPSILON))
        boards[ROOT].relay_bell.ring()

    def seconds_of(process: int) -> float:
        """Processor time [s] so far."""
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen([*launch, *tcp, *module, "--relay", run_id], env=environment, cwd=folder)
        player = subprocess.Popen(
            [*module, "--rollout", run_id, json.dumps(hidden)], env=environment, stdin=-1, stdout=-1, text=True
        )
        assert player.stdin is not None
        assert player.stdout is not None
        try:
            if not boards[ROOT].wait_ready(1, 120):
                raise SystemExit("the relays did not start")
            beside = int(boards[ROOT].values[1])
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            publish(HANDED)
            publish(ROOT)
            for turn in range(rounds + 1):
                for case in CASES:
                    player.stdin.write(f"{case}\n")
                    player.stdin.flush()
                    begin = time.perf_counter()
                    used = seconds_of(beside)
                    for tick in range(int(WINDOW * pace) if case != "no models" else 0):
                        time.sleep(max(0.0, begin + tick / pace - time.perf_counter()))  # the trainer's pace
                        publish(ROOT if case == "relayed" else HANDED)
                    answer = json.loads(player.stdout.readline())
                    if turn:  # the first round warms up
                        found[case].append(answer)
                        if case == "relayed":
                            taken.append((seconds_of(beside) - used) / WINDOW)
        finally:
            for board in boards:
                board.command = Command.STOP
                board.relay_bell.ring()
            player.stdin.close()
            player.wait(60)
            job.wait(60)
            for shared in (*mailboxes, *boards):
                shared.unlink()
    rates = {case: [rate for rate, _, _ in answers] for case, answers in found.items()}
    return {
        "hidden": hidden,
        "model_bytes": vector.nbytes,
        "versions_per_s": pace,
        "env_steps_per_s": {case: Timing.of(values) for case, values in rates.items()},
        "versions_seen_per_window": {
            case: statistics.median(v for _, _, v in answers) for case, answers in found.items()
        },
        "relayed_to_handed": ratios(rates["relayed"], rates["handed"]),
        "relayed_to_no_models": ratios(rates["relayed"], rates["no models"]),
        "relays_share_of_the_core": Timing.of(taken),
    }


def main() -> None:
    match sys.argv[1:]:
        case ["--relay", run_id]:
            relay(run_id)
            return
        case ["--rollout", run_id, hidden]:
            rollout(run_id, json.loads(hidden))
            return
        case _:
            pass
    options = arguments("beside", (__doc__ or "").split("\n", 1)[0]).parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("benchmarks.run.beside needs two cores: one for the trainer's side, one for the other host")
    figures = [measure(hidden, pace, 4 if options.short else 15) for hidden, pace in MODELS]
    print_table(
        ["model bytes", "versions/s", *(f"{case}, env steps/s" for case in CASES), "relayed / handed", "relay's share"],
        [
            [
                found["model_bytes"],
                found["versions_per_s"],
                *(f"{found['env_steps_per_s'][case].median:,.0f}" for case in CASES),
                f"{(r := found['relayed_to_handed']).median:.3f} ({r.low:.3f}-{r.high:.3f})",
                f"{found['relays_share_of_the_core'].median:.3f}",
            ]
            for found in figures
        ],
    )
    save(options.json, {"envs": ENVS, "window_s": WINDOW, "cases": figures})


if __name__ == "__main__":
    main()

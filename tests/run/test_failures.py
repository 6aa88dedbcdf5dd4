"""A failure anywhere reaches everyone: one message, a nonzero exit within seconds, nothing left in shared memory."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.run.launch import MPI_ENVIRONMENT, TINY, mpirun_command, segments_of, settings
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

RANKS, RELAYS = 9, 3  # of the quick ones most are of the first two hosts alone
# One process of each role, as it is named; the probe makes an environment.
ROOT_RELAY = "0"
TRAINER = "1"
PROBE = "probe"
EVALUATOR = "2"
RELAY = "3"
ROLLOUT = "4"
OTHER_ROLLOUT = "8"  # on the last host
KEEPER = "keeper 0"
OTHER_KEEPER = "keeper 1"


# (process, function of ddrl, which of its calls): from the first line of a role to its last.
PLACES = [
    # start-up
    (ROOT_RELAY, "_collect", 1),
    (ROLLOUT, "record", 1),
    (KEEPER, "Preparation.__init__", 1),
    (PROBE, "probe_spec", 1),
    (PROBE, "describe", 1),
    (ROOT_RELAY, "assign_roles", 1),
    (KEEPER, "check_cluster", 1),
    (KEEPER, "RunDirectory.create", 1),
    (KEEPER, "Topology.to_bytes", 1),
    (ROOT_RELAY, "_give_orders", 1),
    (ROOT_RELAY, "Topology.from_bytes", 1),
    (RELAY, "Topology.from_bytes", 1),
    (KEEPER, "Board.create", 1),
    (OTHER_KEEPER, "Board.create", 1),
    (KEEPER, "HostChannels.create", 1),
    (OTHER_KEEPER, "HostChannels._create", 1),
    (OTHER_KEEPER, "Lane.create", 2),
    (OTHER_KEEPER, "Job.open", 1),
    (TRAINER, "build_learner", 1),
    (TRAINER, "assemble", 1),
    (TRAINER, "BestPolicy.__init__", 1),
    (TRAINER, "HostChannels.create_policy", 1),
    (TRAINER, "Recorder.__init__", 1),
    (TRAINER, "Task.start", 1),
    (KEEPER, "Job.run", 1),
    (RELAY, "_follow_relay", 1),
    (RELAY, "_relay", 1),
    (RELAY, "_join_relays", 1),
    (ROOT_RELAY, "Membership.__init__", 1),
    (ROOT_RELAY, "relay_process", 1),
    (RELAY, "relay_process", 1),
    (RELAY, "HostChannels.create_policy", 1),
    (ROOT_RELAY, "HostChannels.attach", 1),
    (ROLLOUT, "make_rollout_env", 1),
    (ROLLOUT, "make_worker", 1),
    (EVALUATOR, "evaluate_versions", 1),
    (EVALUATOR, "Evaluator.__init__", 1),
    # planning
    (ROOT_RELAY, "measure_links", 1),
    (RELAY, "measure_links", 1),
    (ROOT_RELAY, "choose", 1),
    (ROOT_RELAY, "make_plan", 1),
    (RELAY, "ModelReceiver._adopt", 1),
    (RELAY, "Executor.__init__", 1),
    (ROOT_RELAY, "ModelSender._confirmed", 2),
    # training
    (TRAINER, "Training.drain", 20),
    (TRAINER, "Training.account", 2),
    (TRAINER, "Training.publish", 3),
    (TRAINER, "Task.look", 4),
    (TRAINER, "Task.accept", 1),
    (ROLLOUT, "RolloutWorker.step", 30),
    (ROLLOUT, "RolloutWorker.report", 2),
    (EVALUATOR, "Evaluator.judge", 1),
    (EVALUATOR, "play_episodes", 1),
    (ROOT_RELAY, "Relay.progress", 20),
    (RELAY, "Relay.progress", 20),
    # checkpoint
    (TRAINER, "Checkpoints.write", 1),
    (TRAINER, "write_checkpoint", 2),
    # end
    (TRAINER, "Task.finish", 1),
    (TRAINER, "Task._settle", 1),
    (TRAINER, "summarize", 1),
    (ROOT_RELAY, "RootCommands._all_done", 1),
    (RELAY, "TablesUp.finish", 1),
    (RELAY, "Relay._end", 1),
    (RELAY, "Membership.leave", 1),
    (ROOT_RELAY, "Relay._end", 1),
    (ROLLOUT, "RolloutWorker.release", 1),
    (OTHER_ROLLOUT, "RolloutWorker.release", 1),
]
# Of these nobody waits for the end: training is whole, and the job says what came after it.
AFTER = [(ROLLOUT, "RolloutWorker.release", 1), (OTHER_ROLLOUT, "RolloutWorker.release", 1)]
# One for each row of the table of failures in docs/architecture.md that an exception can bring about.
QUICK = [
    (KEEPER, "Preparation.__init__", 1),  # rank 0, before the topology is sent
    (RELAY, "Topology.from_bytes", 1),  # a rank, before it has the topology
    (EVALUATOR, "play_episodes", 1),
    (RELAY, "Relay.progress", 20),  # a relay
    (TRAINER, "write_checkpoint", 2),  # the trainer
]


def fails_in_order(who: str, function: str, count: int, tmp_path: Path, ranks: int = RANKS) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        mpirun_command(ranks, *TINY, *settings(f"cluster.relays={ranks * RELAYS // RANKS}", f"run.dir={run}")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(
            Path(__file__).parent / "faults", **MPI_ENVIRONMENT, DDRL_TEST_FAULT=f"{who}:{function}:{count}"
        ),
    )
    try:
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode == 0) == ((who, function, count) in AFTER), out
    assert out.count("RuntimeError: the injected fault in") == 1, out
    assert "Segmentation" not in out
    if (run / "run.json").exists():  # written before the topology is sent, and so before any channel is made
        wait_until(lambda: not segments_of(run), "segments stayed")


def test_every_place_is_a_function_of_the_library() -> None:
    there: set[str] = set()
    for path in (Path(__file__).parents[2] / "ddrl").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                there |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
            elif isinstance(node, ast.FunctionDef):
                there.add(node.name)
    assert {function for _, function, _ in PLACES} <= there


@pytest.mark.parametrize(("who", "function", "count"), QUICK)
def test_an_exception_ends_the_job_with_one_message(who: str, function: str, count: int, tmp_path: Path) -> None:
    fails_in_order(who, function, count, tmp_path, RANKS if function == "Relay.progress" else 2 * RANKS // RELAYS)


@pytest.mark.long
@pytest.mark.parametrize(("who", "function", "count"), [place for place in PLACES if place not in QUICK])
def test_an_exception_at_any_other_place_does_too(who: str, function: str, count: int, tmp_path: Path) -> None:
    fails_in_order(who, function, count, tmp_path)

"""Data-parallel nodes under mpirun: the gradient of the whole batch, whoever is late, whoever leaves."""

import itertools
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ddrl.core.algorithm import Experience
from ddrl.core.errors import ConfigError
from ddrl.core.roles import Role, assign_roles
from ddrl.core.rows import row_schema
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.run.cli import parse
from ddrl.run.nodes.messages import Order
from ddrl.run.nodes.replays import OwnReplay
from ddrl.run.preparation import Preparation
from ddrl.telemetry import Run
from tests.run.launch import MPI_ENVIRONMENT, TINY, ddrl, mpirun, mpirun_command, settings, summary
from tests.sources import environment
from tests.waiting import PATIENCE

pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
BATCH = 24


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """What each case of node_ranks.py came to: one mpirun for all."""
    launcher = mpirun_command(4)
    program = Path(__file__).with_name("node_ranks.py")
    words = [*launcher[: launcher.index("-m")], str(program), str(tmp_path_factory.mktemp("gates"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment(**MPI_ENVIRONMENT))
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.parametrize("algorithm", ["dqn", "dqn, sent", "td3", "d4pg"])
def test_nodes_give_the_gradients_and_priorities_of_one_learner(cases, algorithm):
    found = cases[f"exact {algorithm}"]["found"]
    assert len(found["errors"]) >= 6
    assert max(found["errors"]) <= 1e-6
    assert all(found["priorities"])
    assert found["mapped"] == ["sent" not in algorithm] * 3
    assert found["rung"] == ["sent" not in algorithm] * 4
    assert found["passed"] == [True] * (3 if algorithm == "td3" else 0)  # its actor is updated every second time


def test_without_room_for_shared_memory_nodes_are_sent_messages_and_the_run_says_so(cases):
    (note,) = cases["exact dqn, sent"]["notes"]
    assert "sent as messages, which is slower" in note
    assert "bytes of shared memory are not free" in note


@pytest.mark.parametrize("algorithm", ["dqn", "td3", "d4pg"])
def test_vectors_are_equal_bits_on_every_node(cases, algorithm):
    case = cases[f"exact {algorithm}"]
    assert case["nodes"] == [case["found"]["vectors"]] * 3


def chained(lists) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


EVERY = list(range(5 * BATCH))


def numbers(update: int) -> list[int]:
    return list(range(update * BATCH, (update + 1) * BATCH))


def test_a_late_gradient_that_is_fresh_enough_is_used_once_and_with_its_own_rows(cases):
    found = cases["late is used"]["found"]
    assert max(found["errors"]) <= 1e-5
    used = found["used"]
    assert used[0] == numbers(0)[:16]
    assert used[1:3] == [numbers(1), numbers(2)]  # the free nodes share the whole batch
    assert set(used[3]) >= set(found["held"]) == set(numbers(0)[16:])
    assert sorted(chained(used + found["kept"])) == EVERY
    assert found["rung"] == [True] * 4  # gradients are messages, but nobody looks for them again and again
    assert found["sizes"] == [[len(rows)] * 2 for rows in used]
    assert (found["counts"]["late"] >= 1, found["counts"]["dropped"], found["counts"]["lost"]) == (True, 0, 0)


def test_after_the_first_k_gradients_the_others_are_awaited_for_the_waiting_time_and_no_longer(cases):
    found = cases["waiting"]["found"]
    assert found["used"] == [BATCH, BATCH * 2 // 3]
    assert found["waited"] >= 0.1
    assert found["counts"]["accepted"] == 5


def test_a_sizer_sees_norm_cosine_and_loss_of_every_nodes_gradient(cases):
    found = cases["observed"]["found"]
    np.testing.assert_allclose(found["seen"], found["expected"], rtol=1e-4)
    assert found["noise_scale"] > 0


def test_samples_of_a_stale_gradient_are_dealt_again_and_bias_nothing(cases):
    found = cases["stale is dealt again"]["found"]
    assert set(found["held"]) <= set(found["used"][3]) | set(found["used"][4])
    everything = chained(found["used"] + found["kept"] + found["again"])
    counts = found["counts"]
    assert sorted(everything) == EVERY
    assert counts["dropped"] >= 1
    assert (counts["requeued"] >= 8, counts["lost"]) == (True, 0)
    assert counts["dealt"] == counts["used"] + counts["requeued"] + len(chained(found["kept"]))


def test_lost_samples_are_counted_and_bias_what_is_learned_toward_the_fast_nodes(cases):
    found = cases["stale is lost"]["found"]
    everything = chained(found["used"])
    assert not set(found["held"]) & set(everything)
    counts = found["counts"]
    assert counts["lost"] >= 8
    assert counts["requeued"] == 0
    assert counts["dealt"] == counts["used"] + counts["lost"] + len(chained(found["kept"]))
    first = np.array(found["used"][0]) % BATCH
    assert first.mean() == np.arange(16).mean()  # the mean place of all 24 rows is 11.5


def test_a_node_that_fails_leaves_and_the_others_share_every_batch(cases):
    case = cases["left"]
    assert sorted(chained(case["found"]["used"])) == EVERY[: 4 * BATCH]
    assert case["found"]["used"][3] == numbers(3)
    assert case["found"]["nodes"] == [0, 1]
    assert len(case["notes"]) == 1
    assert "node 2 has left" in case["notes"][0]
    assert "no memory left" in case["notes"][0]


def test_a_node_with_another_network_is_refused_by_what_differs(cases):
    assert "node 2 has part value" in cases["foreign"]["found"]
    assert "nodes must hold the same networks" in cases["foreign"]["found"]


def test_a_node_that_hangs_ends_the_job_at_the_limit(cases):
    assert cases["silent"]["found"].startswith("node 2 has not answered for 0.5 s (run.silence_limit): does it hang")


def test_without_a_node_left_the_job_fails_with_the_last_reason(cases):
    assert "no gradient node is left" in cases["nobody"]["found"]
    assert "no memory left" in cases["nobody"]["found"]


def test_sizes_stay_below_what_a_nodes_memory_holds(cases):
    for sizes in cases["capped"]["found"]:
        assert sum(sizes) == BATCH
        assert sizes[1] <= 3
        assert sizes[2] <= 4


def test_a_run_with_nodes_learns_counts_once_and_goes_on_with_another_number(tmp_path):
    run = tmp_path / "run"
    done = mpirun(7, *TINY, *settings("learner.nodes=3", "run.max_env_steps=1500", f"run.dir={run}"))
    assert done.returncode == 0, done.stderr
    before = summary(run)
    assert before["updates"] > 50
    with Run(run) as records:
        processes = records.processes()
    role = processes.column("role")[-1]
    nodes = role == list(Role).index(Role.NODE)
    assert nodes.sum() == 3
    assert (processes.column("gradients")[-1][nodes] > 0).all()
    assert processes.column("node_size")[-1][nodes].sum() == 16
    assert np.isnan(processes.column("updates")[-1][nodes]).all()  # the leader's alone
    sent, received = (processes.column(f"bytes_{way}")[-1] for way in ("sent", "received"))
    assert 0 < sent[nodes].sum() <= received[role == list(Role).index(Role.TRAINER)].item() + 1e6
    again = mpirun(6, "--resume", str(run), *settings("learner.nodes=2", "run.max_env_steps=2500"))
    assert again.returncode == 0, again.stderr
    assert summary(run)["env_steps"] == 2500
    assert summary(run)["updates"] > before["updates"]


@pytest.mark.parametrize("algorithm", ["dqn", "td3"])
def test_nodes_that_draw_themselves_give_the_gradient_of_all_rows_drawn(cases, algorithm):
    found = cases[f"own {algorithm}"]["found"]
    assert len(found["errors"]) >= 4
    assert max(found["errors"]) <= 1e-6


def test_each_node_records_and_draws_the_lanes_dealt_to_it_alone(cases):
    found = cases["own dqn"]["found"]
    assert found["streams"] == [[0, 1, 6, 7], [2, 3], [4, 5]]  # lane l has streams 2l and 2l + 1
    assert found["versions"] == found["versions_drawn"]
    ready_at_first, recorded, held, samples = found["counted"]
    assert not ready_at_first
    assert recorded == held == 320
    assert samples == 4 * BATCH


def test_a_node_that_leaves_with_its_replay_ends_the_job_and_nothing_waits_for_it(cases):
    failed, not_saved = cases["own left"]["found"]
    assert failed.startswith("JobFailed: node 2 has left with its replay")
    assert "no memory left" in failed
    assert not_saved.startswith("CheckpointError: the replays of the nodes cannot be reached: node 2 has left")


def test_what_a_node_cannot_save_or_load_is_said_with_its_number(tmp_path):
    config = load_config(None, ["learner.nodes=2", "learner.node_replay=own", "replay.capacity=2000"])
    schema = row_schema(EnvSpec("Vector-v0", ArraySpec((4,), "float32"), 3))
    replay = OwnReplay(config, schema, Experience(), 1)
    for action in ("save", "load"):
        answer = replay.follow(Order(action, str(tmp_path / "nowhere")))
        assert answer.answered
        assert answer.trouble.startswith("node 1: ")
        assert "nowhere/replay-1.snapshot" in answer.trouble


def test_a_run_whose_nodes_have_replays_counts_once_and_goes_on_with_the_same_number_alone(tmp_path):
    run = tmp_path / "run"
    own = settings("learner.nodes=2", "learner.node_replay=own", "run.max_env_steps=1200", f"run.dir={run}")
    done = mpirun(7, *TINY, *own)
    assert done.returncode == 0, done.stderr
    before = summary(run)
    assert before["updates"] > 50
    with Run(run) as records:
        processes, config = records.processes(), records.config
    role = processes.column("role")[-1]
    trainer, nodes = (role == list(Role).index(one) for one in (Role.TRAINER, Role.NODE))
    assert processes.column("env_steps")[-1][trainer].item() == 1200
    assert np.isnan(processes.column("updates")[-1][nodes]).all()  # the leader's alone
    assert sorted(path.name for path in (run / "checkpoints" / f"{1200:012d}").glob("replay*")) == [
        "replay-0.snapshot",
        "replay-1.snapshot",
    ]
    again = mpirun(7, "--resume", str(run), *settings("run.max_env_steps=2000"))
    assert again.returncode == 0, again.stderr
    assert summary(run)["env_steps"] == 2000
    assert config.learner.node_replay == "own"
    newest = max((run / "checkpoints").iterdir())
    schema = row_schema(EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 2))
    held = [OwnReplay(config, schema, Experience(), node) for node in range(2)]
    assert sum(replay.follow(Order("load", str(newest))).held[0] for replay in held) == 2000
    for change in ("learner.nodes=3", "learner.node_replay=leader"):
        with pytest.raises(ConfigError, match=r"holds the replays of 2 nodes.*learner\.nodes = 2"):
            Preparation(parse(["--resume", str(run), *settings(change)]), "nodes")


def test_hosts_give_nodes_in_turn():
    ranks = assign_roles([0] * 5 + [1] * 4, evaluator=True, nodes=3)
    assert [(rank.rank, rank.host) for rank in ranks if rank.role is Role.NODE] == [(3, 0), (4, 0), (6, 1)]
    with pytest.raises(ConfigError, match="3 gradient nodes"):
        assign_roles([0] * 6, evaluator=True, nodes=3)


REFUSALS = {
    "learner.nodes=200": "learner.batch_size (128) is below learner.nodes (200)",
    "balance.first=5": "balance.first (K = 5) exceeds learner.nodes (4)",
    "balance.max_sizes=[64, 64]": "2 sizes for 4 nodes",
    "balance.max_sizes=[64, 64, 64, 0]": "node 3 does not hold one sample",
    "balance.max_sizes=[1, 1, 1, 1]": "hold 4 samples together",
    "balance.wait=-1.0": "balance.wait",
    "balance.sizer=fair": "balance.sizer",
    "learner.node_replay=all": "learner.node_replay",
}


@pytest.mark.parametrize("assignment", REFUSALS)
def test_settings_that_no_update_could_come_of_are_refused(assignment):
    with pytest.raises(ConfigError) as error:
        load_config(None, ["learner.nodes=4", assignment])
    assert REFUSALS[assignment] in str(error.value)


RANKS = tuple(assign_roles([0] * 9, evaluator=True, nodes=4))


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["balance.sizer=causal"], "simulator"),
        (["balance.ema.wrong=1", "balance.sizer=ema"], "balance.ema.wrong"),
        (["learner.algorithm=pqn"], "learns from trajectories"),
        (["learner.node_replay=own", "learner.nodes=6"], "there are 2 for 6 nodes"),
        (["learner.node_replay=own", "learner.nodes=2", "balance.first=2"], r"set balance.first = 0"),
        (["learner.node_replay=own", "learner.nodes=2", "balance.ddqn.choose_first=true"], "choose_first"),
    ],
)
def test_what_needs_more_than_the_settings_is_refused_before_anything_stands(assignments, words):
    preparation = Preparation(parse(["cartpole", *settings("learner.nodes=4", *assignments)]), "nodes")
    with pytest.raises(ConfigError, match=words):
        preparation.topology(RANKS)


def test_a_replay_for_each_of_no_nodes_is_refused():
    with pytest.raises(ConfigError, match=r"learner.node_replay = own needs nodes"):
        load_config(None, ["learner.node_replay=own"])


def test_without_mpirun_nodes_are_refused(tmp_path):
    done = ddrl("--serial", *settings("learner.nodes=2", f"run.dir={tmp_path / 'run'}"))
    assert done.returncode != 0
    assert "mpirun" in done.stderr
    assert not (tmp_path / "run").exists()

"""Data-parallel nodes under mpirun: the gradient of the whole batch, whoever is late, whoever leaves."""

import itertools
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ddrl.core.errors import ConfigError
from ddrl.core.roles import Role, assign_roles
from ddrl.core.settings import load_config
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.telemetry import Run
from tests.run.launch import MPI_ENVIRONMENT, TINY, mpirun, mpirun_command, settings, summary
from tests.run.preloaded import serial
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
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {**found, "stderr": done.stderr}


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
    found = cases["foreign"]["found"]
    assert re.match(r"node 2 has part value = \w+, the trainer its own: nodes must hold the same networks", found), (
        found
    )


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
    done = mpirun(6, *TINY, *settings("learner.nodes=2", "run.max_env_steps=800", f"run.dir={run}"))
    assert done.returncode == 0, done.stderr
    before = summary(run)
    assert before["updates"] > 50
    with Run(run) as records:
        processes = records.processes()
    role = processes.column("role")[-1]
    nodes = role == list(Role).index(Role.NODE)
    assert nodes.sum() == 2
    assert (processes.column("gradients")[-1][nodes] > 0).all()
    assert processes.column("node_size")[-1][nodes].sum() == 16
    assert np.isnan(processes.column("updates")[-1][nodes]).all()  # the leader's alone
    sent, received = (processes.column(f"bytes_{way}")[-1] for way in ("sent", "received"))
    assert 0 < sent[nodes].sum() <= received[role == list(Role).index(Role.TRAINER)].item() + 1e6
    fewer = settings("learner.nodes=1", "evaluation.period=0", "run.max_env_steps=1200")
    again = mpirun(4, "--resume", str(run), *fewer)
    assert again.returncode == 0, again.stderr
    assert summary(run)["env_steps"] == 1200
    assert summary(run)["updates"] > before["updates"]


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
        (["balance.ema.wrong=1", "balance.sizer=ema"], "balance.ema.wrong"),
        (["learner.algorithm=pqn"], "learns from trajectories"),
    ],
)
def test_what_needs_more_than_the_settings_is_refused_before_anything_stands(assignments, words):
    preparation = Preparation(parse(["cartpole", *settings("learner.nodes=4", *assignments)]), "nodes")
    with pytest.raises(ConfigError, match=words):
        preparation.topology(RANKS)


def test_without_mpirun_nodes_are_refused(tmp_path):
    done = serial(*settings("learner.nodes=2", f"run.dir={tmp_path / 'run'}"))
    assert done.returncode != 0
    assert "mpirun" in done.stderr
    assert not (tmp_path / "run").exists()

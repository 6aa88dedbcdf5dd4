"""Many ranks on one machine: learning at the task's own pace while every version goes through several relays."""

import pytest

from tests.run.launch import mpirun, segments_of, settings, summary

pytestmark = pytest.mark.long


@pytest.mark.timeout(900)
def test_forty_ranks_over_four_relays_learn_with_every_version_on_every_host(tmp_path):
    run = tmp_path / "run"
    wanted = settings("cluster.relays=4", "run.target_return=400.0", "run.max_env_steps=200000", f"run.dir={run}")
    done = mpirun(40, "cartpole", *wanted, limit=850)
    assert done.returncode == 0, done.stderr
    written = summary(run)
    assert written["reason"] == "run.target_return reached", done.stdout
    assert written["evaluation"]["mean"] >= 400
    hosts = {host["host"]: host for host in written["hosts"]}
    assert sorted(hosts) == [0, 1, 2, 3]
    assert sum(host["processes"] for host in hosts.values()) == 40
    sealed = {host: figures["versions_sealed"] for host, figures in hosts.items() if host}
    assert min(sealed.values()) == max(sealed.values()) > 10, sealed
    assert all(figures["rows_forwarded"] > 0 for host, figures in hosts.items() if host), hosts
    assert (written["checksum_failures"], written["rows_dropped"]) == (0, 0)
    assert segments_of(run) == []


@pytest.mark.timeout(900)
def test_hundreds_of_ranks_learn_within_the_steps_of_a_task_for_a_few(tmp_path):
    """Shared out evenly they would be 38 steps for each of 1,576 environments, most of them learned from late."""
    run = tmp_path / "run"
    done = mpirun(200, "cartpole", *settings(f"run.dir={run}"), limit=850)
    assert done.returncode == 0, done.stderr
    written = summary(run)
    assert written["env_steps"] <= 60_000
    assert written["evaluation"]["mean"] > 100, done.stdout  # of a policy that learned nothing: 10
    assert segments_of(run) == []

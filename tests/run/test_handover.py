"""Models reach rollouts: every one of every host, and inside a host through shared memory alone."""

import signal

import pytest

from benchmarks.run.ranks import Loops
from ddrl.telemetry import Run
from tests.run.launch import TINY, mpirun, start_mpirun, summary
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    "settings",
    [["cluster.closed_loop=true", "cluster.codec=int8"], ["cluster.codec=xor_zstd"]],
    ids=["closed", "streaming"],
)
def test_every_rollout_of_every_host_reports_the_newest_version_within_one_closed_loop(settings, tmp_path):
    run = tmp_path / "run"
    words = [
        word
        for setting in [*settings, "cluster.relays=3", "run.max_env_steps=1000000000", f"run.dir={run}"]
        for word in ("--set", setting)
    ]
    job = start_mpirun(9, *TINY, *words)
    try:
        loops = Loops(run, rollouts=4, enough=3)
        loops.start()
        loops.join(timeout=PATIENCE)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=PATIENCE) in (0, 130)
    finally:
        job.kill()
        loops.ended.set()
    assert len(loops.seconds) == 3
    written = summary(run)
    assert written["checksum_failures"] == 0
    assert min(host["versions_sealed"] for host in written["hosts"] if host["host"]) > 2


def test_inside_a_host_models_and_experience_touch_no_network(tmp_path):
    # Long enough for a rollout that starts late on a busy machine.
    done = mpirun(5, *TINY, "--set", "run.max_env_steps=100000", "--set", f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    (host,) = summary(tmp_path / "run")["hosts"]
    counted = {name: value for name, value in host.items() if "bytes" in name}
    assert counted == dict.fromkeys(("bytes_sent", "bytes_received", "model_bytes_sent", "model_bytes_received"), 0)
    with Run(tmp_path / "run") as recorded:
        fetches = recorded.latest().column("fetches")[-1]
    assert (fetches[fetches == fetches] > 3).sum() == 2  # both rollouts took versions all the same

"""Models reach rollouts: every one of every host, and inside a host through shared memory alone."""

import signal

import pytest

from benchmarks.run.ranks import Loops
from ddrl.telemetry import Run, attach
from tests.run.launch import TINY, UNTIL_STOPPED, settings, start_mpirun, summary
from tests.waiting import PATIENCE, wait_until


@pytest.mark.parametrize(
    "chosen",
    [
        ["cluster.closed_loop=true", "cluster.codec=int8"],
        pytest.param(["cluster.codec=xor_zstd"], marks=pytest.mark.long),
    ],
    ids=["closed", "streaming"],
)
def test_every_rollout_of_every_host_reports_the_newest_version_within_one_closed_loop(chosen, tmp_path):
    run = tmp_path / "run"
    words = [
        word
        for setting in [*chosen, "cluster.relays=3", "run.max_env_steps=1000000000", f"run.dir={run}"]
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
    run = tmp_path / "run"
    job = start_mpirun(5, *TINY, *UNTIL_STOPPED, *settings(f"run.dir={run}"))
    try:
        wait_until((run / "live.json").exists, "the way to its commands")
        with attach(run, timeout=PATIENCE) as control, Run(run) as recorded:
            wait_until(lambda: rollouts_with_versions(recorded) == 2, "both rollouts take versions all the same")
            control.stop()
        assert job.wait(timeout=PATIENCE) == 0
    finally:
        job.kill()
    (host,) = summary(run)["hosts"]
    counted = {name: value for name, value in host.items() if "bytes" in name}
    assert counted == dict.fromkeys(("bytes_sent", "bytes_received", "model_bytes_sent", "model_bytes_received"), 0)


def rollouts_with_versions(recorded: Run) -> int:
    """How many have taken more than three."""
    fetches = recorded.latest().column("fetches")
    return int((fetches[-1:] > 3).sum())

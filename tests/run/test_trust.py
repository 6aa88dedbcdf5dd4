"""A run directory from elsewhere runs no code of its own before the user has said so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddrl.core.errors import RunDirError
from ddrl.core.trust import check_trust, foreign_code, remember_trust
from ddrl.evaluate import main
from ddrl.pool.mode import new_setup, resumed_setup
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.task import Reason
from tests.run.test_resume import go_on, start

WALK = "tests.run.environments:walk"


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with an environment of its own, copied from another machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    run = start(tmp_path / "mine", "--set", f"env.id={WALK}")
    go_on(run, 300)
    run.task.end(Reason.INTERRUPTED)
    run.finish()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copytree(tmp_path / "mine", tmp_path / "theirs")
    return tmp_path / "theirs"


def prepare(*arguments: str) -> None:
    Preparation(parse(["--resume", *arguments]), "trust").directory.release()


def test_it_is_resumed_and_played_after_a_word_of_the_user(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunDirError, match=f"env.id = '{WALK}'.*--trust"):
        prepare(str(foreign))
    assert main([str(foreign), "--episodes", "1"]) == 1
    error = capsys.readouterr().err
    assert "--trust" in error
    assert error.count("\n") == 1
    prepare(str(foreign), "--trust")
    prepare(str(foreign))  # remembered, for resume and for evaluation
    assert main([str(foreign), "--episodes", "1"]) == 0
    other = foreign.with_name("another")
    shutil.copytree(foreign, other)
    with pytest.raises(RunDirError, match="--trust"):
        prepare(str(other))


def test_the_refusal_comes_before_the_code_is_imported(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "villain.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("config.toml", "policy.json"):
        path = foreign / name
        path.write_text(path.read_text().replace(WALK, "villain:walk"))
    with pytest.raises(RunDirError, match="villain"):
        prepare(str(foreign))
    assert main([str(foreign), "--episodes", "1"]) == 1
    assert not (tmp_path / "ran").exists()


def test_runs_started_here_and_names_given_here_are_trusted(tmp_path: Path, foreign: Path) -> None:
    with pytest.raises(RunDirError, match="--trust"):
        prepare(str(foreign), "--set", "learner.network=tests.run.networks:WrongOutputs")
    prepare(str(foreign), "--set", f"env.id={WALK}")
    prepare(str(foreign))
    run = start(tmp_path / "new", "--set", f"env.id={WALK}")
    go_on(run, 300)
    run.task.end(Reason.INTERRUPTED)
    run.finish()
    prepare(str(tmp_path / "new"))


def test_another_file_of_the_same_name_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code = {"env.id": "some_world:make"}
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "some_world.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "second"))
    remember_trust(tmp_path, code)
    check_trust(tmp_path, code, trust=False)
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    with pytest.raises(RunDirError, match="some_world"):
        check_trust(tmp_path, code, trust=False)


def test_what_names_code() -> None:
    settings = {"env": {"id": "pack.age:Env-v0"}, "learner": {"device": "cuda:1", "network": "a.b:Net", "lr": 1.0}}
    tables = {"tables": {"learner.mine": {"head": "x:y"}}, "telemetry": {"bind": "localhost:5555", "url": "tcp://a:b"}}
    assert foreign_code(settings | tables) == {
        "env.id": "pack.age:Env-v0",
        "learner.network": "a.b:Net",
        "tables.learner.mine.head": "x:y",
    }


def test_code_is_named_in_an_environments_arguments_too_and_the_library_is_not_foreign() -> None:
    part = {
        "id": "ddrl.envs.partial:partly_observed",
        "by_rollout": [{"id": "mine:World-v0"}],
        "kwargs": {"id": "a:B-v1"},
    }
    assert foreign_code({"env": part}) == {
        "env.id": "ddrl.envs.partial:partly_observed",
        "env.by_rollout.0.id": "mine:World-v0",
        "env.kwargs.id": "a:B-v1",
    }
    assert foreign_code({"env": {"id": "ddrl.admix:generated", "kwargs": {"seed": 3}}}) == {}


def test_so_is_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    task = tmp_path / "walk.toml"
    task.write_text(f'[env]\nid = "{WALK}"\n[pool]\ndevices = "cpu:0"\n')
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    policy = "pool.policy=tests.pool.alternate:Alternate"
    plan = new_setup(parse(["--serial", "--tasks", str(task), "--set", f"run.dir={mine}", "--set", policy]))
    plan.write()
    shutil.copytree(mine, theirs)
    assert not resumed_setup(parse(["--resume", str(mine)])).trust
    with pytest.raises(RunDirError, match=r"pool\.policy.*walk: env\.id = .*--trust"):
        resumed_setup(parse(["--resume", str(theirs)]))
    assert resumed_setup(parse(["--resume", str(theirs), "--trust"])).trust
    resumed_setup(parse(["--resume", str(theirs)]))  # remembered

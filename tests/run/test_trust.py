"""A run directory from elsewhere runs no code of its own before the user has said so."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ddrl.core import plugins
from ddrl.core.config import EnvConfig
from ddrl.core.errors import ConfigError, EnvError, RunDirError
from ddrl.core.plugins import check_trust, code_name, foreign_code, is_trusted, remember_trust
from ddrl.envs.making import probe_spec
from ddrl.evaluate import main
from ddrl.pool.mode import new_setup, resumed_setup
from ddrl.run.cli import parse, tasks
from ddrl.run.preparation import Preparation
from ddrl.run.task import Reason
from tests.run.test_resume import go_on, start

WALK = "tests.run.environments:walk"


@pytest.fixture(autouse=True)
def _compiled_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are kept is of the whole process."""
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")


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


def test_of_code_that_is_not_here_it_is_not_said_that_another_has_started_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code = {"env.id": "own_world:make"}
    with monkeypatch.context() as patch:
        (tmp_path / "own_world.py").write_text("")
        patch.syspath_prepend(str(tmp_path))
        remember_trust(tmp_path, code)
        check_trust(tmp_path, code, trust=False)
    with pytest.raises(RunDirError, match="is not found from here: start in the folder") as refusal:
        check_trust(tmp_path, code, trust=False)
    assert "not started by you" not in str(refusal.value)


RUN = Path("/run")


def test_what_names_code() -> None:
    settings = {"env": {"id": "pack.age:Env-v0"}, "learner": {"device": "cuda:1", "network": "a.b:Net", "lr": 1.0}}
    tables = {"tables": {"learner.mine": {"head": "x:y"}}, "telemetry": {"bind": "localhost", "url": "tcp://a:b"}}
    assert foreign_code(settings | tables, RUN) == {
        "env.id": "pack.age:Env-v0",
        "learner.network": "a.b:Net",
        "tables.learner.mine.head": "x:y",
        "telemetry.url": "tcp://a:b",
    }


def test_addresses_and_paths_from_outside_are_asked_for_as_code_is() -> None:
    for bind, asked in (("127.0.0.1", False), ("::1", False), ("127.evil.example", True), ("0.0.0.0", True)):
        assert bool(foreign_code({"telemetry": {"bind": bind}}, RUN)) == asked
    for file, asked in (("", False), ("/run/records", False), ("/run/../home", True), ("records", True)):
        assert bool(foreign_code({"replay": {"file": file}}, RUN)) == asked
    assert foreign_code({"env": {"id": "Ant-v5", "kwargs": {"xml_file": "/home/me/x.xml"}}}, RUN)
    assert not foreign_code({"env": {"id": "ALE/Pong-v5", "kwargs": {"obs_type": "rgb", "keep": [1, 2]}}}, RUN)


@pytest.mark.parametrize("text", ["a.b-c:X", "a:X:y", "a", ":X", "a:", "a b:X", "a:X y", "..a:X", "a.:X", "tcp://a:b"])
def test_what_is_no_name_of_code_is_not_imported(text: str) -> None:
    assert code_name(text) is None
    assert foreign_code({"learner": {"network": text}}, RUN) or ":" not in text
    for load in (lambda: plugins.load("rollout.chooser", "ddrl.acting.choosers", text), lambda: probe_spec(of(text))):
        with pytest.raises((ConfigError, EnvError)):
            load()


def of(env_id: str) -> EnvConfig:
    return EnvConfig(id=env_id)


def test_a_shipped_tasks_factory_asks_nothing_and_another_argument_does() -> None:
    for path in tasks().values():
        assert foreign_code(tomllib.loads(path.read_text()), RUN) == {}
    part: dict[str, Any] = {
        "id": "ddrl.envs.making:partly_observed",
        "by_rollout": [{"id": "mine:World-v0"}],
        "kwargs": {"id": "a:B-v1"},
    }
    assert foreign_code({"env": part}, RUN) == {
        "env.id": "ddrl.envs.making:partly_observed",
        "env.by_rollout.0.id": "mine:World-v0",
        "env.kwargs.id": "a:B-v1",
    }
    assert foreign_code({"env": {"id": "ddrl.admix:generated", "kwargs": {"seed": 3}}}, RUN) == {}
    assert foreign_code({"env": {"id": "ddrl.admix:generated", "kwargs": {"contracts": 10**9}}}, RUN)
    assert foreign_code({"env": {"id": "ddrl.admix:logged", "kwargs": {"log": "/home/me"}}}, RUN)
    assert foreign_code({"learner": {"network": "ddrl.run.cli:parse"}}, RUN)


def test_code_that_lies_in_the_run_counts_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And code elsewhere by its file, which one may edit."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "gift"
    run.mkdir()
    for name, asked in (("gift.world:make", True), ("elsewhere:make", False)):
        path = tmp_path / f"{name.partition(':')[0].replace('.', '/')}.py"
        path.write_text("x = 1\n")
        remember_trust(run, {"env.id": name})
        assert is_trusted(run, name)
        path.write_text("x = 2\n")
        assert is_trusted(run, name) != asked
    (run / "__init__.py").write_text("evil = 1\n")  # executed by an import of what lies beside it
    remember_trust(run, {"env.id": "gift.world:make"})
    (run / "__init__.py").write_text("evil = 2\n")
    assert not is_trusted(run, "gift.world:make")


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


def test_a_user_without_a_home_is_asked_again_and_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not plugins.is_remembered("a digest")
    with monkeypatch.context() as refusing:
        refusing.setattr(Path, "mkdir", lambda *arguments, **options: os.listdir("/nowhere"))
        plugins.remember(["a digest"])
    assert not plugins.is_remembered("a digest")

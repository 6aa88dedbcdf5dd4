"""A run's files say whose they are: what was cut, changed, mixed up or lost is refused with a remedy, or set aside and
said, and never resumed with in silence."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from ddrl.core.errors import CheckpointError, ConfigError, DdrlError, RunDirError
from ddrl.run.cli import parse
from ddrl.run.directory import FILES
from ddrl.run.preparation import Preparation
from ddrl.telemetry import Run
from tests.run.test_resume import go_on, resume, start, stop


def made(path: Path, *arguments: str) -> Path:
    run = start(path, *arguments)
    go_on(run, 300)
    stop(run)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that differ in a setting."""
    folder = tmp_path_factory.mktemp("runs")
    return made(folder / "one"), made(folder / "two", "--set", "learner.lr=0.007")


@pytest.fixture
def run(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(runs[0], tmp_path / "run")


def prepare(run: Path) -> Preparation:
    preparation = Preparation(parse(["--serial", "--resume", str(run)]), "again")
    preparation.directory.release()
    return preparation


def state_file(run: Path) -> Path:
    [path] = (run / "checkpoints").glob("*/state.json")
    return path


def test_a_copy_is_the_same_run_and_keeps_its_id(run: Path) -> None:
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    assert (run / "config.toml").read_text().startswith(f"# run {run_id}, settings ")
    assert json.loads(state_file(run).read_text())["run_id"] == run_id
    assert json.loads((run / "policy.json").read_text())["run_id"] == run_id
    assert json.loads((run / "summary.json").read_text())["run_id"] == run_id
    assert prepare(run).directory.run_id == run_id


def test_settings_that_were_cut_emptied_or_changed_are_refused_with_a_remedy(run: Path) -> None:
    path = run / "config.toml"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    for broken in ("", "\n", lines[0], "".join(lines[1:]), *("".join(lines[:at]) for at in range(1, len(lines), 17))):
        path.write_text(broken)
        with pytest.raises((RunDirError, ConfigError), match=r"remove it, and --resume takes the settings"):
            prepare(run)
        assert path.read_text() == broken
    path.write_text(text.replace("\nbatch_size = ", "\nbatch_size = 1"))
    with pytest.raises(RunDirError, match=r"--set learner.batch_size=1\d"):
        prepare(run)
    path.unlink()
    assert prepare(run).config.learner.batch_size > 0


def test_what_could_not_be_written_is_refused_before_anything_is(run: Path) -> None:
    for name in FILES:
        path = run / name
        kept = path.read_bytes() if path.exists() else b""
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null") if name == "summary.json" else path.mkdir()
        before = {each: each.lstat().st_mtime_ns for each in run.rglob("*")}
        with pytest.raises(RunDirError, match=f"{name} is no file, and could not be written: remove it"):
            prepare(run)
        assert {each: each.lstat().st_mtime_ns for each in run.rglob("*")} == before
        path.unlink() if path.is_symlink() else path.rmdir()
        path.write_bytes(kept)


def test_no_flipped_bit_of_the_settings_is_other_settings(run: Path) -> None:
    path = run / "config.toml"
    data = path.read_bytes()
    generator = random.Random(1)
    for _ in range(150):
        bit = generator.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DdrlError):
            prepare(run)


@pytest.mark.parametrize("name", ["config.toml", "run.json", "checkpoints"])
def test_files_of_another_run_are_refused(name: str, run: Path, runs: tuple[Path, Path]) -> None:
    if name == "checkpoints":
        shutil.rmtree(run / name)
        shutil.copytree(runs[1] / name, run / name)
    else:
        shutil.copy(runs[1] / name, run / name)
    with pytest.raises((RunDirError, CheckpointError), match="is of the run"):
        prepare(run)


def test_a_checkpoint_under_another_number_is_refused(run: Path) -> None:
    folder = state_file(run).parent
    folder.rename(folder.with_name("000000999999"))
    with pytest.raises(CheckpointError, match="it was renamed"):
        prepare(run)


def test_strange_names_among_checkpoints_hurt_nobody(run: Path) -> None:
    (run / "checkpoints" / ".000000034323.99").write_text("")
    (run / "checkpoints" / "²").mkdir()
    prepare(run)


def test_a_run_of_an_earlier_version_is_resumed_with_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ddrl.run.checkpoint import _checksum

    config = run / "config.toml"
    config.write_text(config.read_text().partition("\n")[2])
    document = json.loads(state_file(run).read_text())
    kept = {key: document[key] for key in document.keys() - {"format", "checksum", "run_id", "settings"}}
    state_file(run).write_text(json.dumps({"format": document["format"], "checksum": _checksum(kept), **kept}))
    prepare(run)
    assert "an earlier version wrote it" in capsys.readouterr().err


def test_a_damaged_policy_and_a_foreign_history_are_set_aside_and_said(
    run: Path, runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "policy.onnx").write_bytes(b"")
    shutil.copy(runs[1] / "telemetry.sqlite", run / "telemetry.sqlite")
    resumed = resume(run)
    go_on(resumed, 400)
    stop(resumed)
    said = capsys.readouterr().err
    assert "it was set aside as policy" in said
    assert len(list(run.glob("policy.onnx.aside-*"))) == 1
    assert len(list(run.glob("telemetry.sqlite.aside-*"))) == 1
    with Run(run) as read:
        assert any("is of the run" in text for text in read.events()["text"])


@pytest.mark.parametrize("value", [[], {}, "x", None, 10**400])
def test_so_is_a_policy_whose_evaluation_is_none(value: object, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((run / "policy.json").read_text())
    document["evaluation"]["episodes"] = value
    (run / "policy.json").write_text(json.dumps(document | {"checksum": ""}))
    stop(resume(run))
    assert "it was set aside as policy" in capsys.readouterr().err


def test_an_orderly_resume_gives_nothing_up(run: Path) -> None:
    resumed = resume(run)
    go_on(resumed, 400)
    stop(resumed)
    with Run(run) as read:
        assert not any("given up" in text for text in read.events()["text"])

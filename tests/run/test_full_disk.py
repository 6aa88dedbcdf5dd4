"""A full disk does not end a run; nothing that was whole is lost; a killed save leaves nothing in the way."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ddrl.core.errors import RunDirError
from ddrl.core.roles import Evaluation, Returns
from ddrl.run import directory as disk
from ddrl.run.checkpoint import newest_checkpoint, write_checkpoint
from ddrl.run.directory import RunDirectory, sweep_unfinished
from ddrl.run.task import Reason
from tests.run.test_resume import go_on, policy, resume, start

STATE = {
    "training": {"env_steps": 5, "updates": 1, "samples": 1, "policy_version": 0, "wall_seconds": 1.0, "cuts": 1},
    "live": {"lr": None, "epsilon": None, "samples_per_insert": None, "scheme": None},
    "source": {},
    "layout": "",
    "env_id": "",
    "algorithm": "",
}


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_goes_on_and_saves_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run = start(folder)
    go_on(run, 1200)
    first = newest_checkpoint(folder / "checkpoints")
    run.task.accept(Evaluation(7, 1200, Returns(300.0, 0.0, 20)), run.task.acting_vector())
    monkeypatch.setattr(disk, "RETRY", 0.0)
    monkeypatch.setattr(os, "fsync", full)
    go_on(run, 1000)
    run.task.accept(Evaluation(9, 2200, Returns(400.0, 0.0, 20)), run.task.acting_vector())
    assert newest_checkpoint(folder / "checkpoints") == first
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [first.path.name]
    assert policy(folder)["mean"] == 300.0
    said = [line for line in capsys.readouterr().err.splitlines() if "GOES ON IN MEMORY" in line]
    assert len([line for line in said if line.startswith("ddrl:") and "checkpoint" in line]) == 1, said
    assert len([line for line in said if line.startswith("ddrl:") and "policy" in line]) == 1, said
    monkeypatch.undo()
    go_on(run, 200)
    run.task.look(time.monotonic())
    assert newest_checkpoint(folder / "checkpoints").env_steps > first.env_steps
    assert policy(folder)["mean"] == 400.0
    run.task.end(Reason.INTERRUPTED)
    run.finish()


def test_the_oldest_checkpoint_gives_way_to_the_newest_but_never_the_last_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    run = start(tmp_path / "run", "--set", "run.checkpoint_period=0")
    for _ in range(3):
        go_on(run, 300)
        assert run.task.checkpoints.save()
    before = sorted(path.name for path in folder.iterdir())
    assert len(before) == 3
    sync = os.fsync

    def has_room_for_two(descriptor: int) -> None:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if is_file and sum(path.name[0] != "." for path in folder.iterdir()) > 1:
            full()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", has_room_for_two)
    go_on(run, 300)
    assert run.task.checkpoints.save()
    after = sorted(path.name for path in folder.iterdir())
    assert after[0] == before[-1]
    assert len(after) == 2
    assert f"the oldest, {before[0]}, was removed" in capsys.readouterr().err
    monkeypatch.setattr(os, "fsync", full)
    go_on(run, 300)
    assert not run.task.checkpoints.save()
    assert [path.name for path in folder.iterdir()] == after[1:]
    monkeypatch.undo()
    run.task.end(Reason.INTERRUPTED)
    run.finish()


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, False), (errno.EACCES, False)]
)
def test_free_some_space_is_said_of_a_full_disk_alone(
    number: int, remedy: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise RunDirError(f"it cannot be written: {error.strerror}") from None

    assert not disk.Disk(RunDirectory(tmp_path)).attempt("summary", refuse)
    said = capsys.readouterr().err
    assert os.strerror(number) in said
    assert ("free some space" in said) == remedy


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")
def test_so_it_does_on_a_real_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode()}")
    try:
        run = start(place / "real")
        go_on(run, 1200)
        first = newest_checkpoint(place / "real" / "checkpoints")
        filler = place / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(64 << 20))
        go_on(run, 1000)
        assert not run.task.checkpoints.save()
        assert newest_checkpoint(place / "real" / "checkpoints") == first
        filler.unlink()
        assert run.task.checkpoints.save()
        assert newest_checkpoint(place / "real" / "checkpoints").env_steps > first.env_steps
        monkeypatch.setattr(disk, "RETRY", 0.0)
        run.task.end(Reason.INTERRUPTED)
        run.finish()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_stays_full_is_said_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(tmp_path / "run")
    go_on(run, 300)
    monkeypatch.setattr(os, "fsync", full)
    run.task.end(Reason.INTERRUPTED)
    with pytest.raises(RunDirError, match=r"not all of it is saved.*No space left") as refusal:
        run.finish()
    run.abandon(refusal.value)


def test_a_checkpoint_of_the_same_step_is_replaced_only_when_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(text: str) -> Path:
        return write_checkpoint(tmp_path, 5, STATE, lambda folder: (folder / "file").write_text(text), keep=2)

    path = write("first")
    original, calls = Path.rename, []

    def refuse_the_second(self: Path, target: Path) -> Path:
        calls.append(target)
        return full() if len(calls) == 2 else original(self, target)  # type: ignore[func-returns-value]

    monkeypatch.setattr(Path, "rename", refuse_the_second)
    with pytest.raises(RunDirError, match="older ones are untouched"):
        write("second")
    monkeypatch.undo()
    assert (newest_checkpoint(tmp_path).path / "file").read_text() == "first"
    assert write("third") == path
    with pytest.raises(RunDirError, match="No such file or directory; the folder of checkpoints is gone"):
        write_checkpoint(tmp_path / "gone", 5, STATE, lambda folder: shutil.rmtree(folder.parent), keep=2)
    assert (newest_checkpoint(tmp_path).path / "file").read_text() == "third"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_no_checkpoint_is_written_through_a_link_that_came_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "checkpoints").symlink_to("outside")
    with pytest.raises(RunDirError, match="nothing is written through it"):
        write_checkpoint(tmp_path / "checkpoints", 5, STATE, lambda folder: (folder / "file").touch())
    assert list((tmp_path / "outside").iterdir()) == []


def test_what_a_killed_run_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder)
    go_on(run, 300)
    run.task.end(Reason.INTERRUPTED)
    run.finish()
    whole = newest_checkpoint(folder / "checkpoints").path
    (folder / "checkpoints" / ".000000000900.12345").mkdir()
    (folder / ".config.toml.abcdef").write_text("half")
    (folder / ".run.json.abcdef").mkdir()  # nobody's
    whole.rename(whole.with_name(f".{whole.name}.replaced"))  # killed between the two renames
    again = resume(folder)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [whole.name]
    assert not (folder / ".config.toml.abcdef").exists()
    assert (folder / ".run.json.abcdef").is_dir()
    again.abandon(RuntimeError("the test is over"))
    whole.with_name(f".{whole.name}.replaced").mkdir()  # killed after them
    sweep_unfinished(RunDirectory(folder))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [whole.name]
    assert newest_checkpoint(folder / "checkpoints").path == whole

"""What is said of writes that the disk refuses: once when it begins, once when it is over, and nothing else."""

import errno
from pathlib import Path

import pytest

from ddrl.core.errors import CheckpointError, RunDirError
from ddrl.run.directory import Disk, RunDirectory, RunLock


def refuse() -> None:
    raise CheckpointError("a/b: no space left on device")


def test_a_refusal_and_its_end_are_said_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    disk, told = Disk(RunDirectory(Path())), list[tuple[str, str]]()
    disk.record_event = lambda kind, text: told.append((kind, text))
    assert disk.attempt("checkpoint", lambda: None)
    assert told == []
    for _ in range(2):
        assert not disk.attempt("checkpoint", refuse)
        assert disk.refused == "a/b: no space left on device"
        assert not disk.due("checkpoint")
        assert disk.due("policy")
    (kind, text), *rest = told
    assert (kind, rest) == ("disk", [])
    assert text.startswith("a/b: no space left on device. TRAINING GOES ON IN MEMORY, the checkpoint is NOT SAVED")
    assert disk.attempt("checkpoint", lambda: None)
    assert told[1:] == [("disk", "the checkpoint is saved again")]
    assert disk.due("checkpoint")
    assert disk.refused == ""
    assert disk.attempt("checkpoint", lambda: None)
    assert len(told) == 2
    assert capsys.readouterr().err.count("ddrl: ") == 2


def test_errors_that_are_not_the_disks_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        Disk(RunDirectory(Path())).attempt("policy", lambda: 1 / 0)


def test_messages_name_the_directory_and_not_the_descriptor_by_which_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    directory = RunDirectory(before, lock := RunLock(before))
    disk = Disk(directory)

    def refused() -> None:
        raise OSError(errno.EACCES, "no", str(directory.place / "policy.json"))

    disk.attempt("policy", refused)
    assert f"'{before}/policy.json'" in disk.refused
    before.rename(after)
    error = RunDirError(f"cannot write {directory.place / 'telemetry.sqlite'}")
    disk.notify(f"{error}; {directory.place} is full")
    lock.release()
    assert str(error) == f"cannot write {after}/telemetry.sqlite", "shown after its descriptor was closed"
    for words in (capsys.readouterr().err, disk.refused):
        assert "/proc/" not in words

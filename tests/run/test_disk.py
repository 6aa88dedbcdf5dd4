"""What is said of writes that the disk refuses: once when it begins, once when it is over, and nothing else."""

from pathlib import Path

import pytest

from ddrl.core.errors import CheckpointError
from ddrl.run.directory import Disk, RunDirectory


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

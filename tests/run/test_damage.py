"""Damaged files of a run are refused in one clear line, without much memory; a finished run is read from a disk that
cannot be written."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddrl.acting.policy_file import load_policy
from ddrl.core.errors import CheckpointError, DdrlError, RunDirError
from ddrl.evaluate import main
from ddrl.run.checkpoint import newest_checkpoint, read_checkpoint
from ddrl.run.directory import RunDirectory
from ddrl.run.task import Reason
from ddrl.telemetry import Run
from tests.run.test_resume import go_on, start

QUICK, LONG = 2_000, 100_000
MORE_MEMORY = 200 << 10  # [KiB]
BITS = (  # what parsers stumble over
    b"\xff",
    b"\x00",
    b"9" * 5000,
    b"[" * 3000,
    b'"',
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"\xed\xa0\x80",
    b"[[",
    b"\n",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "run"
    run = start(folder)
    go_on(run, 300)
    run.task.end(Reason.INTERRUPTED)
    run.finish()
    return folder


def mutated(data: bytes, source: random.Random) -> bytes:
    """One to three changes: a flipped byte, a cut, a repetition, or a piece that parsers stumble over."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 3)):
        place, kind = source.randrange(len(changed) + 1), source.randrange(5)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            del changed[place : place + source.choice((1, 2, 9, 1 << 20))]
        elif kind == 2:
            changed[place:place] = changed[place : place + source.randrange(200)]
        elif kind == 3:
            changed[place:place] = source.choice(BITS)
        elif place < len(changed):
            changed[place] = source.randrange(256)
    return bytes(changed)


def open_config(folder: Path) -> None:
    RunDirectory.open(folder)


def open_state(folder: Path) -> None:
    newest_checkpoint(folder / "checkpoints")


def open_policy(folder: Path) -> None:
    load_policy(folder)


FILES = {
    "config.toml": open_config,
    "state.json": open_state,
    "policy.json": open_policy,
    "policy.safetensors": open_policy,
    "policy.onnx": open_policy,
}


def attack(whole: Path, folder: Path, name: str, read: Callable[[Path], None], count: int) -> int:
    """Read `count` damaged copies of a file; how many were refused."""
    shutil.copytree(whole, folder)
    path = next(folder.rglob(name))
    data, refused, source = path.read_bytes(), 0, random.Random(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        path.write_bytes(mutated(data, source))
        said = ""
        try:
            read(folder)
        except DdrlError as error:
            said = str(error)
            refused += 1
        assert "\n" not in said
        assert len(said) < 1500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MORE_MEMORY
    return refused


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused(name: str, whole: Path, tmp_path: Path) -> None:
    refused = attack(whole, tmp_path / "run", name, FILES[name], QUICK)
    assert refused > QUICK * (0.5 if name == "config.toml" else 0.9)


def test_a_byte_that_is_no_text_is_refused_wherever_it_is_in_a_policy(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    path = next((tmp_path / "run").rglob("policy.json"))
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + b"\x90" + data[place + 1 :])
        with pytest.raises(CheckpointError):
            load_policy(tmp_path / "run")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FILES)
def test_so_are_very_many(name: str, whole: Path, tmp_path: Path) -> None:
    attack(whole, tmp_path / "run", name, FILES[name], LONG)


def test_every_changed_value_of_a_state_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    path = next((tmp_path / "run").rglob("state.json"))
    state = json.loads(path.read_text())
    for section in ("training", "live", "source", "digests"):
        for name in state[section]:
            changed = {**state, section: {**state[section], name: 3}}
            path.write_text(json.dumps(changed))
            with pytest.raises(CheckpointError, match=r"state\.json is not what was written"):
                read_checkpoint(path.parent)
    path.write_text(json.dumps(state))
    read_checkpoint(path.parent)


def test_a_file_without_end_is_not_read_to_its_end(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    os.truncate(tmp_path / "run" / "config.toml", 1 << 40)
    with pytest.raises(RunDirError, match="longer than"):
        RunDirectory.open(tmp_path / "run")


def test_a_fifo_in_place_of_a_file_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "config.toml").unlink()
    os.mkfifo(tmp_path / "run" / "config.toml")
    with pytest.raises(RunDirError, match="not a file"):
        RunDirectory.open(tmp_path / "run")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")
def test_a_finished_run_is_read_and_played_from_a_disk_that_cannot_be_written(whole: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode()}")
    try:
        shutil.copytree(whole, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert RunDirectory.open(disk / "run")[1].env.id == "CartPole-v1"
        assert main([str(disk / "run"), "--episodes", "2"]) == 0
        run = Run(disk / "run")
        assert run.summary["reason"] == "interrupted"
        with pytest.raises(RunDirError, match="Read-only file system"):
            RunDirectory.open(disk / "run", claim=True)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)

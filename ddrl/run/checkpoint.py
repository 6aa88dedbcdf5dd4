"""Checkpoints: everything the trainer needs to go on, whole or not at all.

    RUN/checkpoints/<env steps>/learner.safetensors   parameters, targets, optimizer
                                replay.snapshot       records and selectors (or trajectories.npy)
                                state.json            counts, live settings, digests of the files; written last

A checkpoint is written under a temporary name and renamed when it is complete, so a run killed at any moment leaves the
older ones intact. The newest whole one is taken; what is torn or foreign is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddrl.core.errors import CheckpointError, RunDirError
from ddrl.run.directory import write_json

FORMAT = 2
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, verified."""

    path: Path
    state: dict[str, Any]

    @property
    def env_steps(self) -> int:
        """Environment steps done when it was written."""
        return int(self.state["training"]["env_steps"])


def write_checkpoint(
    folder: Path, env_steps: int, state: dict[str, Any], write: Callable[[Path], object], keep: int
) -> Path:
    """Write a checkpoint and drop all but the `keep` newest.

    `write` writes the checkpoint's files into the folder it is given. `state` must be JSON. Raises RunDirError where
    the disk refuses."""
    final = folder / f"{env_steps:012d}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        files = sorted(temporary.iterdir())
        for path in files:
            _sync(path)
        digests = {path.name: _digest(path) for path in files}
        write_json(temporary / STATE, {"format": FORMAT, "digests": digests, **state})
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(folder)
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunDirError(
            f"the checkpoint {final} cannot be written: {error.strerror or error}; older checkpoints are untouched"
        ) from None
    return final


def newest_checkpoint(folder: Path) -> Checkpoint:
    """The newest checkpoint, verified; CheckpointError if there is none or it is damaged."""
    found = _complete(folder)
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: the run stopped before its first one; start a new run"
        )
    return read_checkpoint(found[-1])


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify one checkpoint against its digests."""
    advice = f"delete {path} to resume from the one before it"
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {STATE} cannot be read ({error}); {advice}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("digests"), dict):
        found = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(
            f"the checkpoint {path} has format {found}, this ddrl reads format {FORMAT}: another version wrote it; "
            f"{advice}"
        )
    for name, digest in state["digests"].items():
        try:
            actual = _digest(path / name)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {path} is incomplete: {name} cannot be read ({error.strerror or error}); {advice}"
            ) from None
        if actual != digest:
            raise CheckpointError(
                f"the checkpoint {path} is damaged: {name} is not what was written (its digest differs); {advice}"
            )
    return Checkpoint(path, state)


def _complete(folder: Path) -> list[Path]:
    """Checkpoints by age, oldest first; unfinished ones have a dot in front."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdigit())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""A checkpoint is read as it was written, or refused by the name of the file that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddrl.core.errors import CheckpointError
from ddrl.run.checkpoint import newest_checkpoint, write_checkpoint

STATE: dict[str, Any] = {
    "training": {"env_steps": 5, "updates": 2, "samples": 64, "policy_version": 1, "wall_seconds": 0.5, "cuts": 0},
    "live": {"lr": None, "epsilon": None, "samples_per_insert": None, "scheme": None},
    "source": {},
    "layout": "",
    "env_id": "CartPole-v1",
    "algorithm": "dqn",
}


def write(folder: Path, env_steps: int = 5, data: bytes = b"parameters") -> Path:
    state = STATE | {"training": STATE["training"] | {"env_steps": env_steps}}
    return write_checkpoint(
        folder, env_steps, state, lambda path: (path / "learner.safetensors").write_bytes(data), keep=2
    )


def test_the_newest_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    for env_steps in (5, 10, 15):
        path = write(tmp_path, env_steps)
    checkpoint = newest_checkpoint(tmp_path)
    assert (checkpoint.path, checkpoint.env_steps) == (path, 15)
    saved = msgspec.to_builtins(checkpoint.state)
    assert {**saved, "training": STATE["training"], "live": STATE["live"]}.items() >= STATE.items()
    assert saved["live"].items() >= STATE["live"].items()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["000000000010", "000000000015"]


def test_one_changed_byte_in_a_file_is_refused_by_the_files_name(tmp_path: Path) -> None:
    (write(tmp_path) / "learner.safetensors").write_bytes(b"parameterz")
    with pytest.raises(CheckpointError, match=r"learner\.safetensors is not what was written"):
        newest_checkpoint(tmp_path)


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (write(tmp_path) / "learner.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: learner\.safetensors cannot be read"):
        newest_checkpoint(tmp_path)


def test_a_changed_count_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path) / "state.json"
    file.write_text(file.read_text().replace('"updates": 2', '"updates": 3'))
    with pytest.raises(CheckpointError, match="its checksum differs"):
        newest_checkpoint(tmp_path)

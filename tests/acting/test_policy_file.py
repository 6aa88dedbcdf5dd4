"""The policy on disk comes back as it was, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.core.config import EnvConfig
from ddrl.core.errors import CheckpointError, RunDirError
from ddrl.core.specs import ActingInput, ArraySpec, EnvSpec
from tests.acting.networks import make_mlp, random_vector
from tests.sources import environment

SPEC = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 2)
STATE = ActingInput("memory", "state", (3,), output="q")
MODEL = msgspec.structs.replace(make_mlp(SPEC), inputs=(STATE,), settings={"temperature": 2.0})
ENV = EnvConfig(kwargs={"max_episode_steps": 50})


def save(path: Path, seed: int = 1) -> np.ndarray:
    vector = random_vector(MODEL.layout, seed)
    save_policy(path, MODEL, vector, env=asdict(ENV), evaluation={"mean": 12.5})
    return vector


def test_a_policy_comes_back_as_it_was(tmp_path: Path) -> None:
    vector = save(tmp_path)
    layout, saved = MODEL.layout, load_policy(tmp_path)
    assert (saved.model, saved.env, saved.evaluation) == (MODEL, ENV, {"mean": 12.5})
    for name, view in layout.views(saved.vector).items():
        np.testing.assert_array_equal(view, layout.views(vector)[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy.json", "policy.onnx", "policy.safetensors"]


def test_the_parameters_are_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    vector = save(tmp_path)
    layout = MODEL.layout
    tensors = safetensors.numpy.load_file(tmp_path / "policy.safetensors")
    np.testing.assert_array_equal(tensors["0.weight"], layout.views(vector)["0.weight"])


@pytest.mark.parametrize("name", ["policy.json", "policy.onnx", "policy.safetensors"])
def test_a_file_cut_short_or_changed_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    for broken in (whole[:-20], b"", whole[: len(whole) // 2] + b"\xff\x00" + whole[len(whole) // 2 + 2 :]):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load_policy(tmp_path)


def test_files_of_two_policies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 2)
    (tmp_path / "a" / "policy.safetensors").write_bytes((tmp_path / "b" / "policy.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="of another policy"):
        load_policy(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "ddrl policy 99"}, "this ddrl reads 'ddrl policy 2'"),
        (
            {"format": "ddrl policy 1", "chooser": None},
            "has the format 'ddrl policy 1', this ddrl reads 'ddrl policy 2'",
        ),
        ({"format": None}, "corrupt or was not written by ddrl"),
        ({"surprise": 1}, "corrupt or was not written by ddrl"),
    ],
)
def test_a_foreign_manifest_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    save(tmp_path)
    manifest = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps(manifest | change))
    with pytest.raises(CheckpointError, match=words):
        load_policy(tmp_path)


def test_a_directory_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no policy\.json"):
        load_policy(tmp_path)
    with pytest.raises(RunDirError, match="there is no run directory"):
        load_policy(tmp_path / "nowhere")


def test_a_directory_that_cannot_be_written_is_refused_and_an_older_policy_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunDirError, match="cannot write the policy"):
        save(tmp_path / "nowhere")
    first = save(tmp_path, 1)

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name.startswith(".policy.safetensors."):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments, **options)

    original = Path.open
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RunDirError, match="No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert names(tmp_path) == ["policy.json", "policy.onnx", "policy.safetensors"]
    assert parameters(tmp_path, first) == parameters(tmp_path)


@pytest.mark.parametrize("moment", range(1, 18))
def test_a_process_killed_while_it_saves_leaves_a_whole_policy(tmp_path: Path, moment: int) -> None:
    """Killed before each step of a save that changes the directory: the one before or the new one is read, whole."""
    first = save(tmp_path, 1)
    code = KILLED.format(path=str(tmp_path), moment=moment)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr
    assert (done.returncode == 0) == (moment > STEPS)
    vectors = {parameters(tmp_path, vector) for vector in (first, random_vector(MODEL.layout, 2))}
    assert parameters(tmp_path) in vectors
    third = save(tmp_path, 3)
    assert parameters(tmp_path) == parameters(tmp_path, third)
    assert names(tmp_path) == ["policy.json", "policy.onnx", "policy.safetensors"]


STEPS = 15  # the old manifest read; three files opened, synced and named, all three renamed and synced
KILLED = """
import os, pathlib, signal
from tests.acting.test_policy_file import save
count = 0
def killing(function):
    def call(*arguments, **options):
        global count
        count += 1
        if count == {moment}:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
pathlib.Path.open = killing(pathlib.Path.open)
pathlib.Path.replace = killing(pathlib.Path.replace)
os.fsync = killing(os.fsync)
save(pathlib.Path({path!r}), 2)
"""


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def parameters(path: Path, vector: np.ndarray | None = None) -> bytes:
    """The tensors of `vector`, without padding; default: of the policy in `path`."""
    views = MODEL.layout.views(load_policy(path).vector if vector is None else vector)
    return b"".join(view.tobytes() for view in views.values())


def test_a_killed_save_between_manifest_and_parameters_is_finished_by_the_next(tmp_path: Path) -> None:
    """The next save must not remove the staged files that policy.json names before it has written its own."""
    save(tmp_path, 1)
    code = KILLED.format(path=str(tmp_path), moment=13)  # before the second rename
    subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment())
    code = code.replace(", 2)", ", 3)").replace("== 13", "== 11")
    subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment())
    second = random_vector(MODEL.layout, 2)
    assert parameters(tmp_path) == parameters(tmp_path, second)


def test_a_layout_that_would_take_much_memory_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    manifest = json.loads((tmp_path / "policy.json").read_text()) | {"checksum": ""}
    manifest["layout"]["nbytes"] = 1 << 50
    (tmp_path / "policy.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="of another network"):
        load_policy(tmp_path)


def test_a_changed_value_of_the_manifest_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    manifest = json.loads((tmp_path / "policy.json").read_text()) | {"evaluation": {"mean": 99.0}}
    (tmp_path / "policy.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="checksum"):
        load_policy(tmp_path)


def test_a_field_that_is_taken_out_is_refused_and_a_file_that_was_written_without_it_is_read(tmp_path: Path) -> None:
    save(tmp_path)
    place = tmp_path / "policy.json"
    manifest = json.loads(place.read_text())
    del manifest["env"]["figures"]
    place.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="checksum"):
        load_policy(tmp_path)
    written = msgspec.json.encode(manifest | {"checksum": ""}, order="deterministic")
    place.write_text(json.dumps(manifest | {"checksum": hashlib.blake2b(written, digest_size=16).hexdigest()}))
    load_policy(tmp_path)
    del manifest["run_id"]  # as versions before run ids wrote it, whose checksums cannot be computed again
    place.write_text(json.dumps(manifest))
    load_policy(tmp_path)

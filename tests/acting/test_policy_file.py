"""The policy on disk comes back as it was, or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.core.algorithm import ActingInput
from ddrl.core.config import EnvConfig
from ddrl.core.errors import CheckpointError, RunDirError
from ddrl.core.specs import ArraySpec, EnvSpec
from tests.acting.networks import make_mlp, random_vector

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
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("ddrl.core.files.os.fsync", Mock(side_effect=[None, full]))  # the graph fits, the rest does not
    with pytest.raises(RunDirError, match="No space left"):
        save(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"policy.onnx", "policy.safetensors", "policy.json"}
    layout = MODEL.layout
    np.testing.assert_array_equal(
        layout.views(load_policy(tmp_path).vector)["0.weight"], layout.views(first)["0.weight"]
    )

"""A policy file that needs no ddrl: what it computes is what the run's policy does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from ddrl import export
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.core.config import Config, EnvConfig, LearnerConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.envs import probe_spec
from ddrl.learner import Learner, export_acting
from ddrl.learner.part import FlatParameters


class Normalized(nn.Module):
    """A network of someone's own: bytes, batch normalization, a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.norm = nn.BatchNorm1d(12)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.values = nn.Linear(12, 3)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.gain * self.values(self.norm(self.flatten(seen).float() / 255))


def saved_by(algorithm: str, env_id: str, run: Path) -> EnvSpec:
    config = Config(env=EnvConfig(id=env_id), learner=LearnerConfig(algorithm=algorithm, hidden=[8, 8]))
    spec = probe_spec(config.env)
    torch.manual_seed(0)
    learner = Learner.of(config, spec)
    save_policy(run, learner.acting_model(), learner.parameters.numpy())
    return spec


def session_of(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("algorithm", "env_id"),
    [
        *(("dqn", "CartPole-v1"), ("c51", "CartPole-v1"), ("iqn", "Acrobot-v1")),
        *(("td3", "Pendulum-v1"), ("r2d2", "FrozenLake-v1")),
    ],
)
def test_the_file_gives_the_actions_of_the_run(tmp_path: Path, algorithm: str, env_id: str) -> None:
    spec = saved_by(algorithm, env_id, tmp_path)
    assert export.main([str(tmp_path)]) == 0
    session = session_of(tmp_path / "agent.onnx")
    saved = load_policy(tmp_path)
    policy = ActingPolicy(saved.model)
    seen = np.random.default_rng(1).standard_normal((5, *spec.observation.shape)).astype(np.float32)
    policy.reset(count=5)
    expected = policy.greedy(seen, saved.vector)
    feed = {"observation": seen}
    for declared in saved.model.inputs:
        feed[declared.name] = np.full((5, *declared.shape), declared.initial, declared.dtype)
    if any(declared.kind == "noise" for declared in saved.model.inputs):
        return  # compared by the command itself, with the same noise
    given = session.run(["action"], {value.name: feed[value.name] for value in session.get_inputs()})[0]
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


def test_a_network_of_ones_own_is_written_with_its_buffers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    network = Normalized().eval()
    network.norm.running_mean.add_(0.25)  # type: ignore[union-attr, operator]
    spec = EnvSpec("own", ArraySpec((3, 4), "uint8"), 3)
    save_policy(tmp_path, export_acting(network, spec), FlatParameters(network).numpy())
    assert export.main([str(tmp_path), "--onnx", str(tmp_path / "mine.onnx")]) == 0
    assert "takes observation [batch, 3, 4]; gives q, action" in capsys.readouterr().out
    seen = np.random.default_rng(0).integers(0, 256, (7, 3, 4), np.uint8)
    with torch.no_grad():
        expected = network(torch.from_numpy(seen)).numpy()
    q, action = session_of(tmp_path / "mine.onnx").run(None, {"observation": seen})
    np.testing.assert_allclose(q, expected, rtol=1e-4, atol=1e-5)
    assert (action == expected.argmax(1)).all()


def test_trouble_is_one_line_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(tmp_path)]) == 1
    saved_by("dqn", "CartPole-v1", tmp_path)
    before = sorted(tmp_path.iterdir())
    assert export.main([str(tmp_path), "--onnx", str(tmp_path / "no" / "such.onnx")]) == 1
    assert sorted(tmp_path.iterdir()) == before
    assert capsys.readouterr().err.count("\n") == 2


def test_a_file_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_by("dqn", "CartPole-v1", tmp_path)
    monkeypatch.setattr("onnx.numpy_helper.from_array", lambda array, name: _changed(array, name))
    assert export.main([str(tmp_path)]) == 1
    assert not (tmp_path / "agent.onnx").exists()


def _changed(array: Any, name: str) -> Any:
    import onnx

    return onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, array.shape, (array + 1).ravel().tolist())

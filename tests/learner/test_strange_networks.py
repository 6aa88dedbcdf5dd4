"""Networks as people write them: each trains and acts as the module does, or is refused with its line at the start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.core.config import Config, LearnerConfig
from ddrl.core.errors import NetworkError
from ddrl.core.rows import row_schema
from ddrl.core.specs import EnvSpec
from ddrl.learner import Learner, describe
from ddrl.learner.checks import checked_learner
from ddrl.replay.sources import small_source
from tests.learner.learner_cases import VECTOR, random_batch


class Net(nn.Module):
    """What is between the observation and the values is `body`, of 8 features."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.first = nn.Linear(spec.observation.size, 8)
        self.last = nn.Linear(8, spec.num_actions)
        self.body = self.make()

    def make(self) -> nn.Module:
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(torch.relu(self.first(x))))


class Temperature(Net):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.temperature


class DividesItsInput(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x /= 100
        return super().forward(x)


class KeepsAttentionForLater(Net):
    """State in an attribute that no output depends on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = torch.relu(self.first(x))
        return self.last(self.features)


def learner_of(name: str, notes: list[str] | None = None) -> Learner:
    config = Config(learner=LearnerConfig(network=f"{__name__}:{name}", hidden=[8], device="cpu"))
    declaration = describe(config, VECTOR)
    source = small_source(config, row_schema(VECTOR, declaration.columns), declaration.experience)
    return checked_learner(config, VECTOR, source, ([] if notes is None else notes).append)


WORKING = [Temperature, DividesItsInput, KeepsAttentionForLater]


@pytest.mark.parametrize("name", [made.__name__ for made in WORKING])
def test_it_learns_and_its_saved_policy_computes_what_the_module_does(name: str, tmp_path: Path) -> None:
    learner = learner_of(name)
    batch = random_batch(VECTOR, 16, 1)
    before = batch.s_tm1.copy()
    learner.update(batch)
    learner.update(batch)
    np.testing.assert_array_equal(batch.s_tm1, before)
    module = learner.parts["value"].module
    vector = learner.parts["value"].online.numpy()
    save_policy(tmp_path, learner.acting_model(), vector)
    saved = load_policy(tmp_path)
    np.testing.assert_array_equal(saved.vector, vector)
    seen = np.random.default_rng(3).standard_normal((7, *VECTOR.observation.shape)).astype(np.float32)
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(seen.copy()))
    np.testing.assert_allclose(ActingPolicy(saved.model).act(seen, saved.vector)["q"], expected, atol=1e-5)


class BySign(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if x.min() >= 0:
            h = -h
        return self.last(h)


class ByZeros(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) + (3.0 if not x.any() else 0.0)


class BySize(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 0.1 if x.abs().max() > 50 else 1.0
        return self.last(self.first(x)) * scale


class Counting(Net):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.first(x)) * self.calls


class RunningMean(Net):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.mean = torch.zeros(spec.observation.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x - self.mean)


class UnsavedBuffer(Net):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.register_buffer("largest", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.abs().max().detach())
        return super().forward(x / self.largest)


class NamedAsOutput(Net):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.q = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.q)


class WrongWidth(Net):
    def make(self) -> nn.Module:
        return nn.Linear(9, 8)


REFUSED = {
    "BySign": r"must not branch in Python.*|\(line \d+ of test_strange_networks.py\)",
    "ByZeros": r"\(line \d+ of test_strange_networks.py\) computes something else",
    "BySize": r"\(line \d+ of test_strange_networks.py\) computes something else",
    "Counting": "must keep no state in attributes",
    "RunningMean": "must keep no state in attributes",
    "UnsavedBuffer": "must keep no state in attributes",
    "NamedAsOutput": "has a parameter or buffer 'q'",
    "WrongWidth": r"\(test_strange_networks.py, line \d+, in forward: return self.last",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_act_otherwise_than_it_learns_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(NetworkError, match=REFUSED[name]) as refusal:
        learner_of(name).acting_model()
    assert "\n" not in str(refusal.value)


class ByWeights(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (0.1 if self.first.weight.max() > 50 else 1.0)


class ByHugeNumbers(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (0.1 if x.max() > 1e6 else 1.0)


def test_acting_is_compared_on_the_first_observations_of_the_run_before_anything_is_learned() -> None:
    learner = learner_of("ByHugeNumbers")
    learner.acting_model()
    batch = random_batch(VECTOR, 16, 1)
    with pytest.raises(NetworkError, match=r"on observations of this run, computes something else") as refusal:
        learner.update(batch._replace(s_tm1=batch.s_tm1 + np.float32(1e7)))
    assert learner.updates == 0
    assert len(str(refusal.value)) < 300


def test_acting_is_compared_once_more_at_the_first_save(tmp_path: Path) -> None:
    learner = learner_of("ByWeights")
    learner.acting_model()
    learner.update(random_batch(VECTOR, 16, 1))
    with torch.no_grad():
        next(iter(learner.parts["value"].module.parameters()))[0, 0] = 60.0
    with pytest.raises(NetworkError, match="computes something else"):
        learner.save(tmp_path / "learner.safetensors")
    assert not list(tmp_path.iterdir())

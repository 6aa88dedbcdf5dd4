"""learner.network is read by every algorithm: actors, critics, distributions and memories of one's own; what does not
fit is refused at the start in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.rows import row_schema
from ddrl.core.specs import EnvSpec
from ddrl.envs.spaces import with_action_ranges
from ddrl.learner import Learner, describe
from ddrl.learner.actor_critic import Actor
from ddrl.learner.algorithms.dqn import DQN
from ddrl.learner.checks import checked_learner
from ddrl.replay.sources import small_source
from tests.learner import continuous_cases
from tests.learner.continuous_cases import check_gradients, random_batch
from tests.learner.learner_cases import VECTOR

BOX, SEVERAL_AXES = map(with_action_ranges, (continuous_cases.BOX, continuous_cases.SEVERAL_AXES))
CONTINUOUS = {"td3": {}, "d4pg": {"v_min": -3.0, "v_max": 1.0}}


def learner_of(
    algorithm: str, network: str, spec: EnvSpec, table: dict[str, Any] | None = None, **options: Any
) -> Learner:
    settings = {"hidden": [16], "device": "cpu", "network": f"{__name__}:{network}", "algorithm": algorithm, **options}
    tables = {f"learner.{algorithm}": {**CONTINUOUS.get(algorithm, {}), **(table or {})}}
    config = Config(run=RunConfig(seed=1), learner=LearnerConfig(**settings), tables=tables)
    declaration = describe(config, spec)
    source = small_source(config, row_schema(spec, declaration.columns), declaration.experience)
    return checked_learner(config, spec, source, lambda line: None)


class ActorOrCritic(nn.Module):
    def __init__(self, spec: EnvSpec, part: str, outputs: int = 0) -> None:
        super().__init__()
        self.part = part
        width = spec.observation.size + (spec.action.size if part == "critic" else 0)
        self.body = nn.Sequential(nn.Linear(width, 16), nn.LayerNorm(16), nn.SiLU())
        self.last = nn.Linear(16, outputs or spec.action.size)
        self.shape = spec.action.shape

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        x = x.flatten(1).float()
        if action is None:
            return torch.tanh(self.last(self.body(x))).view(-1, *self.shape)
        assert float(action.detach().abs().max()) <= 1.0 + 1e-6
        return self.last(self.body(torch.cat([x, action.flatten(1)], 1)))


@pytest.mark.parametrize("algorithm", CONTINUOUS)
@pytest.mark.parametrize("spec", [BOX, SEVERAL_AXES], ids=["vector", "grid"])
def test_actors_and_critics_of_ones_own_learn_and_act_within_the_bounds(algorithm: str, spec: EnvSpec) -> None:
    learner = learner_of(algorithm, "ActorOrCritic", spec)
    for seed in range(3):
        learner.update(random_batch(spec, 16, seed))
    states = random_batch(spec, 5, 9).s_tm1
    acted = ActingPolicy(learner.acting_model()).act(states, learner.parameters.numpy())["mean"]
    np.testing.assert_allclose(acted, learner.inspect(states)["mean"], rtol=1e-4, atol=1e-5)
    assert acted.shape == (5, *spec.action.shape)
    low, high = (np.reshape(bound, spec.action.shape) for bound in (spec.action_low, spec.action_high))
    assert (acted >= low).all()
    assert (acted <= high).all()


def test_an_actor_of_ones_own_computes_what_the_same_actor_of_the_library_does() -> None:
    ours = learner_of("td3", "LikeTheLibrary", BOX)
    theirs = Learner.of(Config(run=RunConfig(seed=1), learner=LearnerConfig(algorithm="td3", hidden=[16])), BOX)
    names = [name for name in ours.parts["actor"].module.state_dict() if "network" in name]
    for name in names:
        tensor = theirs.parts["actor"].module.state_dict()[name.removeprefix("network.")]
        ours.parts["actor"].module.state_dict()[name].copy_(tensor)
    states = random_batch(BOX, 6, 0).s_tm1
    np.testing.assert_allclose(ours.inspect(states)["mean"], theirs.inspect(states)["mean"], atol=1e-6)


class LikeTheLibrary(ActorOrCritic):
    def __init__(self, spec: EnvSpec, part: str, outputs: int = 0) -> None:
        if part == "critic":
            super().__init__(spec, part, outputs)
            return
        nn.Module.__init__(self)
        made = Actor(spec, [16])
        self.trunk, self.head = made.trunk, made.head

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tanh(self.head(self.trunk(x))) if action is None else super().forward(x, action)


@pytest.mark.parametrize("algorithm", CONTINUOUS)
@pytest.mark.parametrize("part", ["critic", "actor"])
def test_their_gradients_are_those_of_the_losses(algorithm: str, part: str) -> None:
    table = {"target_noise": 0.0} if algorithm == "td3" else {}
    check_gradients(learner_of(algorithm, "ActorOrCritic", BOX, table, loss="mse"), random_batch(BOX, 16, 2), part)


class Recurrent(nn.Module):
    def __init__(self, spec: EnvSpec, memory: int) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(spec.observation.size, memory), nn.Linear(memory, spec.num_actions)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.cell(x, memory)
        return self.last(memory), memory


@pytest.mark.parametrize("network", ["Recurrent", "LongShortTerm", "GatedTransformer"])
def test_a_memory_of_ones_own_acts_step_by_step_as_it_learns_along_sequences(network: str) -> None:
    learner = learner_of("r2d2", network, VECTOR, {"units": 8})
    module: Any = learner.parts["value"].module
    states = np.random.default_rng(0).standard_normal((3, 6, 4)).astype(np.float32)
    with torch.no_grad():
        whole = module(torch.from_numpy(states), torch.zeros(3, 16), torch.zeros(3, dtype=torch.int64))
    policy = ActingPolicy(learner.acting_model())
    for step in range(6):
        given = policy.act(states[:, step], learner.parameters.numpy())["q"]
        np.testing.assert_allclose(given, whole[:, step], atol=1e-5)
        policy.commit()


class Quantiles(nn.Module):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.state, self.fraction = nn.Linear(spec.observation.size, 8), nn.Linear(1, 8)
        self.last = nn.Linear(8, spec.num_actions)

    def forward(self, x: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
        mixed = torch.relu(self.state(x)).unsqueeze(1) * torch.sigmoid(self.fraction(fraction.unsqueeze(2)))
        return self.last(mixed).transpose(1, 2)


class Atoms(nn.Module):
    def __init__(self, spec: EnvSpec, atoms: int = 1) -> None:
        super().__init__()
        self.shape = (spec.num_actions, atoms) if atoms > 1 else (spec.num_actions,)
        self.body = nn.Sequential(
            nn.Linear(spec.observation.size, 8), nn.Tanh(), nn.Linear(8, spec.num_actions * atoms)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).view(-1, *self.shape)


@pytest.mark.parametrize(
    ("algorithm", "network"), [("iqn", "Quantiles"), ("c51", "Atoms"), ("qrdqn", "Atoms"), ("pqn", "Atoms")]
)
def test_values_and_distributions_of_ones_own_learn_and_act(algorithm: str, network: str) -> None:
    learner = learner_of(algorithm, network, VECTOR)
    states = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    policy = ActingPolicy(learner.acting_model(), seed=1)
    given = np.mean([policy.act(states, learner.parameters.numpy())["q"] for _ in range(50)], 0)
    np.testing.assert_allclose(given, learner.inspect(states)["q"], atol=0.02 if algorithm == "iqn" else 1e-5)


class Unbounded(ActorOrCritic):
    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        return self.last(self.body(x)) * 3 if action is None else super().forward(x, action)


class OneForBoth(nn.Module):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.last = nn.Linear(spec.observation.size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(x))


class BlindCritic(ActorOrCritic):
    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, None if action is None else action.detach())


class Centered(ActorOrCritic):
    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        values = super().forward(x, action)
        return values if action is None else values - values.mean(0)


class GatedTransformer(nn.Module):
    """Attends to the four observations before, whose features are its memory (Parisotto et al. 2019)."""

    def __init__(self, spec: EnvSpec, memory: int) -> None:
        super().__init__()
        self.width = memory // 4
        self.enter = nn.Linear(spec.observation.size, self.width)
        self.norm, self.attention = nn.LayerNorm(self.width), nn.MultiheadAttention(self.width, 2, batch_first=True)
        self.gate, self.last = nn.GRUCell(self.width, self.width), nn.Linear(self.width, spec.num_actions)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        now = self.enter(x).unsqueeze(1)
        tokens = torch.cat([memory.view(-1, 4, self.width), now], 1)
        keys = self.norm(tokens)
        context, _ = self.attention(self.norm(now), keys, keys)
        return self.last(self.gate(torch.relu(context[:, 0]), now[:, 0])), tokens[:, 1:].flatten(1)


class LongShortTerm(nn.Module):
    def __init__(self, spec: EnvSpec, memory: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(spec.observation.size, memory // 2)
        self.last = nn.Linear(memory // 2, spec.num_actions)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, c = self.cell(x, memory.chunk(2, 1))
        return self.last(h), torch.cat([h, c], 1)


class PairAsMemory(LongShortTerm):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> Any:
        q, memory = super().forward(x, memory)
        return q, memory.chunk(2, 1)


class NoMemory(Atoms):
    pass


@pytest.mark.parametrize(
    ("algorithm", "network", "spec", "words"),
    [
        ("td3", "Unbounded", BOX, r"as actor: end its forward with tanh"),
        ("td3", "OneForBoth", BOX, r"TypeError.*must give \[2, 1\] or \[2\] float32; .* take part='critic', outputs=1"),
        ("d4pg", "OneForBoth", BOX, r"must give \[2, 51\].*the class may take part='critic', outputs=51"),
        ("r2d2", "NoMemory", VECTOR, r"TypeError.*forward\(observation, memory \[2, 128\]\) must give"),
        ("c51", "OneForBoth", VECTOR, r"must give \[2, 3, 51\] float32; the class may take part='value', atoms=51"),
        ("iqn", "Atoms", VECTOR, r"TypeError.*fraction \[2, 7\]\) must give \[2, 3, 7\]"),
        (
            "dqn",
            "Recurrent",
            VECTOR,
            r"missing 1 required positional argument: 'memory'; spec has .*; it may take part='value'",
        ),
        ("td3", "NoSuchClass", BOX, r"has no NoSuchClass"),
        ("td3", "BlindCritic", BOX, r"does not depend on the action as part='critic'.*without detach"),
        ("d4pg", "Centered", BOX, r"for an observation alone than beside others"),
        ("r2d2", "PairAsMemory", VECTOR, r"returns a tuple.*must give \[2, 3\] and \[2, 128\]"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(algorithm: str, network: str, spec: EnvSpec, words: str) -> None:
    with pytest.raises(NetworkError, match=words) as refusal:
        learner_of(algorithm, network, spec)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_settings_of_the_librarys_networks_are_named_beside_one_of_ones_own() -> None:
    config = Config(learner=LearnerConfig(network=f"{__name__}:Atoms", hidden=[7], dueling="none"))
    assert describe(config, VECTOR).unread == ("learner.hidden", "learner.dueling")
    mlp = Config(learner=LearnerConfig(algorithm="r2d2", network="nature_cnn"))
    assert "learner.network" in describe(mlp, VECTOR).unread


class MakesItsOwn(DQN):
    reads = ("double",)


def test_an_algorithm_that_reads_none_refuses_one() -> None:
    config = Config(learner=LearnerConfig(algorithm=f"{__name__}:MakesItsOwn", network=f"{__name__}:Atoms"))
    with pytest.raises(ConfigError, match=r"would have no effect.*`reads`"):
        describe(config, VECTOR)

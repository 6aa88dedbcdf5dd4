"""Algorithms and a chooser as a user would write them; torch is imported inside functions only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddrl.acting.choosers import EpsilonGreedy
from ddrl.core.config import Config, setting
from ddrl.core.metrics import TD_ERROR, Metric
from ddrl.core.specs import Column, Declaration, EnvSpec
from ddrl.learner.algorithm import Acting, Evaluation, Loss


@dataclass(frozen=True)
class ActorCriticSettings:
    """The delayed actor."""

    delay: int = setting(2, "updates", "Critic updates for each of the actor's.", ge=1)
    units: int = setting(32, "units", "Hidden units of both networks.", ge=1)


class ActorCritic:
    """Deterministic actor-critic with a delayed actor (Fujimoto et al. 2018, without twins)."""

    name = "actor_critic"
    Settings = ActorCriticSettings
    parts = ("critic", "actor")
    targets = ("critic", "actor")
    updates = 0
    lr_factors: Mapping[str, float] = {"actor": 0.5}

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        return Declaration("actor_critic", "gaussian", figures=(TD_ERROR,))

    def __init__(self, config: Config, spec: EnvSpec, settings: ActorCriticSettings) -> None:
        import torch
        from torch import nn

        class Critic(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                width = spec.observation.size + spec.action.size
                self.layers = nn.Sequential(nn.Linear(width, settings.units), nn.Tanh(), nn.Linear(settings.units, 1))

            def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
                return self.layers(torch.cat([observation, action], dim=1)).squeeze(1)

        self._settings = settings
        self.critic = Critic()
        self.actor = nn.Sequential(
            nn.Linear(spec.observation.size, settings.units), nn.Tanh(), nn.Linear(settings.units, spec.action.size)
        )

    def modules(self) -> dict[str, Any]:
        return {"critic": self.critic, "actor": self.actor}

    def prepare(self, source: Any) -> Iterable[Any]:
        yield source.sample()

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        if part == "critic":
            return [
                Evaluation("action_t", "actor", (batch.s_t,), target=True),
                Evaluation("q_t", "critic", (batch.s_t, "action_t"), target=True),
                Evaluation("q_tm1", "critic", (batch.s_tm1, batch.a_tm1), gradient=True, training=True),
            ]
        if self.updates % self._settings.delay:
            return []
        return [
            Evaluation("action", "actor", (batch.s_tm1,), gradient=True, training=True),
            Evaluation("q", "critic", (batch.s_tm1, "action"), gradient=True),
        ]

    def loss(self, outputs: Mapping[str, Any], batch: Any, part: str) -> Loss:
        if part == "actor":
            return Loss(-outputs["q"].mean())
        error = batch.r_t + batch.discount_t * outputs["q_t"] - outputs["q_tm1"]
        return Loss((batch.weight * error.square()).mean(), error.abs(), {"td_error": error.abs()})

    def acting(self) -> Acting:
        return Acting("actor", self.actor, ("mean",))

    def inspect(self, observations: Any) -> dict[str, Any]:
        return {"mean": self.actor(observations)}


class Counting(EpsilonGreedy):
    """Epsilon-greedy that records how many of the values were positive."""

    name = "counting"

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        return (Column("positive", (), "int32"),)

    def choose(self, outputs: Any, observation: Any, exploration: float) -> Any:
        action, _ = super().choose(outputs, observation, exploration)
        return action, {"positive": (outputs["q"] > 0).sum(1).astype(np.int32)}

    def random(self, observation: Any) -> Any:
        action, _ = super().random(observation)
        return action, {"positive": np.zeros(len(action), np.int32)}


class Regression:
    """Learns the reward of each action from a column of its own; reports a figure of its own."""

    name = "regression"
    Settings = None
    parts = ("value",)
    targets = ()
    updates = 0

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        return Declaration(
            "regression",
            "tests.learner.user_algorithms:Counting",
            columns=(Column("value"),),
            figures=(Metric("bias", "gauge", "return", "Mean error of a recent batch."),),
        )

    def __init__(self, config: Config, spec: EnvSpec, settings: None) -> None:
        from ddrl.learner.networks import make_network

        self.network = make_network(config.learner, spec)

    def modules(self) -> dict[str, Any]:
        return {"value": self.network}

    def prepare(self, source: Any) -> Iterable[Any]:
        for _ in range(2):
            yield source.sample()

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        return [Evaluation("q", "value", (batch.s_tm1,), gradient=True)]

    def loss(self, outputs: Mapping[str, Any], batch: Any, part: str) -> Loss:
        error = outputs["q"].gather(1, batch.a_tm1.unsqueeze(1)).squeeze(1) - batch.columns["value"]
        return Loss(error.square().mean(), figures={"bias": error})

    def acting(self) -> Acting:
        from torch import nn

        class WithValue(nn.Module):
            def __init__(self, network: nn.Module) -> None:
                super().__init__()
                self.network = network

            def forward(self, observation: Any) -> Any:
                q = self.network(observation)
                return q, q.mean(1)

        return Acting("value", WithValue(self.network), ("q", "value"))

    def inspect(self, observations: Any) -> dict[str, Any]:
        return {"q": self.network(observations)}

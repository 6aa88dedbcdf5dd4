"""An algorithm on trajectories as a user would write it: actor-critic with clipped ratios over epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddrl.core.config import Config, setting
from ddrl.core.metrics import Metric
from ddrl.core.specs import Declaration, EnvSpec, Experience
from ddrl.learner.algorithm import Acting, Evaluation, Loss


@dataclass(frozen=True)
class ClippedSettings:
    """Trajectories and how often each is used."""

    length: int = setting(8, "steps", "Steps of a trajectory.", ge=1)
    max_policy_lag: int = setting(200, "versions", "Older trajectories are dropped.", ge=0)
    epochs: int = setting(2, "", "How often each draw is learned from.", ge=1)
    minibatches: int = setting(2, "", "Parts of a draw, one update each.", ge=1)
    clip: float = setting(0.2, "", "Largest change of a ratio that is rewarded.", gt=0)
    entropy: float = setting(0.01, "", "Weight of the entropy.", ge=0)


class ClippedActorCritic:
    """Proximal policy optimization (Schulman et al. 2017, eq. 7) with n-step returns in place of eq. 11."""

    name = "clipped_actor_critic"
    Settings = ClippedSettings
    parts = ("both",)
    targets = ()
    updates = 0

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        from ddrl.core.settings import plugin_settings

        settings = plugin_settings(config, "learner", ClippedActorCritic)
        return Declaration(
            "clipped_actor_critic",
            "categorical",
            figures=(Metric("entropy", "gauge", "nats", "Mean entropy of the policy."),),
            experience=Experience(
                source="trajectories", length=settings.length, max_policy_lag=settings.max_policy_lag
            ),
        )

    def __init__(self, config: Config, spec: EnvSpec, settings: ClippedSettings) -> None:
        import torch
        from torch import nn

        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.trunk = nn.Sequential(nn.Linear(spec.observation.size, 32), nn.Tanh())
                self.policy, self.value = nn.Linear(32, spec.num_actions), nn.Linear(32, 1)

            def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                features = self.trunk(observation)
                return self.policy(features), self.value(features).squeeze(-1)

        class Policy(nn.Module):
            def __init__(self, both: Both) -> None:
                super().__init__()
                self.both = both

            def forward(self, observation: torch.Tensor) -> torch.Tensor:
                return self.both(observation)[0]

        self._settings, self._gamma, self._torch = settings, config.learner.discount, torch
        self.both = Both()
        self.policy = Policy(self.both)
        self._generator = np.random.default_rng(config.run.seed)

    def modules(self) -> dict[str, Any]:
        return {"both": self.both}

    def prepare(self, source: Any) -> Iterable[Any]:
        """Each draw `epochs` times, in `minibatches` parts of another order every time."""
        batch, settings = source.sample(), self._settings
        for _ in range(settings.epochs):
            order = self._generator.permutation(len(batch.length))
            for rows in np.array_split(order, settings.minibatches):
                columns = {name: array[rows] for name, array in batch.columns.items()}
                arrays = {name: getattr(batch, name)[rows] for name in batch._fields if name != "columns"}
                yield batch._replace(**arrays, columns=columns)

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        return [Evaluation("both", "both", (batch.state,), gradient=True, training=True)]

    def loss(self, outputs: Mapping[str, Any], batch: Any, part: str) -> Loss:
        torch, settings = self._torch, self._settings
        logits, values = outputs["both"]  # [B, T + 1, A], [B, T + 1]
        length = batch.length.unsqueeze(1)
        used = (torch.arange(batch.reward.shape[1]) < length).float()
        returns, ahead = [], values.detach().gather(1, length).squeeze(1) * (~batch.terminated).float()
        for step in range(batch.reward.shape[1] - 1, -1, -1):
            ahead = torch.where(step < batch.length, batch.reward[:, step] + self._gamma * ahead, ahead)
            returns.insert(0, ahead)
        advantage = torch.stack(returns, 1) - values[:, :-1]
        log_p = logits[:, :-1].log_softmax(2)
        taken = log_p.gather(2, batch.action.unsqueeze(2)).squeeze(2)
        ratio = (taken - batch.columns["log_prob"]).exp()
        bounded = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * advantage.detach(), bounded * advantage.detach())
        entropy = -(log_p.exp() * log_p).sum(2)
        each = 0.5 * advantage.square() - gain - settings.entropy * entropy
        return Loss((each * used).sum() / used.sum(), figures={"entropy": (entropy * used).sum() / used.sum()})

    def acting(self) -> Acting:
        return Acting("both", self.policy, ("logits",))

    def inspect(self, observations: Any) -> dict[str, Any]:
        logits, value = self.both(observations)
        return {"logits": logits, "value": value}

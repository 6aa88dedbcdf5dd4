"""Recurrent replay distributed DQN (Kapturowski et al. 2019): Q-learning through time on stored sequences.

A sequence begins with the recurrent state that the acting policy had there; burn-in renews it under both networks
before anything is learned (sec. 3). Values are rescaled by h (Pohlen et al. 2018), and a sequence's priority is
eta max |d| + (1 - eta) mean |d| (sec. 2.3). Departure: the loss is a mean over the positions in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddrl.core.config import Config, setting
from ddrl.core.metrics import FIGURES
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import ActingInput, Declaration, EnvSpec, Experience
from ddrl.learner.algorithm import Acting, Evaluation, Loss, ValueAlgorithm, require_discrete

if TYPE_CHECKING:
    import torch


ETA = 0.9  # share of the largest error in a sequence's priority (sec. 2.3)


@dataclass(frozen=True)
class R2D2Settings:
    """Sequences and the recurrent network."""

    length: int = setting(20, "records", "Positions of a sequence that are learned from.", ge=1)
    burn_in: int = setting(10, "records", "Positions before them that only renew the recurrent state.", ge=0)
    units: int = setting(64, "units", "Width of the LSTM's state.", ge=1)
    rescaling: float = setting(1e-3, "", "epsilon of the value rescaling h.", ge=0)


class R2D2(ValueAlgorithm):
    """One LSTM between a linear layer and the action values; its state, (h, c), is recorded with each row."""

    name = "r2d2"
    Settings = R2D2Settings
    reads = ("double", "own_network")
    capturable = True

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        require_discrete(spec, "R2D2")
        settings: R2D2Settings = plugin_settings(config, "learner", R2D2)
        state = ActingInput("memory", "state", (2 * settings.units,), output="memory_next")
        experience = Experience(pick_len=settings.length, burn_in=settings.burn_in)
        return Declaration("r2d2", "epsilon_greedy", figures=FIGURES, experience=experience, inputs=(state,))

    def __init__(self, config: Config, spec: EnvSpec, settings: R2D2Settings) -> None:
        from ddrl.learner import losses, networks, own_networks

        self.double = config.learner.double
        self._settings = settings
        self._losses = losses
        if ":" in config.learner.network:
            recurrent: Any = own_networks.OwnRecurrent(config.learner, spec.unmasked, 2 * settings.units)
        else:
            recurrent = networks.RecurrentValues(spec.unmasked, settings.units)
        self.network = networks.masked(recurrent, spec)
        self._step = networks.masked(networks.Form(recurrent, lambda network, *inputs: network.act(*inputs)), spec)

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        """Both networks along the whole sequences, from the stored state."""
        inputs = (batch.state, batch.columns["memory"], batch.burn_len)
        return [
            Evaluation("q", part, inputs, gradient=True, training=True),
            Evaluation("q_target", part, inputs, target=True),
        ]

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any, part: str) -> Loss:
        """Position t of row b has index burn_len[b] + t, its bootstrap ahead[b, t] further."""
        losses = self._losses
        settings = self._settings
        q = outputs["q"]  # [B, T, A]
        q_target = outputs["q_target"]
        here, used = losses.positions(batch.burn_len, batch.length, batch.r_t.shape[1])
        there = (here + batch.ahead).clamp(max=q.shape[1] - 1)
        q_taken = losses.at(q, here).gather(2, losses.at(batch.action, here).unsqueeze(2)).squeeze(2)  # [B, L]
        bootstrap = losses.at(q_target, there)
        selector = losses.at(q.detach(), there) if self.double else bootstrap
        best = bootstrap.gather(2, selector.argmax(2, keepdim=True)).squeeze(2)
        target = losses.rescale(
            batch.r_t + batch.discount_t * losses.unscale(best, settings.rescaling), settings.rescaling
        )
        error = (target - q_taken) * used
        count = used.sum(dim=1).clamp(min=1)
        loss = (batch.weight * (0.5 * error.square()).sum(dim=1) / count).mean()
        size = error.detach().abs()
        priority = ETA * size.amax(dim=1) + (1 - ETA) * size.sum(dim=1) / count
        return Loss(loss, priority, {"td_error": size.sum() / used.sum().clamp(min=1), "q_mean": q_taken})

    def acting(self) -> Acting:
        """One step."""
        return Acting("value", self._step, ("q", "memory_next"))

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Q [B, num_actions] at an episode's first step."""
        from ddrl.learner.devices import rows_of

        parameter = next(self.network.parameters())
        memory = parameter.new_zeros((rows_of(observations), 2 * self._settings.units))
        return {"q": self._step(observations, memory)[0]}

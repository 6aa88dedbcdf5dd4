"""Categorical DQN: the distribution of the return on fixed atoms (Bellemare, Dabney & Munos 2017, algorithm 1, "C51").

Works with double, dueling, n-step and priorities as DQN does. Priorities are the Kullback-Leibler divergences of the
predicted from the target distribution (Hessel et al. 2018): cross-entropies less the targets' own entropies, so that
they can reach zero. With `sigma` the network's linear layers are noisy (Fortunato et al. 2018), which together with
double, dueling, n-step and priorities is Rainbow (Hessel et al. 2018): cartpole_rainbow.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddrl.core.config import Config, setting
from ddrl.core.errors import ConfigError
from ddrl.core.metrics import Q_MEAN, SUPPORT_ENDS
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import ActingInput, Declaration, EnvSpec
from ddrl.learner.algorithm import (
    Acting,
    Loss,
    ValueAlgorithm,
    linear_widths,
    require_discrete,
    require_linear_dueling,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class C51Settings:
    """The support of the return's distribution."""

    atoms: int = setting(51, "atoms", "Values that the return may have, evenly spaced (N).", ge=2)
    v_min: float = setting(-10.0, "return", "The smallest of them; smaller returns count as this.")
    v_max: float = setting(10.0, "return", "The largest of them; larger returns count as this.")
    sigma: float = setting(
        0.0, "", "sigma_0 of noisy linear layers, in place of epsilon (Fortunato et al. 2018: 0.5); 0: none.", ge=0
    )

    def __post_init__(self) -> None:
        if self.v_min >= self.v_max:
            raise ConfigError(f"learner.c51.v_min ({self.v_min:g}) must be below learner.c51.v_max ({self.v_max:g})")


class C51(ValueAlgorithm):
    """The network gives logits [B, num_actions, atoms]; p = softmax over the atoms z_i, and Q(s, a) = sum_i z_i p_i."""

    name = "c51"
    Settings = C51Settings
    output = "logits"
    reads = ("normalize", "network", "hidden", "dueling", "double")
    capturable = True

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        require_discrete(spec, "C51")
        require_linear_dueling(config, "C51", "logits")
        settings: C51Settings = plugin_settings(config, "learner", C51)
        noise: tuple[ActingInput, ...] = ()
        if settings.sigma:
            if ":" in config.learner.network:
                raise ConfigError(
                    f"learner.network = {config.learner.network}: only the library's networks can have noisy layers: "
                    "set learner.c51.sigma = 0, or use auto, mlp, nature_cnn or small_cnn"
                )
            size = sum(map(sum, linear_widths(config.learner, spec.unmasked, settings.atoms)))
            noise = (ActingInput("noise", "noise", (size,), distribution="normal", per="step"),)
        return Declaration("c51", "epsilon_greedy", figures=(Q_MEAN, SUPPORT_ENDS), inputs=noise)

    def __init__(self, config: Config, spec: EnvSpec, settings: C51Settings) -> None:
        from ddrl.learner import losses, networks

        self.double = config.learner.double
        self._losses = losses
        self._networks = networks
        network = networks.make_network(config.learner, spec.unmasked, atoms=settings.atoms)
        self.network = networks.masked(network, spec, lowest=True)
        self._noise = 0  # numbers that an evaluation draws
        if settings.sigma:
            self.network = networks.NoisyNetwork(self.network, settings.sigma)
            self._noise = self.network.noise
        self.support = losses.Support(settings.v_min, settings.v_max, settings.atoms)

    def inputs(self, batch: Any, state: Any) -> tuple[torch.Tensor, ...]:
        """Each evaluation has noise of its own, the same for all rows (Fortunato et al. 2018, section 3.1)."""
        return (state, batch.r_t.new_empty((1, self._noise)).normal_()) if self._noise else (state,)

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any, part: str) -> Loss:
        return self._losses.categorical(
            outputs["logits_tm1"],
            batch.a_tm1,
            batch.r_t,
            batch.discount_t,
            outputs["logits_t"],
            outputs.get("logits_t_selector"),
            batch.weight,
            self.support,
        )

    def acting(self) -> Acting:
        """The action values."""
        mean = self.support.mean
        module = self._networks.Form(self.network, lambda network, *inputs: mean(network(*inputs).softmax(2)))
        return Acting("value", module, ("q",))

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Q [B, num_actions], and the distributions [B, num_actions, atoms]; noisy layers by
        their means."""
        probabilities = self.network(observations).softmax(2)
        return {"q": self.support.mean(probabilities), "probability": probabilities}

"""Implicit quantile networks: the return's distribution as a function of the fraction (Dabney et al. 2018b, "IQN").

An update and each step of acting draw their fractions anew. Works with double, dueling, n-step and priorities as DQN
does. Departures from the paper: N fractions are one of each of N equal shares of [0, 1), not N free ones; the rows of
an update's batch share them, so that few are embedded; the features of an mlp go into its last layer right after they
are multiplied by the fraction's embedding (`networks.ImplicitQuantiles`); priorities are DQN's, by the means at the
drawn fractions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddrl.core.config import Config, setting
from ddrl.core.metrics import FIGURES
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import ActingInput, Declaration, EnvSpec
from ddrl.learner.algorithm import Acting, Evaluation, Loss, ValueAlgorithm, require_discrete, require_linear_dueling

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class IQNSettings:
    """How many fractions are drawn, and how they enter the network."""

    fractions: int = setting(64, "fractions", "Drawn for the prediction in each update (N).", ge=1)
    target_fractions: int = setting(64, "fractions", "Drawn for the target in each update (N').", ge=1)
    acting_fractions: int = setting(32, "fractions", "Drawn to choose an action by their mean (K).", ge=1)
    cosines: int = setting(64, "", "cos(pi k tau), k = 0 .. cosines - 1, that embed a fraction tau (n).", ge=1)
    kappa: float = setting(1.0, "return", "Errors up to this count by their square; 0: none do.", ge=0)


class IQN(ValueAlgorithm):
    """The network gives Z_tau(s, a) [B, num_actions, N] at fractions tau [B, N]; Q(s, a) is the mean of Z_tau over tau
    drawn from [0, 1), one of each of N equal shares."""

    name = "iqn"
    Settings = IQNSettings
    output = "z"
    reads = ("normalize", "network", "hidden", "dueling", "double")
    capturable = True

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        require_discrete(spec, "IQN")
        require_linear_dueling(config, "IQN", "quantiles")
        settings: IQNSettings = plugin_settings(config, "learner", IQN)
        fraction = ActingInput("fraction", "noise", (settings.acting_fractions,), distribution="uniform", per="step")
        return Declaration("iqn", "epsilon_greedy", figures=FIGURES, inputs=(fraction,))

    def __init__(self, config: Config, spec: EnvSpec, settings: IQNSettings) -> None:
        from ddrl.learner import losses, networks, own_networks

        self.double = config.learner.double
        self._settings = settings
        self._losses = losses
        self._networks = networks
        if ":" in config.learner.network:
            quantiles: Any = own_networks.OwnQuantiles(config.learner, spec.unmasked)
        else:
            network: Any = networks.make_network(config.learner, spec.unmasked)
            quantiles = networks.ImplicitQuantiles(network, settings.cosines)
        self.network = networks.masked(quantiles, spec)

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        """Prediction, target and selection have fractions of their own."""
        settings = self._settings

        def drawn(count: int) -> torch.Tensor:
            return self._networks.one_of_each_share(batch.r_t.new_empty(count).uniform_())

        return [
            Evaluation("z_tm1", part, (batch.s_tm1, drawn(settings.fractions)), gradient=True, training=True),
            Evaluation("z_t", part, (batch.s_t, drawn(settings.target_fractions)), target=True),
            Evaluation("z_t_selector", part, (batch.s_t, drawn(settings.acting_fractions)), target=not self.double),
        ]

    def loss(self, outputs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], batch: Any, part: str) -> Loss:
        values, fraction = outputs["z_tm1"]
        return self._losses.quantiles(
            values,
            fraction,
            batch.a_tm1,
            batch.r_t,
            batch.discount_t,
            outputs["z_t"][0],
            outputs["z_t_selector"][0],
            batch.weight,
            self._settings.kappa,
        )

    def acting(self) -> Acting:
        """The action values at the fractions of the step."""
        share = self._networks.one_of_each_share
        module = self._networks.Form(self.network, lambda network, state, u: network(state, share(u))[0].mean(2))
        return Acting("value", module, ("q",))

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Q [B, num_actions], and the quantiles [B, num_actions, K] at the middles of K equal shares,
        so that nothing is drawn."""
        middle = self._losses.midpoints(self._settings.acting_fractions).to(next(self.network.parameters()).device)
        quantile, _ = self.network(observations, middle)
        return {"q": quantile.mean(2), "quantile": quantile}

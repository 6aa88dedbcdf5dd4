"""Implicit quantile networks: the return's distribution as a function of the fraction (Dabney et al. 2018b, "IQN").

An update and each step of acting draw their fractions anew. Works with double, dueling, n-step and priorities as DQN
does. Departures from the paper: N fractions are one of each of N equal shares of [0, 1), not N free ones; the rows of
an update's batch share them, so that few are embedded; the features of an mlp go into its last layer right after they
are multiplied by the fraction's embedding (`quantiles.ImplicitQuantiles`); priorities are DQN's, by the means at the
drawn fractions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddrl.core.algorithm import ActingInput, Declaration
from ddrl.core.config import Config, setting
from ddrl.core.errors import ConfigError
from ddrl.core.metrics import FIGURES
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import EnvSpec
from ddrl.learner.algorithm import Acting, Evaluation, Loss, require_discrete, require_linear_dueling

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class IQNSettings:
    """How many fractions are drawn, and how they enter the network."""

    fractions: int = setting(64, "fractions", "Drawn for the prediction in each update (N).", ge=1)
    target_fractions: int = setting(64, "fractions", "Drawn for the target in each update (N').", ge=1)
    acting_fractions: int = setting(32, "fractions", "Drawn to choose an action by their mean (K).", ge=1)
    cosines: int = setting(64, "", "cos(pi k tau), k = 0 .. cosines - 1, that embed a fraction tau (n).", ge=1)
    kappa: float = setting(1.0, "return", "Errors up to this count by their square; 0: none do.", ge=0)


class IQN:
    """The network gives Z_tau(s, a) [B, num_actions, N] at fractions tau [B, N]; Q(s, a) is the mean of Z_tau over tau
    drawn from [0, 1), one of each of N equal shares."""

    name = "iqn"
    Settings = IQNSettings
    parts = ("value",)
    targets = ("value",)
    updates = 0

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        """See `Algorithm`."""
        require_discrete(spec, "IQN")
        require_linear_dueling(config, "IQN", "quantiles")
        if ":" in config.learner.network:
            raise ConfigError(
                f"learner.network = {config.learner.network}: IQN multiplies a network's features inside, before its "
                "head: use auto, mlp, nature_cnn or small_cnn"
            )
        settings: IQNSettings = plugin_settings(config, "learner", IQN)
        fraction = ActingInput("fraction", "noise", (settings.acting_fractions,), distribution="uniform", per="step")
        return Declaration("iqn", "epsilon_greedy", figures=FIGURES, inputs=(fraction,))

    def __init__(self, config: Config, spec: EnvSpec, settings: IQNSettings) -> None:
        from ddrl.learner import losses as quantiles
        from ddrl.learner.networks import make_network

        self._double = config.learner.double
        self._settings = settings
        self._rules = quantiles
        network: Any = make_network(config.learner, spec)
        self.network = quantiles.ImplicitQuantiles(network, settings.cosines)

    def modules(self) -> Mapping[str, nn.Module]:
        """See `Algorithm`."""
        return {"value": self.network}

    def prepare(self, source: Any) -> Iterable[Any]:
        """See `Algorithm`: one draw."""
        yield source.sample()

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        """See `Algorithm`. Prediction, target and selection have fractions of their own."""
        settings = self._settings

        def drawn(count: int) -> torch.Tensor:
            return self._rules.one_of_each_share(batch.r_t.new_empty(count).uniform_())

        return [
            Evaluation("z_tm1", part, (batch.s_tm1, drawn(settings.fractions)), gradient=True, training=True),
            Evaluation("z_t", part, (batch.s_t, drawn(settings.target_fractions)), target=True),
            Evaluation("z_t_selector", part, (batch.s_t, drawn(settings.acting_fractions)), target=not self._double),
        ]

    def loss(self, outputs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], batch: Any, part: str) -> Loss:
        """See `Algorithm`: mean_b w_b sum_i mean_j rho_i(r_t + discount_t Z'_j(s_t, best) - Z_i(s_tm1, a_tm1)), rho of
        `quantiles.quantile_loss` (eq. 2 and 3)."""
        values, fraction = outputs["z_tm1"]
        (z_t, _) = outputs["z_t"]
        (selector, _) = outputs["z_t_selector"]
        given = (values, fraction, batch.a_tm1, batch.r_t, batch.discount_t, z_t, selector, batch.weight)
        each, priority, q_taken, slope = self._rules.quantile_slopes(*given, self._settings.kappa)
        figures = {"td_error": priority, "q_mean": q_taken}
        return Loss(lambda: (batch.weight * each).mean(), priority, figures, {"z_tm1": slope})

    def acting(self) -> Acting:
        """See `Algorithm`: the action values at the fractions of the step."""
        return Acting("value", self._rules.MeanOfFractions(self.network), ("q",))

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """See `Algorithm`: q [B, num_actions], and the quantiles [B, num_actions, K] at the middles of K equal shares,
        so that nothing is drawn."""
        middle = self._rules.midpoints(self._settings.acting_fractions).to(self.network.embedding.weight.device)
        quantile, _ = self.network(observations, middle)
        return {"q": quantile.mean(2), "quantile": quantile}

"""Quantile regression DQN: the distribution of the return as values at fixed fractions (Dabney et al. 2018a, "QR-DQN").

Works with double, dueling, n-step and priorities as DQN does. Departures from the paper: the Huber loss is divided by
kappa, as in Dabney et al. (2018b), so that kappa near 0 leads to the quantiles themselves; the priority of a draw,
which the paper has none of, is DQN's: |mean of the target - mean of the prediction|."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddrl.core.config import Config, setting
from ddrl.core.metrics import FIGURES
from ddrl.core.specs import Declaration, EnvSpec
from ddrl.learner.algorithm import Acting, Loss, ValueAlgorithm, require_discrete, require_linear_dueling

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QRDQNSettings:
    """The quantiles of the return's distribution."""

    quantiles: int = setting(200, "quantiles", "Values of the return, of equal probability, for each action (N).", ge=2)
    kappa: float = setting(1.0, "return", "Errors up to this count by their square; 0: none do.", ge=0)


class QRDQN(ValueAlgorithm):
    """The network gives theta [B, num_actions, N]; Q(s, a) = mean_i theta_i, and theta_i is the value at the fraction
    tau_i = (2 i - 1) / (2 N), i = 1 .. N."""

    name = "qrdqn"
    Settings = QRDQNSettings
    output = "theta"
    reads = ("normalize", "network", "hidden", "dueling", "double")
    capturable = True

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        require_discrete(spec, "QR-DQN")
        require_linear_dueling(config, "QR-DQN", "quantiles")
        return Declaration("qrdqn", "epsilon_greedy", figures=FIGURES)

    def __init__(self, config: Config, spec: EnvSpec, settings: QRDQNSettings) -> None:
        from ddrl.learner import losses, networks

        self.double = config.learner.double
        self._kappa = settings.kappa
        self._losses = losses
        self._networks = networks
        self.network = networks.masked(
            networks.make_network(config.learner, spec.unmasked, atoms=settings.quantiles), spec
        )
        self._fractions = losses.midpoints(settings.quantiles)

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any, part: str) -> Loss:
        theta_tm1 = outputs["theta_tm1"]
        self._fractions = self._fractions.to(theta_tm1.device)  # a copy only where the learner has moved
        return self._losses.quantiles(
            theta_tm1,
            self._fractions,
            batch.a_tm1,
            batch.r_t,
            batch.discount_t,
            outputs["theta_t"],
            outputs.get("theta_t_selector"),
            batch.weight,
            self._kappa,
        )

    def acting(self) -> Acting:
        """The action values."""
        return Acting("value", self._networks.Form(self.network, lambda network, state: network(state).mean(2)), ("q",))

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Q [B, num_actions], and the quantiles [B, num_actions, N], in the order of fractions (they
        may cross where too little has been learned)."""
        theta = self.network(observations)
        return {"q": theta.mean(2), "quantile": theta}

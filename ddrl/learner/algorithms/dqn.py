"""Deep Q-learning: action values move towards their targets (Mnih et al. 2015), double (van Hasselt et al. 2016), with
importance weights and priorities (Schaul et al. 2016). The dueling form is the network's own (`networks`), n-step is
replay's.

Departures from the papers: the target network follows every `target_period` updates, not frames; gradients are clipped
by their global norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddrl.core.config import Config
from ddrl.core.metrics import FIGURES
from ddrl.core.specs import Declaration, EnvSpec
from ddrl.learner.algorithm import Acting, Loss, ValueAlgorithm, require_discrete

if TYPE_CHECKING:
    import torch


class DQN(ValueAlgorithm):
    """y = r_t + discount_t Q'(s_t, argmax_a Q(s_t, a)) (double), else with the maximum of Q'; the loss is
    mean_b w_b loss(y_b - Q(s_tm1_b, a_tm1_b))."""

    name = "dqn"
    output = "q"
    reads = ("normalize", "network", "hidden", "dueling", "double", "loss")
    capturable = True

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        require_discrete(spec, "DQN")
        return Declaration("dqn", "epsilon_greedy", figures=FIGURES)

    def __init__(self, config: Config, spec: EnvSpec, settings: None = None) -> None:
        from ddrl.learner import losses
        from ddrl.learner.networks import make_network, masked

        self.double = config.learner.double
        self._loss = config.learner.loss
        self._losses = losses
        self.network = masked(make_network(config.learner, spec.unmasked, epsilon=config.rollout.epsilon_end), spec)

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any, part: str) -> Loss:
        return self._losses.q_learning(
            outputs["q_tm1"],
            batch.a_tm1,
            batch.r_t,
            batch.discount_t,
            outputs["q_t"],
            outputs.get("q_t_selector"),
            batch.weight,
            self._loss,
        )

    def acting(self) -> Acting:
        from ddrl.learner.networks import acting_values

        return Acting("value", *acting_values(self.network))

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What acting gives: q [B, num_actions], and the two streams of a dueling network of the
        library by name: "value" [B, 1], "advantage" [B, num_actions]."""
        acting = self.acting()
        given = acting.module(observations)
        return dict(zip(acting.outputs, given if isinstance(given, tuple) else (given,), strict=True))

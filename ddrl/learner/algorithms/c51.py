"""Categorical DQN: the distribution of the return on fixed atoms (Bellemare, Dabney & Munos 2017, algorithm 1, "C51").

Works with double, dueling, n-step and priorities as DQN does. Priorities are the Kullback-Leibler divergences of the
predicted from the target distribution (Hessel et al. 2018): cross-entropies less the targets' own entropies, so that
they can reach zero. With `sigma` the network's linear layers are noisy (Fortunato et al. 2018), which together with
double, dueling, n-step and priorities is Rainbow (Hessel et al. 2018): cartpole_rainbow.toml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddrl.core.algorithm import ActingInput, Declaration
from ddrl.core.config import Config, setting
from ddrl.core.errors import ConfigError
from ddrl.core.metrics import Q_MEAN
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import EnvSpec
from ddrl.learner.algorithm import Acting, Evaluation, Loss, linear_widths, require_discrete, require_linear_dueling

if TYPE_CHECKING:
    import torch
    from torch import nn


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


class C51:
    """The network gives logits [B, num_actions, atoms]; p = softmax over the atoms z_i, and Q(s, a) = sum_i z_i p_i."""

    name = "c51"
    Settings = C51Settings
    parts = ("value",)
    targets = ("value",)
    updates = 0

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        """See `Algorithm`."""
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
            size = sum(map(sum, linear_widths(config.learner, spec, settings.atoms)))
            noise = (ActingInput("noise", "noise", (size,), distribution="normal", per="step"),)
        return Declaration("c51", "epsilon_greedy", figures=(Q_MEAN,), inputs=noise)

    def __init__(self, config: Config, spec: EnvSpec, settings: C51Settings) -> None:
        from ddrl.learner import losses as distributions
        from ddrl.learner import networks as noisy
        from ddrl.learner.networks import make_network

        self._double = config.learner.double
        self._rules = distributions
        self.network: nn.Module = make_network(config.learner, spec, atoms=settings.atoms)
        self._noise = 0
        if settings.sigma:
            self.network = noisy.NoisyNetwork(self.network, settings.sigma)
            self._noise = self.network.noise
        self.support = distributions.Support(settings.v_min, settings.v_max, settings.atoms)

    def modules(self) -> Mapping[str, nn.Module]:
        """See `Algorithm`."""
        return {"value": self.network}

    def prepare(self, source: Any) -> Iterable[Any]:
        """See `Algorithm`: one draw."""
        yield source.sample()

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        """See `Algorithm`. Each has noise of its own, the same for all rows (Fortunato et al. 2018, section 3.1)."""

        def inputs(state: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (state, batch.r_t.new_empty((1, self._noise)).normal_()) if self._noise else (state,)

        evaluations = [
            Evaluation("logits_tm1", part, inputs(batch.s_tm1), gradient=True, training=True),
            Evaluation("logits_t", part, inputs(batch.s_t), target=True),
        ]
        if self._double:
            evaluations.append(Evaluation("logits_t_selector", part, inputs(batch.s_t)))
        return evaluations

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any, part: str) -> Loss:
        """See `Algorithm`: mean_b w_b KL(target_b || p(s_tm1_b, a_tm1_b)), the target held constant."""
        rules = self._rules
        support = self.support
        selector = outputs["logits_t_selector" if self._double else "logits_t"]
        best = support.mean(selector.softmax(2)).argmax(1)
        p_t = rules.taken(outputs["logits_t"], best).softmax(1)  # [B, N]
        target = support.project(p_t, batch.r_t, batch.discount_t)
        logits_tm1 = outputs["logits_tm1"].detach()
        log_p = rules.taken(logits_tm1, batch.a_tm1).log_softmax(1)
        p = log_p.exp()  # [B, N], [B]
        divergence = rules.divergence(target, log_p)
        share = batch.weight / len(batch.weight)
        slopes = {"logits_tm1": rules.at_taken((p - target) * share.unsqueeze(1), batch.a_tm1, logits_tm1.shape[1])}
        return Loss(share.dot(divergence), divergence.clamp(min=0.0), {"q_mean": support.mean(p)}, slopes)

    def acting(self) -> Acting:
        """See `Algorithm`: the action values."""
        return Acting("value", self._rules.MeanValues(self.network, self.support), ("q",))

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """See `Algorithm`: q [B, num_actions], and the distributions [B, num_actions, atoms]; noisy layers by
        their means."""
        probabilities = self.network(observations).softmax(2)
        return {"q": self.support.mean(probabilities), "probability": probabilities}

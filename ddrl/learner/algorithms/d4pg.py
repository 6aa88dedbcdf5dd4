"""Distributed distributional deterministic policy gradient (Barth-Maron et al. 2018, algorithm 1, "D4PG").

A critic gives the distribution of the return of (state, action), and the actor climbs its mean. The distribution is
    categorical   probabilities of fixed atoms (Bellemare, Dabney & Munos 2017), the loss the divergence from the target
    quantile      values at fixed fractions (Dabney et al. 2018), the loss the quantile Huber loss
    scalar        the mean alone, the loss half the squared TD error: the ablation
Rewards of several numbers (K objectives that add up) have a distribution each; losses are means over them, the actor
climbs the sum of their means.
The N-step returns, priorities and parallel actors of the paper are the library's own (replay.n_step, replay.selector,
run.processes). Priorities are the losses, as the paper's (categorical) are.

Exploration is the gaussian chooser's: rollout.epsilon_start and epsilon_end are standard deviations in units of half
the distance of the action's bounds (env.scale = auto)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddrl.core.config import Config, setting
from ddrl.core.errors import ConfigError
from ddrl.core.metrics import Q_MEAN, SUPPORT_ENDS
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Declaration, EnvSpec
from ddrl.learner.algorithm import ActorCriticAlgorithm, Evaluation, Loss
from ddrl.learner.algorithms.td3 import require_bounds

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class D4PGSettings:
    """The distribution of the return, and the actor."""

    critic: str = setting(
        "categorical",
        "",
        "The distribution: categorical, on fixed values; quantile, at fixed fractions; scalar, its mean alone by the "
        "squared TD error, which shows what the others are good for.",
        choices=("categorical", "quantile", "scalar"),
    )
    atoms: int = setting(51, "atoms", "Values or fractions of the distribution (N).", ge=2)
    v_min: float = setting(-10.0, "return", "categorical: the smallest value; smaller returns count as this.")
    v_max: float = setting(10.0, "return", "categorical: the largest value; larger returns count as this.")
    kappa: float = setting(1.0, "return", "quantile: where the Huber loss becomes linear; 0: it is |error|.", ge=0)
    actor_delay: int = setting(1, "updates", "Updates of the critic for each of the actor's.", ge=1)
    actor_start: int = setting(
        0, "updates", "Updates of the critic before the actor's first, where the actor begins as a good prior.", ge=0
    )
    actor_lr_factor: float = setting(1.0, "", "The actor's step size as a share of learner.lr.", gt=0)
    actor_anchor: float = setting(
        0.0,
        "return",
        "What the actor's departure from the prior (an array of the observation) costs: this times its square, the "
        "departure as a share of the action's range; 0: nothing.",
        ge=0,
    )

    def __post_init__(self) -> None:
        if self.v_min >= self.v_max:
            raise ConfigError(f"learner.d4pg.v_min ({self.v_min:g}) must be below learner.d4pg.v_max ({self.v_max:g})")


class D4PG(ActorCriticAlgorithm):
    """The critic gives [B, K, atoms], K = 1 for rewards of one number: logits (categorical), or values (quantile)."""

    name = "d4pg"
    Settings = D4PGSettings
    reads = ("normalize", "hidden", "own_network")
    capturable = True

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        require_bounds(config, spec, "D4PG")
        settings: D4PGSettings = plugin_settings(config, "learner", D4PG)
        figures = (Q_MEAN, SUPPORT_ENDS) if settings.critic == "categorical" else (Q_MEAN,)
        return Declaration("d4pg", "gaussian", figures=figures)

    def __init__(self, config: Config, spec: EnvSpec, settings: D4PGSettings) -> None:
        from ddrl.learner import actor_critic, losses

        self._settings = settings
        self._losses = losses
        self._categorical = settings.critic == "categorical"
        self.support = losses.Support(settings.v_min, settings.v_max, settings.atoms)
        self._fractions = losses.midpoints(settings.atoms)
        outputs = 1 if settings.critic == "scalar" else settings.atoms
        self.critic = actor_critic.make_critics(config.learner, spec, outputs=outputs)
        self.actor = actor_critic.make_actor(config.learner, spec)
        self.actor_delay = settings.actor_delay
        self.actor_start = settings.actor_start
        self.lr_factors = {"actor": settings.actor_lr_factor}
        if settings.actor_anchor and not ("prior" in spec.observation.arrays and hasattr(self.actor, "departure")):
            raise ConfigError(
                f"learner.d4pg.actor_anchor ({settings.actor_anchor:g}) holds an actor of the library at the prior, "
                "an array that this environment's observations lack: set it to 0"
            )

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        if part == "critic":
            return [
                Evaluation("action_t", "actor", (batch.s_t,), target=True),
                Evaluation("z_t", "critic", (batch.s_t, "action_t"), target=True),
                Evaluation("z_tm1", "critic", (batch.s_tm1, batch.a_tm1), gradient=True, training=True),
            ]
        return [
            Evaluation("action", "actor", (batch.s_tm1,), gradient=True, training=True),
            Evaluation("z", "critic", (batch.s_tm1, "action"), gradient=True),
        ]

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any, part: str) -> Loss:
        """Critic: mean_b w_b d(target_b, Z(s_tm1_b, a_tm1_b)), the target r_t + discount_t Z'(s_t,
        mu'(s_t)) held constant; actor: -mean E[Z(s_tm1, mu(s_tm1))] + actor_anchor mean |departure|^2."""
        if part == "actor":
            loss = -self._mean(outputs["z"]).sum(1).mean()
            anchor = self._settings.actor_anchor
            if anchor:
                departure = self.actor.departure(batch.s_tm1, outputs["action"])
                loss = loss + anchor * departure.square().sum(1).mean()
            return Loss(loss)
        z_tm1 = outputs["z_tm1"]  # [B, K, N]
        z_t = outputs["z_t"]
        r_t = batch.r_t.view(z_tm1.shape[:2])
        if self._categorical:
            return self._losses.categorical(z_tm1, None, r_t, batch.discount_t, z_t, None, batch.weight, self.support)
        if self._settings.critic == "quantile":
            self._fractions = self._fractions.to(z_t.device)  # a copy only where the learner has moved
            return self._losses.quantiles(
                z_tm1, self._fractions, None, r_t, batch.discount_t, z_t, None, batch.weight, self._settings.kappa
            )
        error = r_t + batch.discount_t.unsqueeze(1) * z_t[:, :, 0] - z_tm1[:, :, 0]
        each = (0.5 * error.square()).mean(1)
        return Loss((batch.weight * each).mean(), each, {"q_mean": z_tm1[:, :, 0].sum(1)})

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The policy's action "mean" [B, *action.shape], q [B] there, and the return's distribution:
        "probability" or "quantile" [B, atoms], or
        [B, K, atoms]."""
        mean = self.actor(observations)
        every = self.critic(observations, mean)
        q = self._mean(every).sum(1)
        z = every[:, 0] if every.shape[1] == 1 else every
        if self._settings.critic == "scalar":
            return {"mean": mean, "q": q}
        return {"mean": mean, "q": q, **({"probability": z.softmax(-1)} if self._categorical else {"quantile": z})}

    def _mean(self, z: torch.Tensor) -> torch.Tensor:
        return self.support.mean(z.softmax(-1)) if self._categorical else z.mean(-1)

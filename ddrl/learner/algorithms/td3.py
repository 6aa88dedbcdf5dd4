"""Twin delayed deep deterministic policy gradient (Fujimoto, van Hoof & Meger 2018, algorithm 1, "TD3").

Two critics, of whose targets the smaller one counts; a target action smoothed by clipped noise; an actor that is
updated every `actor_delay` updates of the critics, by the first critic. Works with n-step and priorities; a priority is
the mean absolute error of the two critics.

Exploration is the gaussian chooser's: rollout.epsilon_start and epsilon_end are standard deviations in units of half
the distance of the action's bounds (env.scale = auto). Departure: each target follows the updates of its own part
(learner.target_period and target_rate), where the paper moves the critics' targets together with the actor's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddrl.core.config import Config, setting
from ddrl.core.errors import ConfigError
from ddrl.core.metrics import FIGURES
from ddrl.core.specs import NETWORKS, Declaration, EnvSpec
from ddrl.learner.algorithm import ActorCriticAlgorithm, Evaluation, Loss

if TYPE_CHECKING:
    import torch


TARGET_NOISE_CLIP = 0.5  # where the noise on the target action is cut off (c), in the units of target_noise


@dataclass(frozen=True)
class TD3Settings:
    """The delayed actor and the smoothed target."""

    actor_delay: int = setting(2, "updates", "Updates of the critics for each of the actor's (d).", ge=1)
    target_noise: float = setting(
        0.2,
        "",
        "Standard deviation of the noise on the target action (sigma), in units of half the distance of its bounds.",
        ge=0,
    )
    actor_lr_factor: float = setting(1.0, "", "The actor's step size as a share of learner.lr.", gt=0)


class TD3(ActorCriticAlgorithm):
    """Part "critic" holds both critics, part "actor" the policy that acts."""

    name = "td3"
    Settings = TD3Settings
    reads = ("normalize", "hidden", "loss", "own_network")
    capturable = True
    draws = ("critic",)  # the noise on the target action

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        require_bounds(config, spec, "TD3")
        if spec.reward_shape:
            raise ConfigError(
                f"env.id = {spec.env_id} gives rewards {spec.reward_shape}, but TD3 needs one number: use d4pg"
            )
        return Declaration("td3", "gaussian", figures=FIGURES)

    def __init__(self, config: Config, spec: EnvSpec, settings: TD3Settings) -> None:
        from ddrl.learner import actor_critic, devices, losses

        self._settings = settings
        self._kind = config.learner.loss
        self._losses = losses
        self._draw_rows = devices.draw_rows
        self._action_size = spec.action.size
        self.critic = actor_critic.make_critics(config.learner, spec, count=2)
        self.actor = actor_critic.make_actor(config.learner, spec)
        self.actor_delay = settings.actor_delay
        self.lr_factors = {"actor": settings.actor_lr_factor}

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        if part == "critic":
            return [
                Evaluation("action_t", "actor", (batch.s_t, self._noise(batch)), target=True),
                Evaluation("q_t", "critic", (batch.s_t, "action_t"), target=True),
                Evaluation("q_tm1", "critic", (batch.s_tm1, batch.a_tm1), gradient=True, training=True),
            ]
        return [
            Evaluation("action", "actor", (batch.s_tm1,), gradient=True, training=True),
            Evaluation("q", "critic", (batch.s_tm1, "action", 1), gradient=True),  # the first critic
        ]

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any, part: str) -> Loss:
        """Critics: the sum of both mean losses of y - Q_i(s_tm1, a_tm1), with y = r_t + discount_t
        min_i Q_i'(s_t, mu'(s_t) + noise); actor: -mean Q_1(s_tm1, mu(s_tm1))."""
        if part == "actor":
            return Loss(-outputs["q"].mean())
        return self._losses.critics(
            outputs["q_tm1"], batch.r_t, batch.discount_t, outputs["q_t"], batch.weight, self._kind
        )

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The policy's action "mean" [B, *action.shape], and q [B, 2] of both critics there."""
        mean = self.actor(observations)
        return {"mean": mean, "q": self.critic(observations, mean).squeeze(2)}

    def _noise(self, batch: Any) -> torch.Tensor:
        settings = self._settings
        noise = self._draw_rows(batch, self._action_size, lambda empty: empty.normal_()) * settings.target_noise
        return noise.clamp(-TARGET_NOISE_CLIP, TARGET_NOISE_CLIP)


def require_bounds(config: Config, spec: EnvSpec, algorithm: str) -> None:
    """Raise ConfigError unless actions are continuous with finite bounds, and the observation is one array or goes into
    networks of the user's own."""
    if spec.discrete:
        raise ConfigError(
            f"env.id = {spec.env_id} has {spec.num_actions} discrete actions, but {algorithm} gives continuous ones: "
            "use an environment with a Box of actions, or learner.algorithm = dqn"
        )
    if not spec.action_low:
        raise ConfigError(
            f"env.id = {spec.env_id}: its actions {list(spec.action.shape)} have no finite bounds, but {algorithm} "
            "gives actions between bounds: set finite ones in the environment's Box"
        )
    if spec.observation.fields and not spec.networks and ":" not in config.learner.network:
        axes = " or ".join(f'"{axis}"' for axis in NETWORKS)
        raise ConfigError(
            f"env.id = {spec.env_id} gives several arrays by name, but {algorithm}'s networks take one vector, or "
            f"arrays with an axis {axes}: set env.observation = flat, or "
            "learner.network to networks of your own"
        )

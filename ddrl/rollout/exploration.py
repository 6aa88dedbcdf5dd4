"""Exploration over the course of a run, as pure schedules; which actions are chosen is a chooser's work
(`ddrl.acting.choosers`)."""

from __future__ import annotations

from ddrl.core.config import RolloutConfig


def epsilon_at(config: RolloutConfig, env_steps: float) -> float:
    """Share of random actions after `env_steps` of all rollouts: linear from epsilon_start to epsilon_end, then
    constant."""
    progress = min(env_steps / config.epsilon_decay_steps, 1.0)
    return config.epsilon_start + progress * (config.epsilon_end - config.epsilon_start)


def epsilon_of(config: RolloutConfig, epsilon: float, index: int, count: int) -> float:
    """Rollout `index` of `count`: epsilon ** (1 + alpha i / (n - 1)) with alpha = epsilon_spread (Horgan et al. 2018,
    eq. 1)."""
    if count <= 1:
        return epsilon
    return float(epsilon ** (1.0 + config.epsilon_spread * index / (count - 1)))

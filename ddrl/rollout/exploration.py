"""Exploration over the course of a run, as pure schedules; which actions are chosen is a chooser's work
(`ddrl.acting.choosers`)."""

from __future__ import annotations

from typing import Any

from ddrl.core.config import RolloutConfig


def epsilon_at(config: RolloutConfig, env_steps: float) -> float:
    """Share of random actions after `env_steps` of all rollouts: linear from epsilon_start to epsilon_end, then
    constant."""
    progress = min(env_steps / config.epsilon_decay_steps, 1.0)
    return config.epsilon_start + progress * (config.epsilon_end - config.epsilon_start)


def epsilon_of(config: RolloutConfig, epsilon: float, index: int, count: int) -> float:
    """Rollout `index` of `count`: f epsilon ** (1 + alpha i / (n - 1)) with alpha = epsilon_spread (Horgan et al. 2018,
    eq. 1) and f the factor `exploration` of its entry in by_rollout, 1 without."""
    spread = config.epsilon_spread * index / (count - 1) if count > 1 else 0.0
    return float(_entry(config, index).get("exploration", 1.0) * epsilon ** (1.0 + spread))


def chooser_settings(config: RolloutConfig, index: int) -> dict[str, Any]:
    """What rollout `index` sets of its chooser's own settings."""
    return {name: value for name, value in _entry(config, index).items() if name != "exploration"}


def _entry(config: RolloutConfig, index: int) -> dict[str, float]:
    return config.by_rollout[index % len(config.by_rollout)] if config.by_rollout else {}

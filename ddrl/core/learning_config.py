"""Settings of what a task learns from and how: rollouts, replay, sample areas, learner. `core.config` gathers them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ddrl.core import plugins
from ddrl.core.errors import ConfigError
from ddrl.core.fields import setting

NEVER = math.inf


@dataclass(frozen=True)
class RolloutConfig:
    """Acting: exploration and how often new parameters are taken."""

    chooser: str = setting(
        "",
        "",
        "How actions are chosen from what the network gives: epsilon_greedy, ez_greedy, boltzmann, categorical, "
        "gaussian, or package.module:Class of your own; empty: the algorithm's own.",
        plugin="ddrl.acting.choosers",
    )
    epsilon_start: float = setting(1.0, "", "Share of random actions at the start.", ge=0, le=1)
    epsilon_end: float = setting(0.05, "", "Share of random actions after epsilon_decay_steps.", ge=0, le=1)
    epsilon_decay_steps: int = setting(
        20_000, "env steps", "Environment steps of all rollouts over which epsilon falls linearly.", ge=1
    )
    epsilon_spread: float = setting(
        0.0,
        "",
        "alpha in epsilon ** (1 + alpha i / (n - 1)) for rollout i of n (Horgan et al. 2018, eq. 1); "
        "0: the same for all.",
        ge=0,
    )
    by_rollout: list[dict[str, float]] = setting(
        [],
        "",
        "A family of exploration policies: rollout i takes entry i modulo their number. exploration = f multiplies its "
        "epsilon (the standard deviation of gaussian); every other name is a setting of the chooser, such as "
        "boltzmann's temperature.",
    )
    refresh: str = setting(
        "step",
        "",
        "When newer parameters are taken: at each vector step, when an episode ends, or, with replay.source = areas, "
        "when a block of samples is written.",
        choices=("step", "episode", "write"),
    )
    warmup_steps: int = setting(
        1_000, "env steps", "Steps of all rollouts together taken at random before the policy acts.", ge=0
    )
    max_policy_lag: float = setting(
        NEVER,
        "versions",
        "Service level: how many versions newer than the one that acted may be published when a row arrives at the "
        "trainer. How many may travel at once is cluster.versions_in_flight.",
        ge=0,
    )
    at_max_lag: str = setting(
        "wait",
        "",
        "What to do where the lag would exceed max_policy_lag: wait, the trainer puts off updates and the next "
        "version; drop, older rows are left out and counted; weight, a sample of lag l counts "
        "(1 + max_policy_lag) / (1 + l) of a whole one, its age in replay included.",
        choices=("wait", "drop", "weight"),
    )


@dataclass(frozen=True)
class ReplayConfig:
    """What is kept of experience and how it is drawn."""

    source: str = setting(
        "auto",
        "",
        "Where batches come from: auto, a replay or trajectories as the algorithm says; areas, a sample area shared "
        "with each rollout ([areas]); or package.module:Class of your own.",
    )
    capacity: int = setting(100_000, "transitions", "Records kept; then whole episodes are evicted.", ge=1)
    min_size: int = setting(1_000, "transitions", "Records needed before the first update.", ge=1)
    selector: str = setting(
        "prioritized",
        "",
        "How transitions are drawn: uniform, prioritized, rank_based, recency, or package.module:Class of your own.",
        plugin="ddrl.replay.selectors",
    )
    priority_exponent: float = setting(
        0.6, "", "alpha: mass = priority ** alpha (Schaul et al. 2016, eq. 1).", ge=0, le=1
    )
    importance_exponent: float = setting(
        0.4, "", "beta of the importance weights at the start; rises to 1 by max_env_steps.", ge=0, le=1
    )
    priority_offset: float = setting(
        1e-6,
        "",
        "epsilon: priority = |TD error| + epsilon (Schaul et al. 2016, section 3.3), so that a TD error of 0 is drawn "
        "again; 0: it is not.",
        ge=0,
    )
    n_step: int = setting(3, "steps", "Rewards summed before the bootstrap.", ge=1)
    eviction: str = setting(
        "fifo",
        "",
        "Which episode goes when full: fifo, second_chance, lru, lfu, or package.module:Class of your own.",
        plugin="ddrl.replay.evictions",
    )
    file: str = setting("", "path", "New file that holds the records instead of memory; it goes with the run.")
    samples_per_insert: float = setting(
        8.0,
        "samples/transition",
        "Transitions learned from per transition recorded; whoever is ahead waits. 0: nobody waits.",
        ge=0,
    )
    samples_tolerance: float = setting(
        1_000.0,
        "transitions",
        "How far (in recorded transitions) rollouts and learner may drift from samples_per_insert before one waits.",
        gt=0,
    )

    def __post_init__(self) -> None:
        if self.source not in ("auto", "areas") and ":" not in self.source:
            raise ConfigError(
                f"replay.source ({self.source!r}) must be auto, areas, or package.module:Class of your own"
            )

    @property
    def through_areas(self) -> bool:
        """Whether rollouts write transitions into sample areas instead of rows into lanes."""
        return self.source == "areas" or bool(self.source != "auto" and self._plugin().through_areas)

    @property
    def spare_blocks(self) -> int:
        """Blocks of an area beyond areas.blocks, by which a full area stays whole while it is written."""
        return 1 if self.source == "areas" else self._plugin().spare_blocks

    def _plugin(self) -> Any:
        return plugins.load("replay.source", "", self.source)


@dataclass(frozen=True)
class AreasConfig:
    """Sample areas: what rollouts write for the trainer beside them (replay.source = areas)."""

    block: int = setting(2_000, "samples", "Samples that a rollout writes at a time (k).", ge=1)
    blocks: int = setting(4, "blocks", "Blocks that an area holds; then the oldest is overwritten.", ge=2, le=254)
    min_fill: float = setting(
        1.0, "", "Share of an area's blocks that must stand written before batches are drawn from it.", gt=0, le=1
    )


@dataclass(frozen=True)
class LearnerConfig:
    """Algorithm, network, loss and optimizer."""

    algorithm: str = setting(
        "dqn",
        "",
        "Learning algorithm: one of the library's, or package.module:Class of your own; its own settings are the table "
        "[learner.NAME].",
        plugin="ddrl.learner.algorithms",
    )
    device: str = setting("auto", "", "torch device of the learner; auto: cuda where there is one, else cpu.")
    network: str = setting(
        "auto",
        "",
        "mlp, nature_cnn, small_cnn, auto (by the observation), or package.module:Class of your own torch module.",
    )
    hidden: list[int] = setting([256, 256], "units", "Hidden layers of the mlp.")
    dueling: str = setting(
        "mean",
        "",
        "Q = V + A - baseline: mean, the sample mean of A; policy, its expectation under the acting policy "
        "(epsilon-greedy with rollout.epsilon_end); softmax, under softmax(A); none: a single head.",
        choices=("mean", "policy", "softmax", "none"),
    )
    double: bool = setting(True, "", "Choose the bootstrap action with the online network (van Hasselt et al. 2016).")
    loss: str = setting("huber", "", "Loss on the TD error.", choices=("huber", "mse"))
    lr: float = setting(1e-3, "", "Adam's step size.", gt=0)
    lr_end_fraction: float = setting(
        1.0, "", "Step size at max_env_steps as a fraction of lr; falls linearly.", ge=0, le=1
    )
    adam_epsilon: float = setting(1e-8, "", "Adam's epsilon.", gt=0)
    max_grad_norm: float = setting(10.0, "", "Gradients are scaled down to this norm.", gt=0)
    batch_size: int = setting(128, "transitions", "Transitions per optimizer step.", ge=1)
    discount: float = setting(0.99, "", "gamma.", ge=0, le=1)
    target_period: int = setting(
        100, "updates", "Updates between steps of the target network to the online network.", ge=1
    )
    target_rate: float = setting(
        1.0,
        "",
        "Share of the way that the target network goes to the online network each time (tau); 1: a copy.",
        gt=0,
        le=1,
    )
    publish_period: int = setting(10, "updates", "Updates between publishes of the acting parameters.", ge=1)
    threads: int = setting(1, "threads", "Threads of torch's CPU kernels.", ge=1)
    nodes: int = setting(
        0,
        "nodes",
        "Ranks of mpirun that compute gradients, each of its part of every batch; 0: the trainer computes them itself.",
        ge=0,
    )
    node_replay: str = setting(
        "leader",
        "",
        "Whose replay the nodes learn from: leader, the trainer's, which sends the rows of each batch; own, each node "
        "has one, which gets the rows of every N-th rollout.",
        choices=("leader", "own"),
    )

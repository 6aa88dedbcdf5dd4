"""A double DQN over the affine filter (M5 to M8): each node's action multiplies the filter's size or chooses another
regime, and a further one chooses K of N where that is asked for.

Action = argmax of the weighted sum of the objectives' values (M6). Each iteration shows what the filter's own sizes
would have given: a node that took t for b samples would have taken t (a + b' w) / (a + b w) for b'. The agent's sizes
are used in a cluster while they earn more there than the filter's; else the filter's are, and the agent's are judged
beside them. So where training did not prepare it, the sizer is the affine filter. Trained in the simulator by `python
-m benchmarks.microbatch --train`; inference is numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ddrl.balance.affine_filter import FilterSettings
from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.node_state import FIRST, NodeState
from ddrl.balance.objectives import check_weights, rewards
from ddrl.balance.sizes import Floats, Sizes, balanced_sizes, proportional_sizes
from ddrl.balance.value_network import SHIPPED, SHIPPED_TIMES, ValueNetwork
from ddrl.core.config import setting


@dataclass(frozen=True)
class DdqnSettings(FilterSettings):
    """The filter's settings, and the agent's."""

    weights: list[float] = setting(
        [1.0, 0.0, 0.0, 0.0], "", "Weights of time, statistical efficiency, dropped share and imbalance; they sum to 1."
    )
    margin: float = setting(0.002, "iterations", "What an action must promise above the filter's own size.", ge=0)
    least_gain: float = setting(
        0.01, "iterations", "What the agent must earn on average above the filter's sizes for its own to be used.", ge=0
    )
    trust: float = setting(
        0.02, "", "Share of the newest iteration in what the agent earned; 0: its sizes are always used.", ge=0, le=1
    )
    choose_first: bool = setting(False, "", "Also choose K, how many of the N gradients are awaited.")
    gradients: bool = setting(
        True, "", "Whether norms, cosines and losses of gradients are read; off: a network that was trained without."
    )
    network: str = setting("", "path", "Its safetensors file; empty: the one that ships.")


class Ddqn:
    """State, values, actions, sizes."""

    name: ClassVar[str] = "ddqn"
    Settings = DdqnSettings

    def __init__(self, cluster: Cluster, settings: DdqnSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._weights = check_weights(settings.weights).astype(np.float32)
        self.reads_gradients = settings.gradients
        shipped = SHIPPED if settings.gradients else SHIPPED_TIMES
        self._network = ValueNetwork.load(Path(settings.network) if settings.network else shipped)
        self._state = NodeState(cluster, settings)
        shape = cluster.speed.shape[:-1]
        nodes = cluster.nodes
        self._first = np.full(shape, nodes) if settings.choose_first else None
        self._earned = np.zeros(cluster.speed.shape[:-1])  # average of what the agent's sizes gain beside the filter's
        self._usual = np.zeros(cluster.speed.shape[:-1])  # average seconds of an iteration by the filter's sizes
        self._agent = self._filter = np.zeros(cluster.speed.shape, np.int64)  # the last sizes of both
        self.actions = np.zeros(cluster.speed.shape, np.int64)

    @property
    def used(self) -> NDArray[np.bool_]:
        """In which clusters [...] the agent's sizes are used now."""
        trust = self._settings.trust
        least_gain = self._settings.least_gain
        return self._earned > least_gain if trust else np.ones(self._earned.shape, np.bool_)

    def propose(self, observation: Observation) -> Sizes:
        """The sizes of the best actions, or the filter's."""
        state = self._state
        form = self._network.form
        nodes = self._cluster.nodes
        observation = observation if self.reads_gradients else observation.times_alone()
        state.update(observation)
        if observation.received.any():
            self._judge(observation)
            values = self._network(state.features(), state.context(self._weights))
            self.actions = best_actions(values.nodes @ self._weights, self._settings.margin)
            if self._settings.choose_first:
                chosen = best_actions(values.first @ self._weights, self._settings.margin)
                self._first = first_of(chosen, nodes)
        self._filter = apply_actions(state, np.zeros_like(self.actions), "regimes")
        self._agent = apply_actions(state, self.actions, form)
        return np.where(self.used[..., None], self._agent, self._filter)

    def _judge(self, observation: Observation) -> None:
        """Compare what the agent's last sizes earned, or would have, with the filter's, over the gradients received."""
        if not self._agent.any():
            return
        track = self._state.filter
        received = observation.received
        alike = observation.seconds / (track.overhead + np.maximum(observation.sizes, 1) / track.speed)
        both = np.stack([self._agent, self._filter])
        finish = np.where(received, alike * (track.overhead + both / track.speed), 0.0)
        seconds = finish.max(-1)
        total = self._cluster.total.astype(np.float64)
        phi = observation.noise_scale
        # Time saved counts in seconds, not by its share of each iteration: slow iterations are what there is to gain.
        self._usual += np.where(self._usual > 0, self._settings.trust, 1.0) * (seconds[1] - self._usual)
        earned = rewards(seconds, np.maximum(self._usual, 1e-12), finish, both, total, phi) @ self._weights
        self._earned += self._settings.trust * (earned[0] - earned[1] - self._earned)

    def first(self) -> NDArray[np.int64] | None:
        """K [...], or None for all."""
        return self._first


def best_actions(values: NDArray[np.float32], margin: float) -> NDArray[np.int64]:
    """Best of values [..., actions]; 0 where no other one is better by `margin`."""
    best = values.argmax(-1)
    gain = np.take_along_axis(values, best[..., None], -1)[..., 0] - values[..., 0]
    return np.where(gain > margin, best, 0)


def first_of(actions: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """K for actions [...]."""
    return np.ceil(np.asarray(FIRST)[actions] * nodes).astype(np.int64)


def apply_actions(state: NodeState, actions: NDArray[np.int64], form: str) -> Sizes:
    """Sizes for actions [..., N]; in the form "steps" p_i keeps what it was multiplied by."""
    cluster = state.cluster
    slowness = state.slowness(actions, form)
    if form == "steps":
        state.step_factor = np.clip(state.step_factor / slowness, 1e-3, 1e3)
        speed = cluster.speed * state.step_factor
        return proportional_sizes(cluster.total, speed, cluster.min_size, cluster.max_size)
    overhead = state.filter.overhead * slowness
    speed = state.filter.speed / slowness
    return balanced_sizes(cluster.total, overhead, speed, cluster.min_size, cluster.max_size)


def level_inputs(state: NodeState, slowness: Floats, form: str) -> tuple[Floats, Floats]:
    """Overhead and speed [..., N] whose water level gives real-valued sizes: what training compares actions by."""
    if form == "steps":
        speed = state.cluster.speed * state.step_factor / slowness
        return np.zeros_like(speed), speed
    return state.filter.overhead * slowness, state.filter.speed / slowness

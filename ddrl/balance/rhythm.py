"""What the shipped DDQN expects of a slow-down that returns in a fixed rhythm: how one looks into the agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.balance.affine_filter import FilterSettings
from ddrl.balance.kinds import make_scenario
from ddrl.balance.node_state import FACTORS, REGIMES, NodeState
from ddrl.balance.simulator import Simulation
from ddrl.balance.sizers.ddqn import apply_actions
from ddrl.balance.value_network import SHIPPED, ValueNetwork

ACTIONS = (*(f"x {factor:g}" for factor in FACTORS), *REGIMES)
_TIME_ALONE = np.array([1.0, 0.0, 0.0, 0.0], np.float32)


def values_in_a_rhythm(
    slow_for: int = 5, fast_for: int = 12, *, factor: float = 3.0, nodes: int = 8, iterations: int = 120
) -> Mapping[str, NDArray[Any]]:
    """What the shipped network expects of each action for a node that is slowed in a fixed rhythm, over the last
    iterations: `values` [K, actions] of time beside keeping the filter's size, `slow` [K] whether it is slow in the
    coming iteration."""
    scenario = make_scenario("static", 1, nodes, iterations, 2)
    slow = np.arange(iterations) % (slow_for + fast_for) >= fast_for
    stretch = np.where(slow[:, None, None] & (np.arange(nodes) == 0), factor, 1.0)
    simulation = Simulation(replace(scenario, slow=scenario.slow * stretch))
    state = NodeState(scenario.cluster, FilterSettings())
    network = ValueNetwork.load(SHIPPED)
    observation = simulation.blank()
    keep = np.zeros((1, nodes), np.int64)
    values: list[NDArray[np.float32]] = []
    for _ in range(iterations):
        state.update(observation)
        node = network(state.features(), state.context(_TIME_ALONE)).nodes[0, 0, :, 0]
        values.append(node - node[0])
        _, observation = simulation.step(apply_actions(state, keep, "regimes"))
    last = 2 * (slow_for + fast_for)
    return {"values": np.array(values)[-last:], "slow": slow[-last:], "actions": np.array(ACTIONS)}

"""Small experiments for notebooks: sizers beside each other on one noise, and a cluster to interfere with. Arrays out,
figures by `ddrl.plots`. Used by the notebook beside it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.balance.kinds import Scenario, make_scenario, slow_down
from ddrl.balance.simulator import Course, Simulation, regret, simulate, times
from ddrl.balance.sizer import make_sizer


def courses(scenario: Scenario, sizers: Sequence[str]) -> dict[str, Course]:
    """What each sizer did on the same noise."""
    return {name: simulate(scenario, make_sizer(name, scenario.cluster)) for name in sizers}


def regrets(kinds: Sequence[str], sizers: Sequence[str], *, nodes: int = 16, clusters: int = 10) -> dict[str, Any]:
    """Mean regret to the causal oracle: {sizer: [kinds]}."""
    found: dict[str, list[float]] = {name: [] for name in sizers}
    for kind in kinds:
        done = courses(make_scenario(kind, clusters, nodes, 120, 1), ("causal", *sizers))
        for name in sizers:
            found[name].append(float(regret(done[name], done["causal"], 20).mean()))
    return {name: np.array(values) for name, values in found.items()}


class LiveCluster:
    """One simulated cluster that goes on while one interferes: `run`, `slow_down`, `run` again.

    `sizes` and `seconds` [K, N] hold what has happened so far."""

    def __init__(self, sizer: str, nodes: int = 4, *, kind: str = "static", seed: int = 1, longest: int = 1000) -> None:
        self._simulation = Simulation(make_scenario(kind, 1, nodes, longest, seed))
        self._sizer = make_sizer(sizer, self._simulation.scenario.cluster)
        self._observation = self._simulation.blank()
        self._sizes: list[NDArray[np.int64]] = []
        self._seconds: list[NDArray[np.float64]] = []

    def run(self, iterations: int) -> LiveCluster:
        """Go on for so many iterations."""
        simulation = self._simulation
        for _ in range(min(iterations, simulation.scenario.iterations - simulation.iteration)):
            sizes = self._sizer.propose(self._observation)
            self._seconds.append(times(simulation.scenario, simulation.iteration, sizes)[0])
            self._sizes.append(sizes[0])
            _, self._observation = simulation.step(sizes)
        return self

    def slow_down(self, node: int, factor: float) -> LiveCluster:
        """From now on `node` takes `factor` times as long; below 1 it is freed again."""
        simulation = self._simulation
        end = simulation.scenario.iterations
        simulation.scenario = slow_down(simulation.scenario, node, simulation.iteration, end, factor)
        return self

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples of each node [K, N]."""
        return np.array(self._sizes)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of each node [K, N]."""
        return np.array(self._seconds)

"""Small experiments for notebooks: sizers beside each other on one noise, and clusters to interfere with, a simulated one
and one of processes. Arrays out, figures by `ddrl.plots`. Used by the notebook beside it alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl.balance import Balancer
from ddrl.balance.simulator import Course, Scenario, Simulation, make_scenario, regret, simulate, slow_down
from ddrl.balance.sizers import make_sizer
from ddrl.plots.frame import add_line, new_figure


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


def iteration_times(seconds: Mapping[str, NDArray[np.float64]], title: str = "Time of an iteration") -> go.Figure:
    """Milliseconds of each iteration by sizer, {name: [K]}, on the same noise."""
    figure = new_figure(title, "iteration", "ms", height=320)
    for index, (name, values) in enumerate(seconds.items()):
        add_line(figure, np.arange(len(values)), np.asarray(values) * 1e3, name, index)
    return figure


class History:
    """What has happened so far, iteration by iteration."""

    def __init__(self) -> None:
        self._sizes: list[Sequence[int] | NDArray[np.int64]] = []
        self._seconds: list[Sequence[float] | NDArray[np.float64]] = []

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples of each node [K, N]."""
        return np.array(self._sizes)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of each node [K, N]."""
        return np.array(self._seconds)


class LiveCluster(History):
    """One simulated cluster that goes on while one interferes: `run`, `slow_down`, `run` again."""

    def __init__(self, sizer: str, nodes: int = 4, *, kind: str = "static", seed: int = 1, longest: int = 1000) -> None:
        self._simulation = Simulation(make_scenario(kind, 1, nodes, longest, seed))
        self._sizer = make_sizer(sizer, self._simulation.scenario.cluster)
        self._observation = self._simulation.blank()
        super().__init__()

    def run(self, iterations: int) -> LiveCluster:
        """Go on for so many iterations."""
        simulation = self._simulation
        for _ in range(min(iterations, simulation.scenario.iterations - simulation.iteration)):
            sizes = self._sizer.propose(self._observation)
            self._seconds.append(simulation.times(sizes)[0])
            self._sizes.append(sizes[0])
            _, self._observation = simulation.step(sizes)
        return self

    def slow_down(self, node: int, factor: float) -> LiveCluster:
        """From now on `node` takes `factor` times as long; below 1 it is freed again."""
        simulation = self._simulation
        end = simulation.scenario.iterations
        simulation.scenario = slow_down(simulation.scenario, node, simulation.iteration, end, factor)
        return self


class ProcessCluster(History):
    """The same with processes of this machine, which compute as many samples as they are given.

    Times are those that the notebook measures, from the sending of a size to the answer. A node that is slowed down
    computes each sample `factor` times. `close` ends the processes; they also end with the notebook."""

    def __init__(self, sizer: str = "affine", nodes: int = 3, *, total: int = 900) -> None:
        self._balancer, self._factors = Balancer(total, nodes, sizer), [1.0] * nodes
        super().__init__()
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(nodes)]
        self._nodes: list[Connection] = [mine for mine, _ in ends]
        self._processes = [context.Process(target=compute, args=(theirs,), daemon=True) for _, theirs in ends]
        for process in self._processes:
            process.start()
        for node in self._nodes:
            node.recv()  # it has started

    def run(self, iterations: int) -> ProcessCluster:
        """Go on for so many iterations."""
        for _ in range(iterations):
            sizes, seconds = self._balancer.sizes, [0.0] * len(self._nodes)
            begin = time.perf_counter()
            for node, size, factor in zip(self._nodes, sizes, self._factors, strict=True):
                node.send(round(size * factor))
            while waiting := [node for node, taken in zip(self._nodes, seconds, strict=True) if not taken]:
                for node in wait(waiting):
                    node.recv()
                    seconds[self._nodes.index(node)] = time.perf_counter() - begin
            self._sizes.append(sizes)
            self._seconds.append(seconds)
            self._balancer.update(seconds)
        return self

    def slow_down(self, node: int, factor: float) -> ProcessCluster:
        """From now on `node` takes `factor` times as long for a sample; below 1 it is freed again."""
        self._factors[node] *= factor
        return self

    def close(self) -> None:
        """End the processes."""
        for node, process in zip(self._nodes, self._processes, strict=True):
            node.close()
            process.join()


def compute(notebook: Connection) -> None:
    """A node: computes as many made-up samples as it is told, until the other end is closed."""
    sample = np.linspace(0.0, 1.0, 5000)
    notebook.send(None)
    try:
        while True:
            for _ in range(notebook.recv()):
                np.sin(sample).sum()
            notebook.send(None)
    except (EOFError, OSError):
        return

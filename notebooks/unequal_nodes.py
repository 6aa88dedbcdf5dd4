"""Processes of this machine that share batches, for the notebook beside it alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

import numpy as np
from numpy.typing import NDArray

from ddrl.balance import Balancer


class ProcessCluster:
    """Processes of this machine, which compute as many samples as they are given; `sizes` and `seconds` of each
    iteration.

    Times are those that the notebook measures, from the sending of a size to the answer. A node that is slowed down
    computes each sample `factor` times. `close` ends the processes; they also end with the notebook."""

    def __init__(self, sizer: str = "affine", nodes: int = 3, *, total: int = 900) -> None:
        self._balancer = Balancer(total, nodes, sizer)
        self._factors = [1.0] * nodes
        self._sizes: list[NDArray[np.int64]] = []
        self._seconds: list[Sequence[float]] = []
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(nodes)]
        self._nodes: list[Connection] = [mine for mine, _ in ends]
        self._processes = [context.Process(target=compute, args=(theirs,), daemon=True) for _, theirs in ends]
        for process in self._processes:
            process.start()
        for node in self._nodes:
            node.recv()  # it has started

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples of each node [K, N]."""
        return np.array(self._sizes)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of each node [K, N]."""
        return np.array(self._seconds)

    def run(self, iterations: int) -> ProcessCluster:
        """Make so many iterations more."""
        for _ in range(iterations):
            sizes = self._balancer.sizes
            seconds = [0.0] * len(self._nodes)
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
    """A node: computes as many made-up samples as it is asked for, until the other end is closed."""
    sample = np.linspace(0.0, 1.0, 5000)
    notebook.send(None)
    try:
        while True:
            for _ in range(notebook.recv()):
                np.sin(sample).sum()
            notebook.send(None)
    except (EOFError, OSError):
        return

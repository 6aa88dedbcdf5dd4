"""How the batches of one part of an algorithm are shared among nodes: sizes by the times measured, and what counts.

The leader's own; knows no messages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.collection import Collection
from ddrl.balance.sizer import PACKAGE, Sizer, make_sizer
from ddrl.balance.sizes import Sizes, proportional_sizes
from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.run.nodes.messages import rows_of

if TYPE_CHECKING:
    from ddrl.learner.exchange import Vector


@dataclass
class Answer:
    """A gradient that has arrived and counts."""

    rows: Any
    vector: Vector
    priority: NDArray[np.float32] | None
    figures: Mapping[str, float]


class Sharing:
    """One part of the algorithm: its collection, its sizer, and what it waits for."""

    def __init__(self, config: Config, nodes: list[int]) -> None:
        self._config = config
        self.collection = Collection(config.balance)
        self.answers: dict[tuple[Hashable, int], Answer] = {}  # by node and version
        self.again: list[Any] = []  # rows to deal again
        self.buffers: list[Vector] = []  # free memory for gradients
        self.order: list[tuple[int, int]] = []  # node and version of the answers whose rows together are the batch
        self.plan(nodes)

    def plan(self, nodes: list[int]) -> None:
        """Begin to size anew for these nodes. ConfigError where they cannot hold a batch."""
        self.nodes = nodes
        self.cluster, self._sizer = make_node_sizer(self._config, nodes)
        self.sizes = self._sizer.propose(Observation.blank(self.cluster))
        self._dealt, self._seconds = np.zeros(len(nodes), np.int64), np.zeros(len(nodes))
        self.collection.settings = replace(self._config.balance, first=min(self._config.balance.first, len(nodes)))

    def measured(self, node: int, samples: int, seconds: float) -> None:
        """A gradient of `samples` took `seconds`."""
        place = self.nodes.index(node)
        self._dealt[place], self._seconds[place] = samples, seconds

    def propose(self) -> None:
        """The next sizes, from what was measured since the last ones."""
        observation = Observation.of(self.cluster, self._dealt, self._seconds, self._seconds > 0)
        self.sizes = self._sizer.propose(observation)
        first = self._sizer.first()
        if first is not None:
            self.collection.settings = replace(self.collection.settings, first=int(first))
        self._dealt, self._seconds = np.zeros_like(self._dealt), np.zeros_like(self._seconds)

    def cut(self, rows: int, free: list[int]) -> Sizes:
        """Sizes of the parts of `rows` for these nodes; fewer than `rows` where they cannot hold them."""
        if free == self.nodes and rows == self.cluster.total:
            return self.sizes
        places = [self.nodes.index(node) for node in free]
        upper = self._limit()[places]
        total = min(rows, int(upper.sum()))
        lower = np.minimum(np.ones_like(upper), upper)
        return proportional_sizes(total, self.sizes[places].astype(np.float64), lower, upper)

    @property
    def waiting(self) -> int:
        """Rows to deal."""
        return sum(map(rows_of, self.again))

    def holds(self, nodes: list[int]) -> int:
        """Samples that these nodes hold together."""
        return int(self._limit()[[self.nodes.index(node) for node in nodes]].sum())

    def _limit(self) -> Sizes:
        caps = self._config.balance.max_sizes
        return np.array([caps[node] if caps else 1 << 40 for node in self.nodes], np.int64)


def make_node_sizer(config: Config, nodes: list[int]) -> tuple[Cluster, Sizer]:
    """The sizer that balance.sizer names, for these of the nodes. ConfigError where it cannot be used."""
    caps = [config.balance.max_sizes[node] for node in nodes] if config.balance.max_sizes else None
    cluster = Cluster.of(config.learner.batch_size, np.ones(len(nodes)), caps)
    kind = plugins.load("balance.sizer", PACKAGE, config.balance.sizer)
    return cluster, make_sizer(config.balance.sizer, cluster, config.tables.get(f"balance.{kind.name}"))

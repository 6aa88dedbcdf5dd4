"""How the batches of one part of an algorithm are shared among nodes: sizes by the times measured, and what counts.

The leader's own; knows no messages."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.collection import Collection
from ddrl.balance.noise_scale import NoiseScale
from ddrl.balance.settings import BalanceConfig
from ddrl.balance.sizer import PACKAGE, Sizer, make_sizer
from ddrl.balance.sizes import Sizes, proportional_sizes
from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.run.nodes.messages import Reply, rows_of

if TYPE_CHECKING:
    from ddrl.learner.exchange import Vector

GRADIENTS = ("norm", "cosine", "loss", "staleness", "dropped")  # what an observation holds of a gradient


@dataclass
class NodeState:
    """What the leader knows of one node."""

    versions: dict[str, int] = field(default_factory=dict[str, int])  # of the vectors that it has
    asked: bool = False  # whether it can map the shared memories
    rings: bool = False  # it has mapped the bells
    mapped: bool = False  # and the vectors
    part: str = ""  # that it computes a gradient of
    rows: Any = None  # these
    dealt_at: float = 0.0
    late: int = 0
    dropped: int = 0
    samples: int = 0  # of its last gradient
    seconds: float = math.nan  # that it took


@dataclass
class Answer:
    """A gradient that has arrived and counts."""

    rows: Any
    vector: Vector
    priority: NDArray[np.float32] | None
    figures: Mapping[str, float]
    norm: float
    mapped: bool  # the vector stands in the shared memory


class Sharing:
    """One part of the algorithm: its collection, its sizer, and what it waits for."""

    def __init__(self, config: Config, nodes: list[int]) -> None:
        self._config = config
        self._settings = config.section(BalanceConfig)
        self.collection = Collection(self._settings)
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
        self.reads_gradients = bool(getattr(self._sizer, "reads_gradients", False))
        # Whether every update awaits all gradients, to the end of the run.
        self.awaits_all = not self._settings.first and self._sizer.first() is None
        self._noise_scale = NoiseScale()
        self._blank()
        self.collection.settings = replace(self._settings, first=min(self._settings.first, len(nodes)))

    def _blank(self) -> None:
        """Nothing was measured since the last sizes."""
        self._dealt = np.zeros(len(self.nodes), np.int64)
        self._seconds = np.zeros(len(self.nodes))
        self._gradients = {name: np.zeros(len(self.nodes)) for name in GRADIENTS}

    def measured(self, node: int, samples: int, seconds: float, reply: Reply, age: int, dropped: bool) -> None:
        """A gradient of `samples` took `seconds`; it was computed `age` versions before this one."""
        place = self.nodes.index(node)
        self._dealt[place] = samples
        self._seconds[place] = seconds
        values = (reply.norm, 0.0, reply.loss, age, dropped)
        for name, value in zip(GRADIENTS, values, strict=True):
            self._gradients[name][place] = value if math.isfinite(value) else 0.0

    def aligned(self, cosines: Mapping[tuple[Hashable, int], float], mean_norm: float) -> None:
        """Cosines of gradients, by node and version, to the mean that an update takes, and its norm. A dropped gradient
        is in no mean: its cosine stays 0."""
        for place, node in enumerate(self.nodes):
            for (who, _), cosine in cosines.items():
                if who == node and math.isfinite(cosine):
                    self._gradients["cosine"][place] = cosine
        known = self._dealt > 0
        self._noise_scale.update(self._dealt[known], self._gradients["norm"][known], mean_norm)

    def propose(self) -> None:
        """The next sizes, from what was measured since the last ones."""
        gradients = {**self._gradients, "noise_scale": self._noise_scale.value}
        observation = Observation.of(self.cluster, self._dealt, self._seconds, self._seconds > 0, **gradients)
        self.sizes = self._sizer.propose(observation)
        first = self._sizer.first()
        if first is not None:
            if self.awaits_all:
                raise ConfigError(f"balance.sizer = {self._settings.sizer} chose K after its first sizes alone")
            self.collection.settings = replace(self.collection.settings, first=int(first))
        self._blank()

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
        caps = self._settings.max_sizes
        return np.array([caps[node] if caps else 1 << 40 for node in self.nodes], np.int64)


def make_node_sizer(config: Config, nodes: list[int]) -> tuple[Cluster, Sizer]:
    """The sizer that balance.sizer names, for these of the nodes. ConfigError where it cannot be used."""
    settings = config.section(BalanceConfig)
    caps = [settings.max_sizes[node] for node in nodes] if settings.max_sizes else None
    cluster = Cluster.of(config.learner.batch_size, np.ones(len(nodes)), caps)
    kind = plugins.load("balance.sizer", PACKAGE, settings.sizer)
    return cluster, make_sizer(settings.sizer, cluster, config.table(f"balance.{kind.name}"))


def mean_figures(figures: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """The weighted mean over those that have figures."""
    known = [(one, weight) for one, weight in zip(figures, weights, strict=True) if one]
    share = sum(weight for _, weight in known)
    return {name: sum(one[name] * weight for one, weight in known) / share for name in (known[0][0] if known else ())}

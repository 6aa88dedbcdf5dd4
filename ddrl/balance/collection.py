"""Which gradients an update waits for and uses (`Collection`), and which samples each node computes (`Epochs`).

Both are state machines of a coordinator, without messages or timers: it calls them with times of one clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ddrl.balance import CollectionSettings
from ddrl.core.errors import ConfigError
from ddrl.core.specs import Ints

# -- gradients of an update --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """What an iteration's update is made of.

    weights: of each accepted gradient's mean, by (node, version); they sum to 1 (b_i / sum b of the accepted
    samples)."""

    version: int
    weights: Mapping[tuple[Hashable, int], float]
    samples: int


@dataclass
class Counts:
    """Since the beginning: gradients accepted in time, accepted late, dropped; samples dealt, used, requeued, lost."""

    accepted: int = 0
    late: int = 0
    dropped: int = 0
    dealt: int = 0
    used: int = 0
    requeued: int = 0
    lost: int = 0


@dataclass
class Collection:
    """The rules of an update (M3, M4); `version` is the model that nodes now begin with.

    An iteration: `begin`; `arrive` for each gradient, and `deal` for a node that is free again; after each of them, and
    at `deadline`, `ready` says whether the update can be made; `finish` makes it. The first K of N gradients of the
    current version open the waiting time for the others, the target nodes. A later gradient is used by the update in
    progress if it is fresh enough; else it is dropped.

    The samples of dropped gradients are dealt again (`balance.dropped_samples` = requeue), or are lost. Losing them
    biases the gradient toward the data of fast nodes where data and speed are related; requeueing does not.

    Invariant (`check`): every sample dealt is used, requeued, lost, or with a node that still computes on it."""

    settings: CollectionSettings
    version: int = 0
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._computing: dict[Hashable, tuple[int, int]] = {}  # node: (version, samples)
        self._made_at: dict[int, float] = {}  # when each version that still counts was made
        self._held: dict[tuple[Hashable, int], int] = {}  # accepted for the current update: samples
        self._current = self._begun = 0  # gradients of the current version: here, and asked for
        self._opened_at = math.inf
        self._open = False

    def begin(self, now: float, sizes: Mapping[Hashable, int]) -> None:
        """Open an iteration and deal `sizes` samples to free nodes, on the current version. ConfigError for K above the
        nodes, for a node that still computes, and for sizes below 1."""
        taking_part = set(self._computing) | set(sizes)
        if not taking_part:
            raise ConfigError("an iteration needs at least one node")
        if self.settings.first > len(taking_part):
            raise ConfigError(
                f"balance.first (K = {self.settings.first}) exceeds the {len(taking_part)} nodes: no update "
                "would ever be made; lower it, or 0 for all"
            )
        self._open = True
        self._current = 0
        self._begun = 0
        self._opened_at = math.inf
        self._made_at.setdefault(self.version, now)
        for node, size in sizes.items():
            self.deal(node, size)

    def deal(self, node: Hashable, size: int) -> None:
        """Samples for one more node of the current iteration: a new one, or one whose late gradient arrived."""
        if node in self._computing:
            raise ConfigError(f"node {node} still computes on version {self._computing[node][0]}")
        if size < 1:
            raise ConfigError(f"node {node}: a micro-batch of {size} samples")
        self._computing[node] = (self.version, size)
        self._begun += 1
        self.counts.dealt += size

    @property
    def first(self) -> int:
        """How many gradients of the current version open the waiting time: K, or all that were dealt."""
        return min(self.settings.first or self._begun, self._begun)

    @property
    def holds(self) -> bool:
        """Whether a gradient has arrived that the next update uses."""
        return bool(self._held)

    @property
    def targets(self) -> frozenset[Hashable]:
        """Nodes that still compute on the current version: the target nodes."""
        return frozenset(node for node, (version, _) in self._computing.items() if version == self.version)

    @property
    def behind(self) -> frozenset[Hashable]:
        """Nodes that still compute on an earlier version."""
        return frozenset(node for node, (version, _) in self._computing.items() if version < self.version)

    def computing(self, node: Hashable) -> int:
        """The version that `node` computes a gradient of. ConfigError for a node that computes nothing."""
        if node not in self._computing:
            raise ConfigError(f"node {node} sent a gradient that nobody asked for")
        return self._computing[node][0]

    def arrive(self, now: float, node: Hashable) -> bool:
        """The gradient of `node` has arrived: whether it is used, else it is dropped. ConfigError for a node that
        computes nothing."""
        self.computing(node)
        version, samples = self._computing.pop(node)
        fresh = self._staleness(now, version) <= self.settings.threshold or version == self.version
        if not fresh:
            self._drop(samples)
            return False
        self._held[node, version] = samples
        if version == self.version:
            self.counts.accepted += 1
            self._current += 1
        else:
            self.counts.late += 1
        self._open_wait(now)
        return True

    def leave(self, now: float, node: Hashable) -> None:
        """`node` has died: its samples are requeued, whatever the setting, since no gradient of them exists."""
        if node in self._computing:
            version, samples = self._computing.pop(node)
            self.counts.requeued += samples
            self._begun -= version == self.version
            self._open_wait(now)

    def _open_wait(self, now: float) -> None:
        if self._held and self._current >= self.first:
            self._opened_at = min(self._opened_at, now)

    @property
    def deadline(self) -> float:
        """When the waiting time for the target nodes ends; infinite before the first K have arrived."""
        return self._opened_at + self.settings.wait

    def ready(self, now: float) -> bool:
        """Whether the update can be made: all have arrived, or the first K have and the waiting time is over."""
        if not self._open or not self._held:
            return False
        return not self.targets or now >= self.deadline

    def finish(self, now: float) -> Update:
        """Make the update: the version goes up. ConfigError before `ready`."""
        if not self.ready(now):
            raise ConfigError("the update is not ready: the first K gradients, or the end of the wait, are missing")
        samples = sum(self._held.values())
        weights = {key: size / samples for key, size in self._held.items()}
        update = Update(self.version, weights, samples)
        self.counts.used += samples
        self._held = {}
        self._open = False
        self.version += 1
        self._made_at[self.version] = now
        oldest = min((version for version, _ in self._computing.values()), default=self.version)
        self._made_at = {version: at for version, at in self._made_at.items() if version >= oldest}
        return update

    def check(self) -> None:
        """Every sample dealt is accounted for."""
        counts = self.counts
        computing = sum(samples for _, samples in self._computing.values())
        held = sum(self._held.values())
        assert counts.dealt == counts.used + counts.requeued + counts.lost + computing + held, counts
        assert all(version <= self.version for version, _ in self._computing.values())

    def _staleness(self, now: float, version: int) -> float:
        return self.version - version if self.settings.staleness == "versions" else now - self._made_at[version]

    def _drop(self, samples: int) -> None:
        self.counts.dropped += 1
        if self.settings.dropped_samples == "requeue":
            self.counts.requeued += samples
        else:
            self.counts.lost += samples


# -- samples of an epoch -----------------------------------------------------------------------------------------------

Indices = Ints


class Epochs:
    """Each epoch's permutation of `count` samples, cut into the nodes' subsets: every sample exactly once an epoch.

    `deal` cuts the next micro-batches by the current sizes; `done`, `give_back` and `lose` say what became of them.
    What is given back (a dropped gradient, a dead node) is dealt again before the rest. An epoch ends when every sample
    was done or lost. The permutation of epoch e follows from (seed, e)."""

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ConfigError(f"a training set of {count} samples")
        self.count = count
        self.seed = seed
        self.epoch = 0
        self._out: dict[Hashable, Indices] = {}
        self._begin()

    def _begin(self) -> None:
        self._queue = deque([np.random.default_rng((self.seed, self.epoch)).permutation(self.count)])
        self._finished = np.zeros(self.count, np.bool_)
        self._lost = 0

    @property
    def left(self) -> int:
        """Samples of this epoch that can be dealt now."""
        return sum(map(len, self._queue))

    @property
    def ended(self) -> bool:
        """Whether every sample of the epoch was done (or lost)."""
        return not self.left and not self._out

    def deal(self, sizes: Mapping[Hashable, int]) -> dict[Hashable, Indices]:
        """The next subset of each node; the epoch's last ones are shorter, in proportion, and may be empty (left out).

        ConfigError for a node that has not answered for its last subset, and after the epoch's end."""
        if self.ended:
            raise ConfigError(f"epoch {self.epoch} has ended: call next_epoch()")
        for node, size in sizes.items():
            if node in self._out:
                raise ConfigError(f"node {node} still holds {len(self._out[node])} samples")
            if size < 0:
                raise ConfigError(f"node {node}: a subset of {size} samples")
        wanted = sum(sizes.values())
        subsets = dict[Hashable, Indices]()
        share = min(1.0, self.left / wanted) if wanted else 0.0
        edges = np.rint(np.cumsum([0, *sizes.values()]) * share).astype(np.int64)
        for node, size in zip(sizes, np.diff(edges), strict=True):
            if size:
                self._out[node] = subsets[node] = self._take(int(size))
        return subsets

    @staticmethod
    def weights(dealt: Mapping[Hashable, Indices]) -> dict[Hashable, float]:
        """Of each node's mean in the mean of all samples dealt: those of `Balancer.weights` are of full subsets, and
        the last ones of an epoch are shorter."""
        total = sum(map(len, dealt.values()))
        return {node: len(rows) / total for node, rows in dealt.items()}

    def _take(self, size: int) -> Indices:
        pieces: list[Indices] = []
        while size:
            piece = self._queue.popleft()
            if len(piece) > size:
                self._queue.appendleft(piece[size:])
            pieces.append(piece[:size])
            size -= len(pieces[-1])
        return np.concatenate(pieces)

    def done(self, node: Hashable) -> None:
        """The gradient of the node's subset is in an update."""
        self._finished[self._pop(node)] = True

    def give_back(self, node: Hashable) -> None:
        """The node's subset is dealt again: its gradient was dropped, or the node died."""
        self._queue.appendleft(self._pop(node))

    def lose(self, node: Hashable) -> None:
        """The node's subset counts as lost for this epoch."""
        self._lost += len(self._pop(node))

    def _pop(self, node: Hashable) -> Indices:
        if node not in self._out:
            raise ConfigError(f"node {node} holds no samples")
        return self._out.pop(node)

    def next_epoch(self) -> None:
        """A new permutation; ConfigError while samples of the old one are left."""
        if not self.ended:
            raise ConfigError(
                f"epoch {self.epoch} has not ended: {self.left} samples are left, {len(self._out)} nodes work"
            )
        self.epoch += 1
        self._begin()

    def check(self) -> None:
        """Samples done, held by nodes and still to deal are distinct, and with the lost ones are all."""
        parts = [np.flatnonzero(self._finished), *self._out.values(), *self._queue]
        indices = np.concatenate(parts)
        assert len(np.unique(indices)) == len(indices), "a sample is doubled"
        assert len(indices) + self._lost == self.count, "a sample is missing"

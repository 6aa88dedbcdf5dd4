"""Each epoch's permutation of a training set, cut into the nodes' subsets: every sample exactly once an epoch.

Written and read by the coordinator: `deal` cuts the next micro-batches off the permutation by the current sizes, `done`
and `give_back` say what became of them. Samples given back (a dropped gradient, a dead node) are dealt again within the
epoch, before the rest. An epoch ends when every sample was done."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import ConfigError

Indices = NDArray[np.int64]


class Epochs:
    """`count` samples, epoch after epoch; the permutation of epoch e follows from (seed, e).

    `bytes_dealt` counts sample_bytes for every sample dealt, again where it was dealt again."""

    def __init__(self, count: int, seed: int, *, sample_bytes: int = 0) -> None:
        if count < 1:
            raise ConfigError(f"a training set of {count} samples")
        self.count = count
        self.seed = seed
        self.sample_bytes = sample_bytes
        self.epoch = 0
        self.bytes_dealt = 0
        self.lost = 0
        self._out: dict[Hashable, Indices] = {}
        self._begin()

    def _begin(self) -> None:
        self._queue = deque([np.random.default_rng((self.seed, self.epoch)).permutation(self.count)])
        self._finished = np.zeros(self.count, np.bool_)
        self._lost_now = 0

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
                self.bytes_dealt += int(size) * self.sample_bytes
        return subsets

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
        lost = len(self._pop(node))
        self.lost = self.lost + lost
        self._lost_now = self._lost_now + lost

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
        assert len(indices) + self._lost_now == self.count, "a sample is missing"

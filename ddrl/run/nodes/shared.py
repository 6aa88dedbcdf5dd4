"""Memory that the leader and the nodes of its host map: the vectors that gradients depend on, and the gradients.

The leader's vectors lie there and are stepped there; nodes read them there and compute their gradients there, and the
leader sums these where they stand: nothing is sent, and on the CPU nothing is copied. The leader writes only while no
node has a task, a node (its gradients alone) only while it has one: so this serves where all gradients are awaited. For
the first K of N, and with a node that cannot map the memory, for it is on another host, vectors and gradients are
messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ddrl.channels.segment import Segment
from ddrl.run.nodes.bells import MakeSegment

if TYPE_CHECKING:
    from ddrl.learner.exchange import Exchange, Vector

VECTORS_SEGMENT = "vectors"


class SharedVectors:
    """One process's view: the leader makes it (`create`), nodes attach by the segment's name."""

    def __init__(self, segment: Segment, exchange: Exchange, nodes: int) -> None:
        self.name = segment.name or ""
        lengths = _lengths(exchange, nodes)
        views = (
            segment.array[start : start + length] for start, length in zip(_starts(lengths), lengths, strict=False)
        )
        self.vectors: dict[str, Vector] = {name: next(views) for name in exchange.versions()}
        self.gradients = [{part: next(views) for part in exchange.learner.parts} for _ in range(nodes)]
        self._exchange = exchange
        self._read = False
        self._published: dict[str, int] = {}

    @classmethod
    def create(cls, make: MakeSegment, exchange: Exchange, nodes: int) -> SharedVectors:
        """The leader's: its vectors move there, where they are on the CPU. ChannelError where there is no room."""
        shared = cls(make(VECTORS_SEGMENT, _starts(_lengths(exchange, nodes))[-1]), exchange, nodes)
        for gradients in shared.gradients:
            for vector in gradients.values():
                vector.fill(0)  # the padding of a gradient is summed as well
        exchange.move_into(shared.vectors)
        return shared

    @classmethod
    def attach(cls, name: str, exchange: Exchange, nodes: int, node: int) -> SharedVectors:
        """A node's: its gradients move there, where they are on the CPU. ChannelError where it cannot be mapped."""
        shared = cls(Segment.attach(name, VECTORS_SEGMENT), exchange, nodes)
        exchange.move_into({f"{part}.gradient": vector for part, vector in shared.gradients[node].items()})
        return shared

    def read(self, names: Iterable[str]) -> None:
        """A node's: these vectors have changed. From the first call, which names all of them, on, a learner on the CPU
        reads them here; one on a device copies those that have changed."""
        if not self._read:
            self._exchange.move_into(self.vectors, fill=False)
            self._read = True
        for name in names:
            self._exchange.set_vector(name, self.vectors[name])

    def publish(self, versions: Mapping[str, int]) -> None:
        """Let the vectors be those of the learner; a copy only where they cannot lie here, on a device."""
        for name, version in versions.items():
            if self._published.get(name) != version:
                vector = self._exchange.vector(name)
                if vector.ctypes.data != self.vectors[name].ctypes.data:
                    np.copyto(self.vectors[name], vector)
                self._published[name] = version


def _lengths(exchange: Exchange, nodes: int) -> list[int]:
    """Bytes of each vector, in their order."""
    layouts = {name: part.online.layout for name, part in exchange.learner.parts.items()}
    own = [layouts[name.rpartition(".")[0]].nbytes for name in exchange.versions()]
    return own + [layout.nbytes for layout in layouts.values()] * nodes


def _starts(lengths: list[int]) -> list[int]:
    """Where each begins, at a multiple of 64 bytes; last, where all of them end."""
    return list(itertools.accumulate((-(-length // 64) * 64 for length in lengths), initial=0))

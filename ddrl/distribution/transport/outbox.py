"""Which of a host's ready messages goes next: the one that stands earliest, old versions before new ones.

Only a window of bytes is handed to MPI and not yet taken, so that precedence is ours and not the socket's, and only a
share of it to one target, so that a slow target holds up only its own. MPI calls a small message sent when it has
copied it: so now and then one is sent that ends only when it has been taken, and with it all before. Used by `executor`
alone; knows no MPI."""

from __future__ import annotations

import heapq

Entry = tuple[int, int]  # (sequence, place among the host's own messages): the smaller goes first


class Outbox:
    """`window`, `share`: bytes under way from this host, and of these to one target, from which on no more go."""

    def __init__(self, window: int, share: int) -> None:
        self._window, self._share = window, share
        self._ready: list[tuple[Entry, int]] = []  # with the target
        self._full: dict[int, list[Entry]] = {}  # ready too, but their target has its share
        self._to: dict[int, int] = {}  # bytes under way
        self._unasked: dict[int, int] = {}  # of these, those of which nothing says when they are taken
        self._under_way = 0  # all others

    def add(self, entry: Entry, target: int) -> None:
        """A message may go."""
        heapq.heappush(self._ready, (entry, target))

    def take(self) -> Entry | None:
        """The next message that has room."""
        while self._ready and self._under_way < self._window:
            entry, target = heapq.heappop(self._ready)
            if self._to.get(target, 0) < self._share:
                return entry
            self._full.setdefault(target, []).append(entry)
        return None

    def asks(self, target: int, nbytes: int) -> bool:
        """Whether this message must end only when it has been taken."""
        return 4 * (self._unasked.get(target, 0) + nbytes) > self._share

    def copied(self, target: int, nbytes: int) -> None:
        """A message has gone, and nothing will say when it has been taken."""
        self._to[target] = self._to.get(target, 0) + nbytes
        self._unasked[target] = self._unasked.get(target, 0) + nbytes

    def sent(self, target: int, nbytes: int) -> int:
        """A message has gone whose end will be known; the bytes that will have been taken then."""
        self._to[target] = self._to.get(target, 0) + nbytes
        nbytes += self._unasked.pop(target, 0)
        self._under_way += nbytes
        return nbytes

    def taken(self, target: int, nbytes: int) -> None:
        """Those bytes have been taken."""
        self._under_way -= nbytes
        self._to[target] -= nbytes
        for entry in self._full.pop(target, ()):
            heapq.heappush(self._ready, (entry, target))

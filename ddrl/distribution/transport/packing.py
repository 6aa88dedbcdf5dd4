"""How the messages of one plan stand in memory.

Headers and payload of a message are gathered from two places (or, where sizes vary, from one for each chunk) by a
datatype, so nothing is copied. Used by `executor` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddrl.distribution.plans.plan import Plan
from ddrl.distribution.transport.flights import Flight
from ddrl.distribution.transport.shards import Headers

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.distribution.transport.shards import Bytes


class Packing:
    """`edges` [K + 1]: where chunks stand in what travels. `sizes`: bytes of each message, headers included, at most
    where sizes vary."""

    def __init__(self, plan: Plan, edges: list[int]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._edges = edges
        self._chunks = plan.chunks
        self._first: list[int] = plan.first.tolist()
        self._count: list[int] = plan.count.tolist()
        ends = np.asarray(edges, np.int64)
        payload = ends[plan.first + plan.count] - ends[plan.first]
        heads = [Headers.span(first, count)[1] for first, count in zip(self._first, self._count, strict=True)]
        self.sizes: list[int] = (payload + heads).tolist()
        self._known: dict[tuple[int, int, int], MPI.Datatype] = {}  # by slot, first chunk and number of chunks
        self._varying: MPI.Datatype | None = None  # of the last message of a size of its own
        self._headers: dict[int, Headers] = {}  # by the address of the model's slot

    def nbytes(self, flight: Flight, message: int) -> int:
        """Bytes of a message, headers included; known once its chunks are coded or have arrived."""
        if flight.lengths is None:
            return self.sizes[message]
        first = self._first[message]
        count = self._count[message]
        return Headers.span(first, count)[1] + sum(flight.lengths[first : first + count])

    def headers(self, data: Bytes) -> Headers:
        """Of the model that stands in `data`."""
        return self._headers.setdefault(data.ctypes.data, Headers(self._chunks))

    def handles(self, flight: Flight, messages: Sequence[int]) -> list[int]:
        """MPI's handles of the datatypes of messages, as long as they can be."""
        address = flight.data.ctypes.data
        return [self._whole(flight, address, self._first[one], self._count[one]).handle for one in messages]

    def datatype(self, flight: Flight, message: int) -> MPI.Datatype:
        """A message about to be sent; good until the next one is asked for. Where sizes vary, headers and chunks go one
        behind the other, from wherever they stand."""
        first = self._first[message]
        count = self._count[message]
        address = flight.data.ctypes.data
        if flight.lengths is None or flight.at is None:
            return self._whole(flight, address, first, count)
        start, nbytes = Headers.span(first, count)
        sizes = [nbytes]
        places = [flight.headers.memory.ctypes.data + start]
        for chunk in range(first, first + count):
            sizes.append(flight.lengths[chunk])
            places.append(address + flight.at[chunk])
        self._free_varying()
        made = self._varying = self._mpi.BYTE.Create_hindexed(sizes, places).Commit()
        return made

    def _whole(self, flight: Flight, address: int, first: int, count: int) -> MPI.Datatype:
        found = self._known.get((address, first, count))
        if found is None:
            start = self._edges[first]
            stop = self._edges[first + count]
            begin, nbytes = Headers.span(first, count)
            heads = flight.headers.memory.ctypes.data + begin
            found = self._mpi.BYTE.Create_hindexed([nbytes, stop - start], [heads, address + start])
            self._known[address, first, count] = found.Commit()
        return found

    def _free_varying(self) -> None:
        """MPI keeps it until the message has left."""
        if self._varying is not None:
            self._varying.Free()
            self._varying = None

    def free(self) -> None:
        """Nothing is under way any more."""
        self._free_varying()
        for datatype in self._known.values():
            datatype.Free()
        self._known = {}

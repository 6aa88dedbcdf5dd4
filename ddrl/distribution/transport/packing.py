"""How the messages of one plan stand in memory and which tag each bears.

Headers and payload of a message are gathered from two places (or, where sizes vary, from one for each chunk) by a
datatype, so nothing is copied. Used by `executor` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.distribution.plans.plan import HEADER_BYTES, Plan
from ddrl.distribution.transport.flights import Flight, Memory
from ddrl.distribution.transport.shards import HEADER, Bytes

if TYPE_CHECKING:
    from mpi4py import MPI


class Packing:
    """`edges` [K + 1]: where chunks stand in what travels."""

    def __init__(self, plan: Plan, edges: list[int], versions_in_flight: int) -> None:
        from mpi4py import MPI

        self._mpi, self._edges, self._chunks, self._tags = MPI, edges, plan.chunks, 2 * versions_in_flight
        self._first: list[int] = plan.first.tolist()
        self._count: list[int] = plan.count.tolist()
        ends = np.asarray(edges, np.int64)
        payload = ends[plan.first + plan.count] - ends[plan.first]
        self._nbytes: list[int] = (payload + plan.count * HEADER_BYTES).tolist()
        self._memory: dict[int, Memory] = {}  # by the address of the model's slot
        self._headers: dict[int, NDArray[Any]] = {}

    def tag(self, sequence: int, message: int) -> int:
        """Of a message of the model `sequence`; distinct among all that may travel at once."""
        return sequence % self._tags * self._chunks + self._first[message]

    def nbytes(self, flight: Flight, message: int) -> int:
        """Bytes of a message, headers included; known once its chunks are coded or have arrived."""
        if flight.lengths is None:
            return self._nbytes[message]
        first, count = self._first[message], self._count[message]
        return count * HEADER_BYTES + sum(flight.lengths[first : first + count])

    def headers(self, data: Bytes) -> NDArray[Any]:
        """Headers [K] of the model that stands in `data`."""
        return self._headers.setdefault(data.ctypes.data, np.zeros(self._chunks, HEADER))

    def memory(self, flight: Flight, message: int) -> list[Any]:
        """Headers and payload of a message as one MPI message, out of or into two places."""
        place = self._first[message], self._count[message]
        found = flight.memory.get(place)
        if found is None:
            address = flight.data.ctypes.data
            flight.memory = self._memory.setdefault(address, {})
            found = flight.memory.get(place) or self._gather(flight, address, *place)
        return found

    def _gather(self, flight: Flight, address: int, first: int, count: int) -> list[Any]:
        start, stop = self._edges[first], self._edges[first + count]
        heads = flight.headers.ctypes.data + first * HEADER_BYTES
        datatype = self._mpi.BYTE.Create_hindexed([count * HEADER_BYTES, stop - start], [heads, address + start])
        found = flight.memory[first, count] = [self._mpi.BOTTOM, 1, datatype.Commit()]
        return found

    def send(self, isend: Callable[..., MPI.Request], flight: Flight, message: int, target: int) -> MPI.Request:
        """Hand a message to MPI. Where sizes vary, headers and chunks go one behind the other, from wherever they
        stand."""
        tag = self.tag(flight.sequence, message)
        if flight.lengths is None or flight.at is None:
            return isend(self.memory(flight, message), target, tag)
        first, count, address = self._first[message], self._count[message], flight.data.ctypes.data
        sizes, places = [count * HEADER_BYTES], [flight.headers.ctypes.data + first * HEADER_BYTES]
        for chunk in range(first, first + count):
            sizes.append(flight.lengths[chunk])
            places.append(address + flight.at[chunk])
        datatype = self._mpi.BYTE.Create_hindexed(sizes, places).Commit()
        request = isend([self._mpi.BOTTOM, 1, datatype], target, tag)
        datatype.Free()  # MPI keeps it until the message has left
        return request

    def free(self) -> None:
        """Nothing is under way any more."""
        for known in self._memory.values():
            for _, _, datatype in known.values():
                datatype.Free()
        self._memory = {}

"""Running a plan over MPI, version after version, straight out of and into mailbox slots.

One executor a relay, for one (communicator, plan); when either changes it is drained, closed and built anew. Nothing
here blocks: `progress` starts what can be started and returns. Memory for the next versions is there ahead, and some
receives from each host stand posted, so data does not wait. A host sends what its `outbox` says is next. A relay
forwards a chunk as soon as it is there, but acts on a version only when all its chunks are verified. Written by the
relay alone; must not import tensors. mpi4py objects are handed in."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.core.errors import PlanError
from ddrl.distribution.plans.plan import HEADER_BYTES, Plan
from ddrl.distribution.transport.coding import CodedAssembly, Coding, Encoder
from ddrl.distribution.transport.flights import Flight, Held, Inbox, Report, Terms, Traffic
from ddrl.distribution.transport.outbox import Outbox
from ddrl.distribution.transport.packing import Packing
from ddrl.distribution.transport.requests import Posted
from ddrl.distribution.transport.shards import Assembly, Checksum, fill_headers, write_headers

if TYPE_CHECKING:
    from mpi4py import MPI

WINDOW = 1 << 19  # bytes
MAX_ASYNC_FANOUT = 128  # hosts served by one; above, sends are synchronous
POSTED = 16  # receives that stand posted from each host: more only make MPI look through more


class Executor:
    """Runs `plan` on rank `comm.rank` of `comm` (host numbers are ranks).

    With a `coding` what travels is the coded form, in memory of its own; relays pass it on as it came."""

    def __init__(
        self,
        comm: MPI.Comm,
        plan: Plan,
        inbox: Inbox | None,
        checksum: Checksum,
        terms: Terms,
        coding: Coding | None = None,
    ) -> None:
        from mpi4py import MPI

        if comm.size != plan.hosts + 1:
            raise PlanError(
                f"a plan for {plan.hosts} hosts beside the root cannot run on {comm.size} relays: build it anew"
            )
        self.plan, self.traffic = plan, Traffic()
        self.epoch, self.versions_in_flight = terms.epoch, terms.versions_in_flight
        self.reports: list[Report] = []  # of this host, oldest first; the relay takes them away
        self._comm, self._mpi, self._inbox, self._checksum, self._tracing = comm, MPI, inbox, checksum, terms.trace
        self._host = comm.rank
        self._coding, self._variable = coding, coding is not None and not coding.codec.fixed
        edges = np.asarray(plan.bounds if coding is None else coding.edges, np.int64)
        self._edges: list[int] = edges.tolist()  # where chunks stand in what travels
        payload = edges[plan.first + plan.count] - edges[plan.first]  # at most, where sizes vary
        largest = int(payload.max(initial=0)) + HEADER_BYTES
        window = terms.window_bytes or max(largest, WINDOW)
        self._outbox = Outbox(window, max(largest, window // 4))
        self._source: list[int] = plan.source.tolist()
        self._target: list[int] = plan.target.tolist()
        self._first: list[int] = plan.first.tolist()
        self._count: list[int] = plan.count.tolist()
        self._mine: list[int] = plan.sent_by(self._host).tolist()
        # Where a host serves very many, a little to each would already be its whole turn in their sockets at once, and
        # acknowledgements of what it receives behind it.
        self._asks_all = len(np.unique(plan.target[self._mine])) > MAX_ASYNC_FANOUT
        self._incoming: list[int] = plan.sent_to(self._host).tolist()
        self._waiters: list[list[int]] = [[] for _ in range(plan.chunks)]  # of each chunk: places in `_mine`
        for place, message in enumerate(self._mine):
            for chunk in range(self._first[message], self._first[message] + self._count[message]):
                self._waiters[chunk].append(place)
        self._flights: dict[int, Flight] = {}
        self._ahead = 0  # versions opened and not yet over
        self._standing: dict[int, int] = {}  # receives posted, by source
        self._due: dict[int, deque[tuple[Flight, int]]] = {}  # receives to post, by source, in the plan's order
        self._requests: list[Any] = []
        # Beside `_requests`: (flight, message, bytes of a send that it ends, 0 for a receive).
        self._what: list[tuple[Flight, int, int]] = []
        self._packing = Packing(plan, self._edges, terms.versions_in_flight)
        self._next = 0
        if self._host and not self._incoming:
            raise PlanError(f"plan {plan.scheme} sends nothing to host {self._host}")

    def open(self) -> None:
        """Post the first receives. From here on requests stand, so the caller gives the executor to its guard first."""
        self._open_ahead()

    # -- for the relay

    @property
    def next_sequence(self) -> int:
        """Models started (root) or opened (others) so far."""
        return self._next

    @property
    def idle(self) -> bool:
        """Nothing is under way on this host: every version here is over, or was only opened ahead."""
        return all(
            flight.assembly is not None and flight.unreceived == len(self._incoming)
            for flight in self._flights.values()
        )

    def start(self, held: Held, base: tuple[int, Held] | None = None) -> int:
        """Root: begin to send a version; returns its sequence number. The version is released when its last byte has
        left.

        `base`: sequence and version that every receiver holds, for a codec that takes differences; None: a whole one.
        """
        sequence, self._next = self._next, self._next + 1
        data = held.data if self._coding is None else self._coding.take()
        headers = self._packing.headers(data)
        flight = Flight(sequence, data, headers, None, [], held=held, unsent=len(self._mine), done=True)
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "sequence": sequence,
            "version": held.version,
            "model_checksum": held.checksum,
            "time_ns": held.time_ns,
            "values": held.values,
        }
        if self._coding is None:
            write_headers(headers, held.data, self.plan.bounds, self._checksum, **fields)
        else:
            fill_headers(headers, self.plan.bounds, back=sequence - base[0] if base else 0, **fields)
            flight.encoder = Encoder(
                self._coding, data, headers, held, base[1].share() if base else None, self._checksum
            )
            if self._variable:
                flight.lengths, flight.at = flight.encoder.lengths, self._edges
        self._flights[sequence] = flight
        for place, message in enumerate(self._mine):
            self._outbox.add((sequence, place), self._target[message])
        self._issue()
        self._retire(flight)
        return sequence

    def progress(self) -> bool:
        """Move whatever can be moved, without waiting; True if anything moved."""
        moved = self._open_ahead()
        while self._requests:
            # The first call that finds nothing lets MPI work, the second one sees what came of it.
            indices = self._mpi.Request.Testsome(self._requests) or self._mpi.Request.Testsome(self._requests)
            if not indices:
                break
            self._complete(indices)
            moved = True
        return self._issue() or moved

    def close(self) -> None:
        """Withdraw the receives posted ahead and give all memory back; call it only when all versions started by the
        root have ended everywhere, or when all hosts have withdrawn together."""
        for request in self.posted().receives:
            if request:
                request.Cancel()
        self._mpi.Request.Waitall(self._requests)
        for flight in self._flights.values():
            if flight.encoder is not None:
                flight.encoder.release()
            elif flight.held is not None:
                flight.held.release()
            if flight.opened is not None:
                flight.opened.abandon()
        if self._coding is not None and self._coding.bases is not None:
            self._coding.bases.clear()
        self._packing.free()
        self._requests, self._what, self._flights = [], [], {}

    def posted(self) -> Posted:
        """Requests that stand."""
        receives = [request for request, what in zip(self._requests, self._what, strict=True) if not what[2]]
        sends = [request for request, what in zip(self._requests, self._what, strict=True) if what[2]]
        return Posted(receives, sends, [self, *self._flights.values()])

    # -- receiving

    def _open_ahead(self) -> bool:
        """Keep receives posted for as many versions as the root may have on their way."""
        if not self._host or self._inbox is None:
            return False
        opened_any = False
        while self._ahead < self.versions_in_flight:
            opened = self._inbox.open(urgent=not self._ahead)
            if opened is None:
                break
            sequence, self._next = self._next, self._next + 1
            data = opened.data if self._coding is None else self._coding.take()
            headers = self._packing.headers(data)
            flight = Flight(
                sequence,
                data,
                headers,
                None,
                [self._count[message] for message in self._mine],
                opened,
                unsent=len(self._mine),
                unreceived=len(self._incoming),
            )
            if self._coding is None:
                flight.assembly = Assembly(data, headers, self.plan.bounds, self.epoch, sequence, self._checksum)
            else:
                coded = CodedAssembly(self._coding, data, opened.data, headers, self.epoch, sequence, self._checksum)
                flight.assembly = coded
                if self._variable:
                    flight.lengths, flight.at = coded.lengths, coded.at
            self._flights[sequence] = flight
            self._ahead += 1
            for message in self._incoming:
                self._due.setdefault(self._source[message], deque()).append((flight, message))
            for source in self._due:
                for _ in range(POSTED - self._standing.get(source, 0)):
                    self._post(source)
            opened_any = True
        return opened_any

    def _post(self, source: int) -> None:
        """Post the next receive from `source`."""
        if self._due[source]:
            flight, message = self._due[source].popleft()
            tag = self._packing.tag(flight.sequence, message)
            self._requests.append(self._comm.Irecv(self._packing.memory(flight, message), source, tag))
            self._what.append((flight, message, 0))
            self._standing[source] = self._standing.get(source, 0) + 1

    def _complete(self, indices: list[int]) -> None:
        finished = [self._what[index] for index in indices]
        for index in sorted(indices, reverse=True):
            last_request, last_what = self._requests.pop(), self._what.pop()
            if index < len(self._requests):
                self._requests[index], self._what[index] = last_request, last_what
        for flight, message, sent in finished:
            if sent:
                self._outbox.taken(self._target[message], sent)
                self._sent(flight, message)
            else:
                source = self._source[message]
                self._standing[source] -= 1
                self._post(source)
                self._received(flight, message)
                self._retire(flight)

    def _received(self, flight: Flight, message: int) -> None:
        assembly = flight.assembly
        assert assembly is not None
        if isinstance(assembly, CodedAssembly):
            assembly.locate(self._first[message], self._count[message])
        self.traffic.bytes_received += self._packing.nbytes(flight, message)
        self.traffic.messages_received += 1
        self._note("received", flight, message, self._source[message])
        for chunk in range(self._first[message], self._first[message] + self._count[message]):
            for place in self._waiters[chunk]:  # first pass on, then verify
                flight.missing[place] -= 1
                if not flight.missing[place]:
                    self._outbox.add((flight.sequence, place), self._target[self._mine[place]])
        self._issue()
        for chunk in range(self._first[message], self._first[message] + self._count[message]):
            healthy = not assembly.problem
            assembly.arrived(chunk)
            if healthy and assembly.problem:
                assembly.problem += f", as received from host {self._source[message]}"
        flight.unreceived -= 1
        if not flight.unreceived:
            self._conclude(flight, assembly)

    def _conclude(self, flight: Flight, assembly: Assembly) -> None:
        """All chunks are here: seal the version, or refuse it."""
        header, opened = flight.headers[0], flight.opened
        assert opened is not None
        flight.done = True
        self._ahead -= 1
        seconds, decoded, bases = 0.0, 0, self._coding.bases if self._coding is not None else None
        if not assembly.problem:
            decoded = assembly.model_checksum()
        if assembly.problem:
            self.traffic.refused += 1
        else:
            hold = bases is not None or (self._coding is None and flight.unsent > 0)
            flight.held = opened.seal(assembly.version, header["values"].copy(), decoded, int(header["time_ns"]), hold)
            flight.opened = opened if hold and flight.held is None else None
            self.traffic.sealed += 1
            seconds = max(0.0, (time.time_ns() - int(header["time_ns"])) * 1e-9)
        if bases is not None and isinstance(assembly, CodedAssembly):
            if not assembly.problem:
                bases.keep(
                    flight.sequence, opened.data, flight.held.release if flight.held is not None else opened.abandon
                )
                flight.held = flight.opened = None
            bases.ended(flight.sequence, assembly.back)
        self.reports.append(Report(flight.sequence, assembly.version, assembly.problem, seconds))
        self._note("refused" if assembly.problem else "sealed", flight, 0, self._host)

    # -- sending

    def _issue(self) -> bool:
        """Hand ready messages to MPI while they have room; True if any went."""
        issued = False
        while (entry := self._outbox.take()) is not None:
            sequence, place = entry
            flight, message = self._flights[sequence], self._mine[place]
            target = self._target[message]
            if flight.encoder is not None:
                flight.encoder.code(self._first[message], self._count[message])
            nbytes = self._packing.nbytes(flight, message)
            asks = self._asks_all or self._outbox.asks(target, nbytes)
            request = self._packing.send(self._comm.Issend if asks else self._comm.Isend, flight, message, target)
            self.traffic.bytes_sent += nbytes
            self.traffic.messages_sent += 1
            self._note("send", flight, message, target)
            if asks or not request.Test():
                self._requests.append(request)
                self._what.append((flight, message, self._outbox.sent(target, nbytes)))
            else:
                self._outbox.copied(target, nbytes)
                self._sent(flight, message)
            issued = True
        return issued

    def _sent(self, flight: Flight, message: int) -> None:
        flight.unsent -= 1
        self._note("sent", flight, message, self._target[message])
        self._retire(flight)

    def _retire(self, flight: Flight) -> None:
        """Give a version's memory back once it has ended here and its last byte has left."""
        if not flight.done or flight.unsent or self._flights.pop(flight.sequence, None) is None:
            return
        if flight.encoder is not None:
            flight.encoder.release()
        elif flight.held is not None:
            flight.held.release()
        elif flight.opened is not None:
            flight.opened.abandon()
        if self._coding is not None:
            self._coding.give(flight.data)

    def _note(self, what: str, flight: Flight, message: int, peer: int) -> None:
        if self._tracing:
            self.traffic.trace.append((time.perf_counter_ns(), what, flight.sequence, message, peer))

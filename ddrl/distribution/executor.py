"""Running a plan over MPI, version after version, straight out of and into mailbox slots.

One executor a relay, for one (communicator, plan); when either changes it is drained, closed and built anew. Messages
move in the kernel (`Transfers`): it posts some receives from each host ahead, passes a chunk on as soon as it is there,
and sends what its outbox says is next. Here versions begin and end: memory for the next ones is there ahead, and a
version is acted on only when all its chunks are verified. Nothing here blocks but `wait`. Written by the relay alone;
must not import tensors. mpi4py objects are handed in.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl._kernel import Transfers
from ddrl.core.errors import PlanError
from ddrl.distribution.chunks import (
    Assembly,
    Bytes,
    CodedAssembly,
    Coding,
    Encoder,
    Headers,
    fill_headers,
    write_headers,
)
from ddrl.distribution.membership import Confirm
from ddrl.distribution.plan import Plan
from ddrl.distribution.requests import Posted

if TYPE_CHECKING:
    from mpi4py import MPI


# -- flights -----------------------------------------------------------------------------------------------------------
# What stands between the executor, the memory it moves and the relay: on which terms, versions under way, how they
# end, and what has gone over the wire.
#
# Written by the executor alone; `Held`, `Opened` and `Inbox` are what it asks of this host's memory (`inbox` is the
# real one).


class Held(Protocol):
    """A sealed version kept from being overwritten while it is sent on."""

    version: int
    data: Bytes
    checksum: int
    time_ns: int
    values: NDArray[np.float64]

    def share(self) -> Held:
        """The same, to be released once more."""
        ...

    def release(self) -> None:
        """Let it be overwritten, unless others share it."""
        ...


class Opened(Protocol):
    """Memory for one version that is still coming."""

    data: Bytes

    def seal(self, version: int, values: NDArray[np.float64], checksum: int, time_ns: int, hold: bool) -> Held | None:
        """Hand the version to the readers of this host; `hold` keeps it from being overwritten until released."""
        ...

    def abandon(self) -> None:
        """Give the memory back unread."""
        ...


class Inbox(Protocol):
    """Where versions land on this host; `inbox.MailboxInbox` is the real one."""

    def open(self, urgent: bool) -> Opened | None:
        """Memory for one more version, or None while there is none to spare; `urgent`: take it from the slowest reader
        if need be."""
        ...


@dataclass
class Flight:
    """One version on its way through this host."""

    sequence: int
    data: Bytes  # what travels: the slot itself, or the coded form
    headers: Headers
    assembly: Assembly | None  # None at the root, which holds everything
    opened: Opened | None = None
    held: Held | None = None
    unsent: bool = False  # some of its messages have yet to leave
    unreceived: int = 0
    done: bool = False  # sealed or refused
    encoder: Encoder | None = None  # root, with a codec
    lengths: list[int] | None = None  # of the coded chunks in `data`, where they differ from version to version
    at: list[int] | None = None  # and where they begin


@dataclass
class Traffic:
    """Counters of one executor; bytes include headers."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    sealed: int = 0
    refused: int = 0
    trace: list[tuple[int, str, int, int, int]] = field(
        default_factory=list[tuple[int, str, int, int, int]]
    )  # (ns, what, sequence, message, peer)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.messages_sent + other.messages_sent,
            self.messages_received + other.messages_received,
            self.sealed + other.sealed,
            self.refused + other.refused,
        )


# -- packing -----------------------------------------------------------------------------------------------------------
# How the messages of one plan stand in memory.
#
# Headers and payload of a message are gathered from two places (or, where sizes vary, from one for each chunk) by a
# datatype, so nothing is copied. Used by `executor` alone.


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


# -- executor ----------------------------------------------------------------------------------------------------------

WINDOW = 1 << 19  # most bytes handed to MPI and not yet taken, where links were not measured
POSTED = 8  # receives that stand posted from each host: more only make MPI look through more
# Of MPI, made by the kernel.
CALLS = ("MPI_Isend", "MPI_Issend", "MPI_Irecv", "MPI_Testsome", "MPI_Grequest_start", "MPI_Grequest_complete")
NOTED = ("send", "sent", "received")


class Executor:
    """Runs `plan` on rank `comm.rank` of `comm` (host numbers are ranks).

    `inbox`: where versions land; None at the root. `epoch` numbers plans. `versions_in_flight`: models that may travel
    at once. `window_bytes`: most bytes handed to MPI and not yet taken, a quarter of it to one host; a message that is
    larger goes alone. `trace` records every send and arrival. With a `coding` what travels is the coded form, in memory
    of its own; relays pass it on as it came."""

    def __init__(
        self,
        comm: MPI.Comm,
        plan: Plan,
        inbox: Inbox | None,
        *,
        epoch: int = 0,
        versions_in_flight: int = 1,
        window_bytes: int = WINDOW,
        trace: bool = False,
        coding: Coding | None = None,
    ) -> None:
        from mpi4py import MPI

        if comm.size != plan.hosts + 1:
            raise PlanError(
                f"a plan for {plan.hosts} hosts beside the root cannot run on {comm.size} relays: build it anew"
            )
        self.plan = plan
        self.epoch = epoch
        self.versions_in_flight = versions_in_flight
        self.reports: list[Confirm] = []  # how versions ended on this host, oldest first; the relay takes them away
        self._mpi = MPI
        self._inbox = inbox
        self._tracing = trace
        self._host = comm.rank
        self._coding = coding
        self._variable = coding is not None and not coding.codec.fixed
        edges = np.asarray(plan.bounds if coding is None else coding.edges, np.int64)
        self._edges: list[int] = edges.tolist()  # where chunks stand in what travels
        self._packing = Packing(plan, self._edges)
        largest = max([*self._packing.sizes, 1])
        self._source: list[int] = plan.source.tolist()
        self._first: list[int] = plan.first.tolist()
        self._count: list[int] = plan.count.tolist()
        self._mine: list[int] = plan.sent_by(self._host).tolist()
        self._incoming: list[int] = plan.sent_to(self._host).tolist()
        if self._host and not self._incoming:
            raise PlanError(f"plan {plan.scheme} sends nothing to host {self._host}")
        library = ctypes.CDLL(MPI.__file__)  # finds what mpi4py is linked with
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in CALLS]
        self._transfers = Transfers.make(
            addresses,
            MPI._sizeof(MPI.Request),  # pyright: ignore[reportPrivateUsage] (a handle's)
            comm.handle,
            self._source,
            plan.target.tolist(),
            self._first,
            self._count,
            self._mine,
            self._incoming,
            plan.chunks,
            self._packing.sizes,
            window_bytes,
            max(largest, window_bytes // 4),
            2 * versions_in_flight,
            POSTED,
            trace,
        )
        self._flights: dict[int, Flight] = {}
        self._ahead = 0  # versions opened and not yet over
        self._next = 0
        self._sealed = self._refused = 0
        self._trace: list[tuple[int, str, int, int, int]] = []
        self._posted: Posted | None = None

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

    @property
    def traffic(self) -> Traffic:
        """What has gone over the wire so far."""
        sent, received, messages_sent, messages_received = self._transfers.totals
        self._take_notes()
        return Traffic(sent, received, messages_sent, messages_received, self._sealed, self._refused, self._trace)

    def start(self, held: Held, base: tuple[int, Held] | None = None) -> int:
        """Root: begin to send a version; returns its sequence number. The version is released when its last byte has
        left.

        `base`: sequence and version that every receiver holds, for a codec that takes differences; None: a whole one.
        """
        sequence = self._next
        self._next = self._next + 1
        data = held.data if self._coding is None else self._coding.take()
        headers = self._packing.headers(data)
        flight = Flight(sequence, data, headers, None, held=held, unsent=bool(self._mine), done=True)
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "sequence": sequence,
            "version": held.version,
            "model_checksum": held.checksum,
            "time_ns": held.time_ns,
            "values": held.values,
        }
        prepare = None
        if self._coding is None:
            write_headers(headers, held.data, self.plan.bounds, **fields)
        else:
            fill_headers(headers, back=sequence - base[0] if base else 0, **fields)
            flight.encoder = Encoder(self._coding, data, headers, held, base[1].share() if base else None)
            if self._variable:
                flight.lengths = flight.encoder.lengths
                flight.at = self._edges
            prepare = self._prepare(flight)
        self._flights[sequence] = flight
        self._transfers.open(sequence, self._packing.handles(flight, self._mine), [], True, prepare)
        self._retire(flight)
        return sequence

    def progress(self) -> bool:
        """Move whatever can be moved, without waiting; True if anything moved."""
        opened = self._open_ahead()
        moved, arrivals, sent = self._transfers.move()
        for sequence in sent:
            self._flights[sequence].unsent = False
            self._retire(self._flights[sequence])
        received: dict[int, list[int]] = {}
        for sequence, message in arrivals:
            received.setdefault(sequence, []).append(message)
        for sequence, messages in received.items():
            flight = self._flights[sequence]
            self._received(flight, messages)
            self._retire(flight)
        if arrivals:  # what has ended makes room for the next, which may come before this is called again
            self._open_ahead()
        return moved or opened or bool(arrivals)

    def wait(self, bell: int, descriptors: Sequence[int], seconds: float) -> bool:
        """Sleep and move in turn, until there is something to act on, or the descriptor `bell` can be read; whether MPI
        ended a sleep by one of `descriptors`."""
        return self._transfers.wait(bell, descriptors, seconds)

    def close(self) -> None:
        """Withdraw the receives posted ahead and give all memory back; call it only when all versions started by the
        root have ended everywhere, or when all hosts have withdrawn together."""
        posted = self.posted()
        for request in posted.receives:
            if request:
                request.Cancel()
        self._mpi.Request.Waitall([*posted.receives, *posted.sends])
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
        self._flights = {}

    def posted(self) -> Posted:
        """Requests that stand; the kernel moves nothing any more."""
        if self._posted is None:
            receives, sends = (
                [self._mpi.Request.fromhandle(handle) for handle in self._transfers.give_up(receives)]
                for receives in (True, False)
            )
            self._posted = Posted(receives, sends, [self, *self._flights.values()])
        return self._posted

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
            sequence = self._next
            self._next = self._next + 1
            data = opened.data if self._coding is None else self._coding.take()
            headers = self._packing.headers(data)
            flight = Flight(
                sequence, data, headers, None, opened, unsent=bool(self._mine), unreceived=len(self._incoming)
            )
            prepare = arrived = None
            if self._coding is None:
                flight.assembly = Assembly(data, headers, self.plan.bounds, self.epoch, sequence)
            else:
                coded = CodedAssembly(self._coding, data, opened.data, headers, self.epoch, sequence)
                flight.assembly = coded
                if self._variable:
                    flight.lengths = coded.lengths
                    flight.at = coded.at
                    prepare = self._prepare(flight)
                    arrived = self._locate(flight, coded)
            self._flights[sequence] = flight
            self._ahead += 1
            handles = self._packing.handles
            self._transfers.open(
                sequence, handles(flight, self._mine), handles(flight, self._incoming), False, prepare, arrived
            )
            opened_any = True
        return opened_any

    def _locate(self, flight: Flight, assembly: CodedAssembly) -> Callable[[int], int]:
        """What the kernel calls when a message of varying size has arrived: its bytes."""

        def arrived(message: int) -> int:
            assembly.locate(self._first[message], self._count[message])
            return self._packing.nbytes(flight, message)

        return arrived

    def _received(self, flight: Flight, messages: Sequence[int]) -> None:
        """Messages have arrived, and have been passed on: verify them."""
        assembly = flight.assembly
        assert assembly is not None
        chunks = [
            (message, chunk)
            for message in messages
            for chunk in range(self._first[message], self._first[message] + self._count[message])
        ]
        if not assembly.all_arrived([chunk for _, chunk in chunks]):
            for message, chunk in chunks:
                healthy = not assembly.problem
                assembly.arrived(chunk)
                if healthy and assembly.problem:
                    assembly.problem += f", as received from host {self._source[message]}"
        flight.unreceived -= len(messages)
        if not flight.unreceived:
            self._conclude(flight, assembly)

    def _conclude(self, flight: Flight, assembly: Assembly) -> None:
        """All chunks are here: seal the version, or refuse it."""
        header = flight.headers.model[0]
        opened = flight.opened
        assert opened is not None
        flight.done = True
        self._ahead -= 1
        seconds = 0.0
        decoded = 0
        bases = self._coding.bases if self._coding is not None else None
        if not assembly.problem:
            decoded = assembly.model_checksum()
        if assembly.problem:
            self._refused += 1
        else:
            hold = bases is not None or (self._coding is None and flight.unsent)
            flight.held = opened.seal(assembly.version, header["values"].copy(), decoded, int(header["time_ns"]), hold)
            flight.opened = opened if hold and flight.held is None else None
            self._sealed += 1
            seconds = max(0.0, (time.time_ns() - int(header["time_ns"])) * 1e-9)
        if bases is not None and not assembly.problem:
            bases.keep(flight.sequence, opened.data, flight.held.release if flight.held is not None else opened.abandon)
            flight.held = None
            flight.opened = None
        self.reports.append(Confirm(self.epoch, flight.sequence, assembly.version, assembly.problem, seconds))
        self._note("refused" if assembly.problem else "sealed", flight)

    # -- sending

    def _prepare(self, flight: Flight) -> Callable[[int], tuple[int, int]]:
        """What the kernel calls before it sends a message of a coded version: its datatype, and its bytes."""

        def prepare(message: int) -> tuple[int, int]:
            if flight.encoder is not None:
                flight.encoder.code(self._first[message], self._count[message])
            return self._packing.datatype(flight, message).handle, self._packing.nbytes(flight, message)

        return prepare

    def _retire(self, flight: Flight) -> None:
        """Give a version's memory back once it has ended here and its last byte has left."""
        if not flight.done or flight.unsent or self._flights.pop(flight.sequence, None) is None:
            return
        self._transfers.forget(flight.sequence)
        if flight.encoder is not None:
            flight.encoder.release()
        elif flight.held is not None:
            flight.held.release()
        elif flight.opened is not None:
            flight.opened.abandon()
        if self._coding is not None:
            self._coding.give(flight.data)

    def _note(self, what: str, flight: Flight) -> None:
        if self._tracing:
            self._take_notes()
            self._trace.append((time.perf_counter_ns(), what, flight.sequence, 0, self._host))

    def _take_notes(self) -> None:
        """What the kernel has noted."""
        if self._tracing:
            for moment, what, sequence, message, peer in self._transfers.take_notes():
                self._trace.append((moment, NOTED[what], sequence, message, peer))

"""Running a plan over MPI, version after version, straight out of and into mailbox slots.

One executor per relay for one (communicator, plan); when either changes it is drained, closed and built again. Messages
move in the kernel (`Transfers`): it keeps some receives from each host posted, passes a chunk on as soon as it is
there, and sends what the plan says is next. Here versions begin and end: memory for the next ones is opened ahead, and
a version is used only when all its chunks are verified. Nothing here blocks but `wait`. Used by the relay alone;
imports no torch. mpi4py objects are handed in.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ddrl._kernel import Transfers, seal_chunks
from ddrl.channels.mailbox import Mailbox, MailboxReader, MailboxSlot, Pin
from ddrl.core.errors import ChannelError, PlanError
from ddrl.core.specs import Bytes
from ddrl.distribution.chunks import Assembly, CodedAssembly, Coding, Encoder, Headers
from ddrl.distribution.membership import Confirm
from ddrl.distribution.plan import Plan
from ddrl.distribution.requests import Posted

if TYPE_CHECKING:
    from mpi4py import MPI


UNKNOWN = 0  # version of a slot until its first chunk has arrived


# -- the mailbox of a host as the executor uses it ---------------------------------------------------------------------


class HeldVersion:
    """A pinned version. It is not overwritten until the last `release`, which frees its reader for another one."""

    def __init__(self, pin: Pin, reader: MailboxReader, free: list[MailboxReader]) -> None:
        self.version = pin.version
        self.checksum = pin.checksum
        self.time_ns = pin.time_ns
        self.values = np.asarray(pin.values, np.float64)
        self.data: Bytes = pin.data
        self._reader = reader
        self._free = free
        self._shares = 1

    def share(self) -> HeldVersion:
        """The same, to be released one more time."""
        self._shares += 1
        return self

    def release(self) -> None:
        """Let the slot be overwritten, unless others share it."""
        self._shares -= 1
        if not self._shares:
            self._reader.unpin()
            self._free.append(self._reader)


class Inbox:
    """The mailbox of a host, in which versions land. The relay is its only writer, but for the trainer's host, where it
    only reads. `readers`: this relay's own, one more than the versions in flight, so that every version under way can
    be pinned."""

    def __init__(self, mailbox: Mailbox, readers: Sequence[MailboxReader]) -> None:
        self.mailbox = mailbox
        self._free = list(readers)

    def open(self, urgent: bool) -> MailboxSlot | None:
        """A slot to receive into, None while none is free; `urgent`: take one from a reader that pins an old
        version."""
        return self.mailbox.begin(UNKNOWN) if urgent else self.mailbox.try_begin(UNKNOWN)

    def seal(
        self, slot: MailboxSlot, version: int, values: Sequence[float], checksum: int, time_ns: int, hold: bool
    ) -> HeldVersion | None:
        """Hand a received version to the readers, unless a newer one is there already. Returns it pinned where `hold`,
        if it was handed over; where not, the slot stays open for those who still send from it."""
        if version <= self.mailbox.newest:
            if not hold:
                slot.abandon()
            return None
        slot.version = version
        slot.seal(values, checksum, time_ns)
        return self.hold() if hold else None

    @property
    def can_hold(self) -> bool:
        """Whether one more version can be pinned."""
        return bool(self._free)

    def hold(self) -> HeldVersion:
        """Pin the newest version."""
        if not self._free:
            raise ChannelError(
                "the relay has no free reader of the mailbox left: give it one more than cluster.versions_in_flight"
            )
        reader = self._free.pop()
        pin = reader.pin()
        if pin is None:
            self._free.append(reader)
            raise ChannelError("the mailbox holds no version yet: nothing to pin")
        return HeldVersion(pin, reader, self._free)


# -- versions under way ------------------------------------------------------------------------------------------------


@dataclass
class Flight:
    """One version on its way through this host."""

    sequence: int
    data: Bytes  # what is sent: the slot itself, or the coded form
    headers: Headers
    unsent: bool  # some of its messages have yet to leave
    unreceived: int = 0  # messages
    ended: bool = False  # sealed or refused; at the root from the start
    opened: MailboxSlot | None = None  # where it lands
    assembly: Assembly | None = None  # None at the root, which has everything
    encoder: Encoder | None = None  # root, with a codec
    varying: Encoder | CodedAssembly | None = None  # knows places and lengths of coded chunks of varying size
    let_go: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])  # once nothing needs it


Note = tuple[int, str, int, int, int]  # of a trace: ns, what, sequence, message, peer


@dataclass
class Traffic:
    """Counters of executors; bytes include headers."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    sealed: int = 0
    refused: int = 0
    trace: list[Note] = field(default_factory=list[Note])

    def __add__(self, other: Traffic) -> Traffic:
        counted = [item.name for item in fields(self) if item.name != "trace"]
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in counted))


class Packing:
    """How the messages of one plan lie in memory: a datatype gathers headers and payload from two places (where sizes
    vary, from one for each chunk), so nothing is copied.

    `edges` [K + 1]: where chunks are in what is sent. `sizes`: bytes of each message, headers included; the most where
    sizes vary."""

    def __init__(self, plan: Plan, edges: list[int]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._edges = edges
        self._chunks = plan.chunks
        _, _, self.first, self.count = plan.columns()
        self.sizes = [
            Headers.span(first, count)[1] + edges[first + count] - edges[first]
            for first, count in zip(self.first, self.count, strict=True)
        ]
        self._known: dict[tuple[int, int, int], MPI.Datatype] = {}  # by slot, first chunk and number of chunks
        self._varying: MPI.Datatype | None = None  # of the last message of a size of its own
        self._headers: dict[int, Headers] = {}  # by the address of the model's slot

    def headers(self, data: Bytes) -> Headers:
        """The headers of the model in `data`."""
        return self._headers.setdefault(data.ctypes.data, Headers(self._chunks))

    def nbytes(self, flight: Flight, message: int) -> int:
        """Bytes of a message, headers included; known once its chunks are encoded or have arrived."""
        if flight.varying is None:
            return self.sizes[message]
        first = self.first[message]
        count = self.count[message]
        return Headers.span(first, count)[1] + sum(flight.varying.lengths[first : first + count])

    def handles(self, flight: Flight, messages: Sequence[int]) -> list[int]:
        """MPI's handles of the datatypes of messages, as long as they can be."""
        address = flight.data.ctypes.data
        return [self._whole(flight, address, self.first[one], self.count[one]).handle for one in messages]

    def datatype(self, flight: Flight, message: int) -> MPI.Datatype:
        """Of a message about to be sent; valid until the next one is asked for. Where sizes vary, headers and chunks
        are sent one behind the other, from wherever they are."""
        first = self.first[message]
        stop = first + self.count[message]
        address = flight.data.ctypes.data
        if flight.varying is None:
            return self._whole(flight, address, first, stop - first)
        begin, nbytes = Headers.span(first, stop - first)
        sizes = [nbytes, *flight.varying.lengths[first:stop]]
        places = [flight.headers.memory.ctypes.data + begin, *(address + at for at in flight.varying.at[first:stop])]
        self._free_varying()
        made = self._varying = self._mpi.BYTE.Create_hindexed(sizes, places).Commit()
        return made

    def _whole(self, flight: Flight, address: int, first: int, count: int) -> MPI.Datatype:
        found = self._known.get((address, first, count))
        if found is None:
            begin, nbytes = Headers.span(first, count)
            sizes = [nbytes, self._edges[first + count] - self._edges[first]]
            places = [flight.headers.memory.ctypes.data + begin, address + self._edges[first]]
            found = self._mpi.BYTE.Create_hindexed(sizes, places).Commit()
            self._known[address, first, count] = found
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
POSTED = 8  # receives that are posted from each host: more only make MPI search longer
# Functions of MPI that the kernel calls.
CALLS = ("MPI_Isend", "MPI_Issend", "MPI_Irecv", "MPI_Testsome", "MPI_Grequest_start", "MPI_Grequest_complete")
NOTED = ("send", "sent", "received")


def share(window_bytes: int, plan: Plan, host: int) -> int:
    """Of the bytes that `host` may have under way, the most to one other: an equal part each where it sends to few, so
    that a link does not run dry while both processes wait for a processor; a quarter where it sends to many, so that a
    slow one delays only its own messages."""
    receivers = np.unique(plan.target[plan.sent_by(host)])
    return window_bytes // min(4, max(1, len(receivers)))


class Executor:
    """Runs `plan` on rank `comm.rank` of `comm` (host numbers are ranks).

    `inbox`: where versions land; None at the root. `epoch` numbers plans. `versions_in_flight`: models that may travel
    at once. `window_bytes`: most bytes handed to MPI and not yet taken, a `share` of it to one host; a message that is
    larger goes alone. `trace` records every send and arrival. With a `coding` what is sent is the coded form, in memory
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
                f"a plan for {plan.hosts} hosts beside the root cannot run on {comm.size} relays: build another one"
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
        self._packing = Packing(plan, plan.bounds.tolist() if coding is None else coding.edges)
        self._source, targets, _, _ = plan.columns()
        self._outgoing: list[int] = plan.sent_by(self._host).tolist()
        self._incoming: list[int] = plan.sent_to(self._host).tolist()
        if self._host and not self._incoming:
            raise PlanError(f"plan {plan.scheme} sends nothing to host {self._host}")
        library = ctypes.CDLL(MPI.__file__)  # finds what mpi4py is linked with
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in CALLS]
        self._transfers = Transfers.make(
            addresses,
            MPI._sizeof(MPI.Request),  # pyright: ignore[reportPrivateUsage] (of a handle)
            comm.handle,
            self._source,
            targets,
            self._packing.first,
            self._packing.count,
            self._outgoing,
            self._incoming,
            plan.chunks,
            self._packing.sizes,
            window_bytes,
            max([share(window_bytes, plan, self._host), *self._packing.sizes]),
            2 * versions_in_flight,
            POSTED,
            trace,
        )
        self._flights: dict[int, Flight] = {}
        self._ahead = 0  # versions opened that have not ended
        self._next = 0
        self._sealed = 0
        self._refused = 0
        self._trace: list[Note] = []
        self._posted: Posted | None = None

    def open(self) -> None:
        """Post the first receives. From here on there are requests, so the caller gives the executor to its guard
        first."""
        self._open_ahead()

    # -- for the relay

    @property
    def next_sequence(self) -> int:
        """Models started (root) or opened (others) so far."""
        return self._next

    @property
    def idle(self) -> bool:
        """Nothing is under way on this host: every version here has ended, or was only opened ahead."""
        return all(
            flight.assembly is not None and flight.unreceived == len(self._incoming)
            for flight in self._flights.values()
        )

    @property
    def traffic(self) -> Traffic:
        """What has been sent and received so far."""
        sent, received, messages_sent, messages_received = self._transfers.totals
        self._take_notes()
        return Traffic(sent, received, messages_sent, messages_received, self._sealed, self._refused, self._trace)

    def start(self, held: HeldVersion, base: tuple[int, HeldVersion] | None = None) -> int:
        """Root: begin to send a version; returns its sequence number. The version is released when its last byte has
        left.

        `base`: sequence and version that every receiver holds, for a codec that takes differences; None: a whole one.
        """
        flight = self._begin(held.data)
        flight.ended = True
        flight.let_go.append(held.release)
        flight.headers.fill(
            epoch=self.epoch,
            sequence=flight.sequence,
            version=held.version,
            model_checksum=held.checksum,
            time_ns=held.time_ns,
            values=held.values,
            back=flight.sequence - base[0] if base else 0,
        )
        if self._coding is None:
            seal_chunks(flight.headers.memory, held.data, self.plan.bounds)
        else:
            shared = base[1].share() if base else None
            if shared is not None:
                flight.let_go.append(shared.release)
            against = None if shared is None else shared.data
            flight.encoder = Encoder(self._coding, flight.data, flight.headers, held.data, against)
            flight.varying = None if self._coding.codec.fixed else flight.encoder
        self._transfer(flight)
        self._retire(flight)
        return flight.sequence

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
        if arrivals:  # what has ended makes room for the next, which may arrive before this is called again
            self._open_ahead()
        return moved or opened or bool(arrivals)

    def wait(self, bell: int, descriptors: Sequence[int], seconds: float) -> bool:
        """Sleep and move in turn, at most `seconds`, until Python must act or the descriptor `bell` can be read;
        whether MPI ended a sleep by one of `descriptors`."""
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
            for let_go in flight.let_go:
                let_go()
        if self._coding is not None and self._coding.bases is not None:
            self._coding.bases.clear()
        self._packing.free()
        self._flights = {}

    def posted(self) -> Posted:
        """Requests that have not ended; the kernel moves nothing any more."""
        if self._posted is None:
            receives, sends = (
                [self._mpi.Request.fromhandle(handle) for handle in self._transfers.give_up(receives)]
                for receives in (True, False)
            )
            self._posted = Posted(receives, sends, [self, *self._flights.values()])
        return self._posted

    # -- versions

    def _begin(self, data: Bytes) -> Flight:
        """The next version, in the slot `data`."""
        wire = data if self._coding is None else self._coding.take()
        flight = Flight(self._next, wire, self._packing.headers(wire), unsent=bool(self._outgoing))
        self._flights[flight.sequence] = flight
        self._next += 1
        return flight

    def _transfer(self, flight: Flight) -> None:
        """From now on the kernel moves its messages."""
        coded = flight.encoder or flight.varying
        varying = flight.varying
        self._transfers.open(
            flight.sequence,
            self._packing.handles(flight, self._outgoing),
            self._packing.handles(flight, self._incoming),
            not self._host,
            None if coded is None else partial(self._prepare, flight),
            partial(self._locate, flight, varying) if isinstance(varying, CodedAssembly) else None,
        )

    def _prepare(self, flight: Flight, message: int) -> tuple[int, int]:
        """A message of a coded version is about to be sent: its datatype, and its bytes."""
        if flight.encoder is not None:
            flight.encoder.code(self._packing.first[message], self._packing.count[message])
        return self._packing.datatype(flight, message).handle, self._packing.nbytes(flight, message)

    def _locate(self, flight: Flight, assembly: CodedAssembly, message: int) -> int:
        """A message of varying size has arrived: its bytes."""
        assembly.locate(self._packing.first[message], self._packing.count[message])
        return self._packing.nbytes(flight, message)

    def _open_ahead(self) -> bool:
        """Keep receives posted for as many versions as the root may have on their way."""
        if self._inbox is None:
            return False
        before = self._next
        while self._ahead < self.versions_in_flight:
            opened = self._inbox.open(urgent=not self._ahead)
            if opened is None:
                break
            flight = self._begin(opened.data)
            flight.opened = opened
            flight.let_go.append(opened.abandon)
            flight.unreceived = len(self._incoming)
            identity = (self.epoch, flight.sequence)
            if self._coding is None:
                flight.assembly = Assembly(flight.data, flight.headers, self.plan.bounds, *identity)
            else:
                coded = CodedAssembly(self._coding, flight.data, opened.data, flight.headers, *identity)
                flight.assembly = coded
                flight.varying = None if self._coding.codec.fixed else coded
            self._ahead += 1
            self._transfer(flight)
        return self._next > before

    def _received(self, flight: Flight, messages: Sequence[int]) -> None:
        """Messages have arrived, and have been passed on: verify them."""
        assembly = flight.assembly
        assert assembly is not None
        first = self._packing.first
        count = self._packing.count
        senders = {
            chunk: self._source[message]
            for message in messages
            for chunk in range(first[message], first[message] + count[message])
        }
        singly = list(senders)
        if assembly.all_arrived([chunk for chunk in senders if chunk]):
            singly = [0] if 0 in senders else []
        for chunk in singly:
            healthy = not assembly.problem
            assembly.arrived(chunk)
            if healthy and assembly.problem:
                assembly.problem += f", as received from host {senders[chunk]}"
        flight.unreceived -= len(messages)
        if not flight.unreceived:
            self._end(flight, assembly)

    def _end(self, flight: Flight, assembly: Assembly) -> None:
        """All chunks are here: seal the version, or refuse it."""
        flight.ended = True
        self._ahead -= 1
        seconds = 0.0
        checksum = 0 if assembly.problem else assembly.model_checksum()
        if assembly.problem:
            self._refused += 1
        else:
            self._sealed += 1
            seconds = self._seal(flight, assembly.version, checksum)
        self.reports.append(Confirm(self.epoch, flight.sequence, assembly.version, assembly.problem, seconds))
        if self._tracing:
            self._take_notes()
            what = "refused" if assembly.problem else "sealed"
            self._trace.append((time.perf_counter_ns(), what, flight.sequence, 0, self._host))

    def _seal(self, flight: Flight, version: int, checksum: int) -> float:
        """Hand a version to the readers of this host, and hold it while it is sent on or may become a base; seconds
        since the trainer published it."""
        opened = flight.opened
        assert opened is not None
        assert self._inbox is not None
        header = flight.headers.model[0]
        bases = None if self._coding is None else self._coding.bases
        hold = bases is not None or (self._coding is None and flight.unsent)
        published_ns = int(header["time_ns"])
        held = self._inbox.seal(opened, version, header["values"].tolist(), checksum, published_ns, hold)
        flight.let_go.clear()
        if hold:
            flight.let_go.append(opened.abandon if held is None else held.release)
        if bases is not None:
            bases.keep(flight.sequence, opened.data, flight.let_go.pop())
        return max(0.0, (time.time_ns() - published_ns) * 1e-9)

    def _retire(self, flight: Flight) -> None:
        """Give a version's memory back once it has ended here and its last byte has left."""
        if not flight.ended or flight.unsent or self._flights.pop(flight.sequence, None) is None:
            return
        self._transfers.forget(flight.sequence)
        for let_go in flight.let_go:
            let_go()
        if self._coding is not None:
            self._coding.give(flight.data)

    def _take_notes(self) -> None:
        """What the kernel has noted."""
        if self._tracing:
            for moment, what, sequence, message, peer in self._transfers.take_notes():
                self._trace.append((moment, NOTED[what], sequence, message, peer))

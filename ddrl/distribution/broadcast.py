"""A model from one rank to every process of every host, for any program that MPI has started, without `ddrl.run`.

    feed = join(comm, tensors)                     every rank; what the root gives says which tensors a version has
    feed.publish(tensors, version)                 the root: copies them into its host's memory, and goes on
    feed.load(tensors, newer_than=version)         anyone: waits for a newer version and copies it
    with feed.pin() as pinned: pinned.arrays       anyone: the newest version in place; it stays while it is pinned
    feed.close()                                   every rank; or `with join(...) as feed`

On each host one rank (the root, elsewhere the first) relays in a thread of its own, the only writer of that host's
mailbox; on its own host the root writes. All others of a host read it in shared memory, so whoever comes late finds the
newest version there, also a process that MPI does not know (`subscribe`). Plans, chunks with checksums and the bound of
versions in flight are those of the relays of a run, of which this is a composition. Readers pin firmly: a slot that one
of them reads is never written, and where their pins hold every spare slot, the next version waits. What ranks say to
each other is checked by its type; nothing is unpickled. Imports no torch; its tensors are known by their methods."""

from __future__ import annotations

import atexit
import contextlib
import re
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec
import numpy as np

from ddrl.channels.board import Blob, Board, Command, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox, MailboxReader, MailboxSlot
from ddrl.channels.segment import segment_name, sweep_dead, unlink_run
from ddrl.channels.wire import Wire
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import ChannelError, ConfigError, JobFailed, first_line, user_error
from ddrl.core.roles import group_hosts
from ddrl.core.rows import ParameterLayout
from ddrl.core.settings import load_config
from ddrl.core.specs import Array, Bytes
from ddrl.distribution.executor import UNKNOWN, Inbox
from ddrl.distribution.membership import NEVER_FREED, PLANS, Failed, Membership, describe_relay
from ddrl.distribution.models import ModelSender
from ddrl.distribution.relay import LocalHost, Relay, host_relay, readers_needed, root_relay, slots_needed
from ddrl.distribution.requests import wait
from ddrl.distribution.schemes import check_cluster

if TYPE_CHECKING:
    from mpi4py import MPI

LOOK_PERIOD = 0.5  # longest sleep of a process that waits, before it looks for a failure again [s]
ROW = np.dtype([("byte", np.uint8, (64,))])  # relays also carry rows, of which a broadcast has none
Tensors = Any  # arrays, or tensors of torch: a mapping by name, a list, or one alone


class Terms(msgspec.Struct, tag=True):
    """What all ranks agree on: the root's message to every rank, and in each host's memory for processes that come
    later.

    `layout`: of a version. `settings`: those of [cluster]. `hosts`: of each rank, as numbers. `leaders`: the ranks that
    relay, the root first. `readers`: places on each host for processes that are no ranks."""

    run: str
    layout: ParameterLayout
    settings: list[str]
    hosts: list[int]
    leaders: list[int]
    readers: int


TERMS: Wire[Terms] = Wire("the ranks of a broadcast", Terms)


@dataclass(frozen=True)
class Pinned:
    """A version in its host's memory: read-only arrays by name, valid until the pin ends."""

    version: int
    arrays: dict[str, Array]


class Subscription:
    """What a process reads of its host's memory; use it from one thread."""

    def __init__(self, name: str, terms: Terms, place: int, limit: float) -> None:
        """place: among the mailbox's readers, from its end where it is negative."""
        self.name = name  # of this host's memory, for `subscribe`
        self.limit = limit  # longest wait [s]
        self._board = Board.attach(channel(name, "board"))
        self._mailbox = Mailbox.attach(channel(name, "mailbox"))
        self._reader = self._firm_reader(place % self._mailbox.readers)
        self._layout = terms.layout
        self._root = terms.leaders[0]
        self._pinned = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def newest(self) -> int:
        """The newest version on this host; -1: none yet."""
        return self._mailbox.newest

    def wait(self, newer_than: int = -1, limit: float | None = None) -> int | None:
        """Wait for a version above `newer_than`, at most `limit` [s] (None: as joined); the newest, or None where the
        root has closed and none will come. ChannelError where the time is over, JobFailed where a rank has failed."""
        limit = self.limit if limit is None else limit
        deadline = time.monotonic() + limit
        bell = self._board.rollout_bell
        while True:
            seen = bell.value
            self._check()
            ended = self._board.command == Command.STOP  # read before the version, for the last one comes before it
            if self.newest > newer_than:
                return self.newest
            if ended:
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelError(
                    f"no version above {newer_than} has come within {limit:g} s: rank {self._root} has published none, "
                    "or a link is down; wait longer (limit)"
                )
            bell.wait(seen, min(left, LOOK_PERIOD))

    @contextlib.contextmanager
    def pin(self, limit: float | None = None) -> Generator[Pinned]:
        """The newest version where it lies, not overwritten before the block ends; waits for a first one as `wait`
        does. ChannelError where this process pins one already, or none will come."""
        if self.wait(-1, limit) is None:
            raise ChannelError(f"rank {self._root} has closed and published no version: there is nothing to pin")
        if self._pinned:
            raise ChannelError("this process pins a version already: end that block, or use what it has pinned")
        pin = self._reader.pin()
        assert pin is not None
        self._pinned = True
        try:
            yield Pinned(pin.version, self._layout.views(pin.data))
        finally:
            self._pinned = False
            self._reader.unpin()

    def load(self, tensors: Tensors, newer_than: int = -1, limit: float | None = None) -> int | None:
        """Wait as `wait` does, and copy the newest version into arrays, or tensors of any device, of the form that the
        root gave; its number. None, and nothing copied, where none will come. ChannelError for another form."""
        into = named(tensors)
        self._as_agreed(into)
        if self.wait(newer_than, limit) is None:
            return None
        with self.pin() as pinned:
            for name, array in pinned.arrays.items():
                if hasattr(into[name], "new_tensor"):
                    into[name].detach().copy_(into[name].new_tensor(array))
                else:
                    np.copyto(into[name], array)
            return pinned.version

    def close(self) -> None:
        """Give the reader's place back; what was pinned is no longer valid."""
        if not self._closed:
            self._closed = True
            self._reader.release()

    def _firm_reader(self, place: int) -> MailboxReader:
        """One that tells the root when it lets go of a version, for it may wait for a slot."""
        reader = self._mailbox.reader(place, firm=True)
        reader.bell = self._board.trainer_bell
        return reader

    def _check(self) -> None:
        if self._closed:
            raise ChannelError("this broadcast is closed in this process: join it, or subscribe to it, anew")
        if self._board.command == Command.FAIL:
            raise JobFailed(self._failure())

    def _failure(self) -> str:
        note = self._board.wish.read()
        message = None if note is None else PLANS.decode(np.frombuffer(note[1], np.uint8))
        generic = f"a rank of the broadcast has failed: the error of rank {self._root} says which; start the job again"
        return message.text if isinstance(message, Failed) else generic

    def _as_agreed(self, tensors: Mapping[str, Any]) -> dict[str, Array]:
        """The tensors as arrays; ChannelError where they are not those of a version."""
        arrays = {name: as_array(name, tensor) for name, tensor in tensors.items()}
        found = {name: f"{array.dtype.name}{list(array.shape)}" for name, array in arrays.items()}
        wanted = {entry.name: f"{entry.dtype}{list(entry.shape)}" for entry in self._layout.entries}
        for name in (*wanted, *found):
            if found.get(name) != wanted.get(name):
                raise ChannelError(
                    f"tensor {name!r} is {found.get(name, 'missing')}, where rank {self._root} joined with "
                    f"{wanted.get(name, 'none of that name')}: give the same tensors as there"
                )
        return arrays


class Broadcast(Subscription):
    """One rank's part of a broadcast, made by `join`."""

    def __init__(self, rank: int, name: str, terms: Terms, place: int, limit: float) -> None:
        super().__init__(name, terms, place, limit)
        self._rank = rank
        self._closing = False
        self._thread: threading.Thread | None = None
        self._comm: MPI.Comm | None = None

    def lead(self, comm: MPI.Comm, config: Config) -> None:
        """Relay for this host from now on, in a thread; `comm`: of all that do, the root first. Collective over it;
        RelayFailed where another one fails meanwhile."""
        self._comm = comm
        readers = [self._firm_reader(place) for place in range(readers_needed(config.cluster))]
        table = Counters.create(None, 1)
        local = FirmHost(self._mailbox, readers, self._board, table.row(0), ROW, self._layout)
        membership = Membership(comm, self._describe)
        try:
            if comm.rank:
                relay = host_relay(membership, config, local, lanes=LaneSet([]), table=table, failure=self._failure)
            else:
                self._mailbox.bell = self._board.relay_bell
                lanes = [Lane.create(None, ROW, 1) for _ in range(1, comm.size)]
                mirrors = [Counters.create(None, 1) for _ in lanes]
                relay = root_relay(membership, config, local, lanes=lanes, mirrors=mirrors, on_failure=self._fail)
        except BaseException as error:
            membership.abandon(self._describe(error))
            raise
        self._thread = threading.Thread(target=self._relay, args=(relay, membership), name="relay", daemon=True)
        self._thread.start()

    def publish(self, tensors: Tensors, version: int) -> None:
        """The root: copy the tensors into a slot, which the relay sends to all hosts; a version that a newer one
        overtakes may never leave. `version` counts up from 0. ChannelError where the tensors are not those that `join`
        was given, the version is not above the last, or readers of this host have pinned every spare slot for as long
        as `limit`."""
        self._check()
        if self._rank != self._root:
            raise ChannelError(f"rank {self._rank} cannot publish, rank {self._root} does: name another one by root=")
        if version <= self.newest:
            raise ChannelError(f"version {version} is not above {self.newest}, which was published before: count up")
        arrays = self._as_agreed(named(tensors))
        deadline = time.monotonic() + self.limit
        bell = self._board.trainer_bell
        seen = bell.value
        while (slot := self._mailbox.try_begin(version)) is None:
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelError(
                    f"version {version} has found no slot for {self.limit:g} s, for readers of this host pin too many "
                    "versions: end their pins, or join with more (pins=)"
                )
            bell.wait(seen, min(left, LOOK_PERIOD))
            seen = bell.value
        for name, place in self._layout.views(slot.data).items():
            np.copyto(place, arrays[name])
        slot.seal()
        self._board.rollout_bell.ring()

    def close(self) -> None:
        """Every rank: a rank that relays waits until the newest version is on every host and the root has closed too,
        at most `limit`. Nothing is left behind. JobFailed where a rank has failed, or has not closed in time."""
        if self._closed:
            return
        self._closing = True
        if self._thread is not None:
            self._board.relay_bell.ring()
            self._thread.join(self.limit)
            if self._thread.is_alive():
                self._fail(f"rank {self._rank} has closed, but other ranks have not within {self.limit:g} s: close all")
                self._thread.join(self.limit)
            unlink(self.name)
            if self._comm is not None and not self._thread.is_alive():
                self._comm.Free()
        atexit.unregister(self.forgotten)
        super().close()
        if self._board.command == Command.FAIL:
            raise JobFailed(self._failure())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._fail(user_error(error, f"rank {self._rank} has failed: "))
        with contextlib.suppress(JobFailed):
            self.close()

    def forgotten(self) -> None:
        """The program ends without `close`: MPI must not end under the relay's thread."""
        self._fail(f"rank {self._rank} has ended without close(): call it on every rank")
        with contextlib.suppress(JobFailed):
            self.close()

    def _fail(self, text: str) -> None:
        """Tell this host's processes, and through its relay the root and all others; the first failure counts."""
        if self._board.command == Command.RUN:
            self._board.wish.write(PLANS.encode(Failed(text)).tobytes())
            self._board.command = Command.FAIL

    def _describe(self, error: BaseException) -> str:
        return f"the relay of rank {self._rank} has failed: {describe_relay(error)}"

    def _relay(self, relay: Relay, membership: Membership) -> None:
        """The thread: relay until the root has closed, or a rank has failed."""
        models = relay.models
        try:
            with membership:
                while not relay.finished:
                    relay.step()
                    if self._closing and isinstance(models, ModelSender) and self._board.command == Command.RUN:
                        arrived = models.sent_version >= self.newest and models.settled
                        if arrived or not relay.hosts:
                            self._board.command = Command.STOP
        except Exception as error:  # the membership has told the other relays
            self._fail(str(error) if isinstance(error, JobFailed) else self._describe(error))


class FirmInbox(Inbox):
    """Takes no slot from readers: where they pin all, the next version waits."""

    def open(self, urgent: bool) -> MailboxSlot | None:
        """A free slot, or None."""
        return self.mailbox.try_begin(UNKNOWN)


class FirmHost(LocalHost):
    """What a relay uses of a host whose readers pin firmly."""

    def inbox(self, config: ClusterConfig) -> Inbox:
        """The mailbox as the executor uses it."""
        return FirmInbox(self.mailbox, self.readers)


def join(
    comm: MPI.Comm,
    tensors: Tensors = None,
    *,
    root: int = 0,
    readers: int = 0,
    pins: int = 4,
    limit: float = 600.0,
    **cluster: Any,
) -> Broadcast:
    """Take part in a broadcast: every rank of `comm` calls it. Relays then measure their links, for about two seconds.

    tensors: what a version holds, by name, in a list, or one alone; their shapes and dtypes count (the root's: other
    ranks give none). root: the rank that publishes. readers: places on each host for processes that are no ranks
    (`subscribe`). pins: versions of a host, beside the newest, that readers can pin while others go on. limit: longest
    wait of any call [s]. cluster: settings as those of [cluster] in a run (scheme="direct", versions_in_flight=1;
    relays=3: three hosts on one machine; a table of a scheme's own as a dict); the root's count.

    A host reserves the bytes of 2 versions_in_flight + 4 + pins versions. ConfigError for settings or tensors that
    cannot be used, and where MPI lets no threads call it; ChannelError where /dev/shm has no room, or a rank does not
    come within `limit`; JobFailed where another rank has raised one of these."""
    from mpi4py import MPI

    with together(comm, limit):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                f"MPI was started with thread level {MPI.Query_thread()}, but relays are threads that call it: start "
                f"it with MPI.THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}), mpi4py's default (mpi4py.rc.thread_level)"
            )
    world = comm.Dup()
    rank = world.rank
    machine = world.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([rank], np.int64)
    machine.Bcast(first)
    machine.Free()
    machines = np.empty(world.size, np.int64)
    world.Allgather(first, machines)
    data: Bytes = np.empty(0, np.uint8)
    with together(world, limit):
        if rank == root:
            data = TERMS.encode(agree(tensors, machines.tolist(), root, readers, cluster))
    size = np.array([data.size], np.int64)
    world.Bcast(size, root)
    data.resize(size[0], refcheck=False)
    world.Bcast(data, root)
    terms = TERMS.decode(data)
    members = [other for other, host in enumerate(terms.hosts) if host == terms.hosts[rank]]
    host, leader = next((host, one) for host, one in enumerate(terms.leaders) if one in members)
    config = load_config(None, terms.settings)
    own = readers_needed(config.cluster)
    places = len(members) + terms.readers
    relays = world.Split(0 if rank == leader else MPI.UNDEFINED, host)
    name = f"{terms.run}-h{host}"
    try:
        with together(world, limit):
            if rank == leader:
                sweep_dead()
                slots = slots_needed(config.cluster) + min(pins, places)
                Board.create(channel(name, "board"))
                Blob.create(channel(name, "terms"), data.tobytes())
                Mailbox.create(channel(name, "mailbox"), terms.layout.nbytes, slots, own + places)
        with together(world, limit):
            feed = Broadcast(rank, name, terms, own + members.index(rank), limit)
        with together(world, limit):
            if rank == leader:
                if not readers:
                    unlink(name)  # nobody attaches any more, and however ranks end, nothing is left
                feed.lead(relays, config)
    except BaseException:
        if rank == leader:
            unlink(name)
        raise
    world.Free()
    atexit.register(feed.forgotten)  # after the relay's own, which would close what it waits on: the last runs first
    return feed


def subscribe(name: str, place: int = 0, *, limit: float = 600.0) -> Subscription:
    """Read a host's versions in a process of it that is no rank. name: of a rank there (`Broadcast.name`). place: below
    `readers` of `join`, for one process at a time. limit: longest wait [s].

    ChannelError where no such broadcast is on this host, or the place does not exist or is taken."""
    data = Blob.attach(channel(name, "terms")).read()
    terms = TERMS.decode(np.frombuffer(data, np.uint8))
    if not 0 <= place < terms.readers:
        raise ChannelError(
            f"broadcast {name} was joined with readers={terms.readers}, so it has no place {place} for a process that "
            "is no rank: take a lower one, or join with more"
        )
    return Subscription(name, terms, place - terms.readers, limit)


# -- what joining takes ------------------------------------------------------------------------------------------------


def agree(tensors: Tensors, machines: Sequence[int], root: int, readers: int, cluster: Mapping[str, Any]) -> Terms:
    """The root's terms; ConfigError where they cannot be. `machines`: of each rank, as numbers."""
    arrays = {name: as_array(name, tensor) for name, tensor in named(() if tensors is None else tensors).items()}
    layout = ParameterLayout.of({name: (array.shape, array.dtype.name) for name, array in arrays.items()})
    if not layout.nbytes:
        raise ConfigError("the root joins without a byte of a model: give join the tensors that it will publish")
    settings = list(flat("cluster", cluster))
    config = load_config(None, settings)
    if config.cluster.closed_loop:
        raise ConfigError("cluster.closed_loop needs the rollouts of a run: leave it out, or set versions_in_flight=1")
    hosts = group_hosts(len(machines), list(map(str, machines)), config.cluster.relays)
    leaders = {hosts[root]: root}
    for rank, host in enumerate(hosts):
        leaders.setdefault(host, rank)
    check_cluster(config, len(leaders) - 1)
    return Terms(uuid.uuid4().hex[:8], layout, settings, hosts, list(leaders.values()), readers)


def flat(name: str, value: Any) -> Iterator[str]:
    """Settings as the command line has them, those of tables too."""
    if isinstance(value, Mapping):
        for inner, of in cast(Mapping[str, Any], value).items():
            yield from flat(f"{name}.{inner}", of)
    else:
        yield f"{name}={str(value).lower() if isinstance(value, bool) else value}"


@contextlib.contextmanager
def together(comm: MPI.Comm, limit: float) -> Generator[None]:
    """What every rank does before any goes on: where it fails on one, all others raise JobFailed. ChannelError where
    not all have come within `limit` [s]."""
    from mpi4py import MPI

    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = np.array([0 if error is None else comm.rank + 1, 0], np.int64)
    request = comm.Iallreduce(failed[:1], failed[1:], MPI.MAX)
    deadline = time.monotonic() + limit

    def look() -> None:
        if time.monotonic() > deadline:
            NEVER_FREED.append((request, failed))
            raise ChannelError(
                f"not every rank has joined within {limit:g} s: call join on all ranks of its communicator"
            )

    wait([request], look)
    if error is not None:
        raise error
    if failed[1]:
        raise JobFailed(f"rank {failed[1] - 1} cannot join the broadcast: its own error says why")


def channel(name: str, kind: str) -> str:
    """The name of a segment of a broadcast's host; ChannelError where `name` cannot be one's."""
    if not re.fullmatch("[0-9a-f]{8}-h[0-9]+", name):
        raise ChannelError(f"{name!r} is no broadcast's name: take that which a rank of this host has (Broadcast.name)")
    run, _, host = name.partition("-h")
    return segment_name(run, int(host), kind)


def unlink(name: str) -> None:
    """Remove the names of a host's memory; the memory goes with the last process that maps it."""
    run, _, host = name.partition("-h")
    unlink_run(run, int(host))


def named(tensors: Tensors) -> dict[str, Any]:
    """Tensors by name: those of a list by their number, one alone as "0"."""
    if isinstance(tensors, Mapping):
        return {str(name): tensor for name, tensor in cast(Mapping[Any, Any], tensors).items()}
    several = cast(Sequence[Any], tensors) if isinstance(tensors, list | tuple) else [tensors]
    return {str(number): tensor for number, tensor in enumerate(several)}


def as_array(name: str, tensor: Any) -> Array:
    """A tensor's numbers in this process's memory, without a copy where they are there; ChannelError for what has no
    numbers that numpy knows."""
    try:
        array: Array = np.asarray(tensor.detach().cpu() if hasattr(tensor, "detach") else tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ChannelError(
            f"tensor {name!r} has a type that numpy lacks ({first_line(error)[:90]}): give its bits, as "
            "tensor.view(torch.int16) of a bfloat16"
        ) from None
    if array.dtype.kind not in "biufc":
        raise ChannelError(f"tensor {name!r} is of {array.dtype}, not of numbers: give arrays or tensors of numbers")
    return array

"""A job under mpirun: what ranks do that are more than slots (`ddrl.run.slot`).

    rank 0                            relay of the trainer's host; reads the command line, gives every rank its work
    first rank of each other host     relay
    second rank of the first host     trainer, where there are gradient nodes; else the trainer is a program
    learner.nodes further ranks       gradient nodes

A relay starts its host's keeper (`processes.HostKeeper`), which owns the host's shared memory and all processes that
are no ranks. Rank 0 starts its own before MPI is loaded, so the trainer imports torch while ranks still start. What
ranks say to rank 0 at the start and at the end are single messages: no rank passes on those of others, so slots may
poll rarely. Every wait is a poll with a sleep between."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec
import numpy as np

from ddrl.channels.board import CounterRow
from ddrl.channels.segment import start_time, sweep_dead, unlink_run
from ddrl.channels.wire import Wire
from ddrl.core.errors import ConfigError, DdrlError, JobFailed, MessageError
from ddrl.core.forks import SIGNALS, die_with, is_orphan
from ddrl.core.metrics import COLUMNS
from ddrl.core.plugins import slice_module
from ddrl.core.roles import Assignment, Role, assign_roles, group_hosts
from ddrl.distribution.requests import MpiEnd, nothing, rest, wait
from ddrl.run import slot
from ddrl.run.checkpoint import Records
from ddrl.run.cli import parse
from ddrl.run.hosts import HostKeeper, tell_user
from ddrl.run.keeper import report_stacks
from ddrl.run.local import asked_by, complain, conclude, is_of_pool, print_only
from ddrl.run.preparation import announce, planned_config
from ddrl.run.process import (
    Interrupts,
    leave_process_group,
    name_process,
    set_torch_threads,
    sweep_open_mpi,
)
from ddrl.run.topology import (
    HostChannels,
    KeepHost,
    LeadHost,
    Made,
    Ranks,
    Result,
    Topology,
    describe,
    report_failure,
    rollouts_of_host,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.distribution.membership import Membership
    from ddrl.run.task import Task

END_TIMEOUT = 10.0  # [s] after a failure for the other ranks to end; then the job is aborted
MESSAGES = 4  # tag, beside those of `slot`
ORDERED = (slot.RELAY, slot.TRAINER, slot.NODE)  # work that needs the topology
LETTERS = {Role.RELAY: slot.RELAY, Role.NODE: slot.NODE}  # a trainer is a rank beside nodes alone
# Of the time waited so far, and [s]: hundreds of ranks that poll a hundred times a second slow the one they wait for.
SHARE = 0.3
MAX_SLEEP = 0.1


class BarrierError(DdrlError):
    """Ranks did not meet at a barrier."""


class VersionError(DdrlError):
    """Ranks have different copies of ddrl."""


SAME_INSTALLATION = "install the same one on every machine (mpi_launch/README.md)"


def protocol() -> int:
    """Of this copy of ddrl: what processes of several hosts must agree on, as a number. Copies of one version can
    differ in a checkout."""
    from ddrl.distribution import membership

    kinds = [*get_args(Message), *get_args(membership.Message)]
    messages = [(kind.__name__, kind.__annotations__) for kind in kinds]
    return zlib.crc32(repr([COLUMNS, messages]).encode())


class Orders(msgspec.Struct, tag=True):
    """Rank 0 to a relay, a node or the trainer: the topology, the cores of the host's ranks in rank order, and where
    records are kept. No topology: the job does not start. protocol: of rank 0's copy of ddrl."""

    topology: bytes = b""
    cores: list[list[int]] = []
    records: Records | None = None
    protocol: int = 0


class Ready(msgspec.Struct, tag=True):
    """To rank 0: this rank has started, or why it has not."""

    failure: str = ""


class Go(msgspec.Struct, tag=True):
    """Rank 0 to the same ranks: whether all have started."""

    all_started: bool


class Left(msgspec.Struct, tag=True):
    """A relay to rank 0: it has ended. The trainer sends its `Result`."""


class SliceOrders(msgspec.Struct, tag=True):
    """Rank 0 to all others in the job of a slice: the module whose `serve_rank(meeting, body)` gives a rank's status.
    No module: the job does not start."""

    module: str = ""
    machines: list[str] = []
    body: bytes = b""


Message = Orders | Ready | Go | Left | Result | SliceOrders
RANKS: Wire[Message] = Wire("the ranks of a job", Message)
Received = TypeVar("Received", bound=Message)


class Mail(MpiEnd[Message]):
    """The messages between rank 0 and the ranks that are more than slots."""

    def __init__(self, world: MPI.Intracomm) -> None:
        super().__init__(world, RANKS, MESSAGES)
        self.world = world

    def take(self, rank: int | None = None) -> tuple[int, Message] | None:
        """As of `MpiEnd`; the death of another rank ends no wait."""
        from mpi4py import MPI

        try:
            return super().take(rank)
        except MPI.Exception:
            if not self.dead():
                raise
            self.world.Ack_failed()
            return None

    def dead(self) -> set[int]:
        """The ranks that have died, where MPI reports that."""
        if not slot.reports_deaths():
            return set()
        failed = self.world.Get_failed()
        return set(failed.Translate_ranks(None, self.world.Get_group()))

    def tell(self, message: Message, *ranks: int) -> None:
        """Send, and wait until it has arrived."""
        self.send(message, *ranks)
        self.flush(SHARE, MAX_SLEEP)

    def wait_for(self, kind: type[Received], rank: int = 0) -> Received:
        """The next message of a rank, which is of this kind. JobFailed where it has died without one."""
        begun = time.perf_counter()
        while (received := self.take(rank)) is None:
            if rank in self.dead():
                raise JobFailed(f"rank {rank} has died before the job had begun: start it again")
            rest(begun, SHARE, MAX_SLEEP)
        message = received[1]
        if not isinstance(message, kind):
            raise MessageError(f"rank {rank} has sent {type(message).__name__} in place of {kind.__name__}")
        return message


@dataclass(frozen=True)
class Meeting:
    """All ranks of the job; `machines`: what each one's memory is called, equal where it is shared; `launcher`: the
    process that started this one."""

    world: MPI.Intracomm
    machines: list[str]
    launcher: int

    def give_orders(self, orders: SliceOrders) -> None:
        """Rank 0 to all others."""
        Mail(self.world).tell(orders, *range(1, self.world.Get_size()))


# -- rank 0 ------------------------------------------------------------------------------------------------------------


def begin(arguments: list[str]) -> Lead | int:
    """What rank 0 does before MPI is loaded: it reads the command line, says what will run, and starts the keeper. The
    exit status where that is all."""
    try:
        if slot.PRINT_ONLY & set(arguments):
            return print_only(arguments)
        return Lead(arguments)
    except DdrlError as error:
        complain(error, "--traceback" in arguments)
        return 1


class Lead:
    """Rank 0 of a job."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._command = parse(arguments)
        self._keeper: HostKeeper | None = None
        self._run_id = uuid.uuid4().hex[:8]
        if self._command.serial:
            raise ConfigError("--serial is one process: start it without mpirun")
        if is_of_pool(self._command):  # which acts on signals itself
            for number in slot.IGNORED:
                signal.signal(number, signal.SIG_IGN)
            return
        path = announce(self._command, self._run_id, slot.launched()[0])
        self._config = planned_config(self._command)
        sweep_dead()
        sweep_open_mpi()
        errors = slot.launcher_errors()
        keeper = HostKeeper(self._run_id, 0, self._config.run.silence_limit, errors)
        self._keeper = keeper
        launcher = os.getppid() if slot.may_lose_ranks(os.getppid()) else 0
        has_trainer = not self._config.learner.nodes
        keeper.send(LeadHost(arguments, None if path is None else str(path), has_trainer, launcher, errors))

        def stop(number: int, _: object) -> None:
            if errors >= 0 and number == signal.SIGTERM:  # mpirun ends too, and passes on nothing more
                os.dup2(errors, 1)
                os.dup2(errors, 2)
            keeper.signal(number)

        for number in SIGNALS:
            signal.signal(number, stop)

    def close(self) -> None:
        """End the keeper, whatever it does."""
        if self._keeper is not None:
            self._keeper.end(0.0)

    def lead(self, world: MPI.Intracomm, launcher: int) -> int:
        """Lead the job to its end; the exit status."""
        # Without its launcher a relay ends: the keeper sees that, and the trainer saves. A pool ends in order.
        die_with(launcher, signal.SIGTERM if self._keeper is None else signal.SIGKILL)
        report_stacks(2)
        name_process("ddrl 0 relay")
        work = bytearray([slot.NOTHING] * world.Get_size() + [0])
        try:
            with abort_on_error(world):
                records = _collect(world)
            try:
                said = _read_records(records)
            except DdrlError:
                _answer(world, work)  # nothing
                raise
            if any(may_die for *_, may_die in said):
                work[-1] = slot.RECOVERY
            machines = _machines(said)
            text = slot.command_of(world.Get_size())
            if self._keeper is None:
                work[:-1] = bytes([slot.POOL]) * world.Get_size()
                _answer(world, work)
                pool = slice_module("pool.ranks", asked_by(self._command))
                return slot.leave(pool.lead_pool(self._command, text, Meeting(world, machines, launcher)), work)
            cores = [one for _, one, _, _ in said]
            return slot.leave(self._run(world, machines, cores, work, self._keeper, text), work)
        except DdrlError as error:
            complain(error, "--traceback" in self._arguments)
            return slot.leave(1, work)

    def _run(
        self,
        world: MPI.Intracomm,
        machines: list[str],
        cores: list[list[int]],
        work: bytearray,
        keeper: HostKeeper,
        launcher: str,
    ) -> int:
        """From the roles of all ranks to the end of the job; the exit status. How the job ended is printed while this
        process still waits for others: mpirun may lose what a rank prints just before it ends."""
        config = self._config
        try:
            collectors = rollouts_of_host(config) if config.uses("pool") else 0
            hosts = group_hosts(world.Get_size(), machines, config.cluster.relays, alone=collectors > 0)
            evaluator = config.evaluation.period > 0
            ranks = assign_roles(hosts, evaluator=evaluator, nodes=config.learner.nodes, collectors=collectors)
            ranks = [replace(rank, machine=machines[hosts.index(rank.host)]) for rank in ranks]
            letters = {**LETTERS, Role.TRAINER: slot.TRAINER} if config.learner.nodes else LETTERS
            work[:-1] = bytes(letters.get(rank.role, slot.SLOT) for rank in ranks[: world.Get_size()])
        except BaseException:
            _answer(world, work)  # nothing
            keeper.end(0.0)
            raise
        keeper.send(Ranks(ranks, cores))
        _answer(world, work)
        import ddrl.run.relay  # noqa: F401  # pyright: ignore[reportUnusedImport]  (while the keeper makes the channels)

        mail = Mail(world)
        result: Result
        ordered = False
        try:
            made = keeper.receive(Made)
            topology = Topology.from_bytes(made.topology)
            with abort_on_error(world, self._run_id):
                _give_orders(mail, work, topology, cores, made.records)
            ordered = True
            failure = _relay(world, topology, topology.ranks[0], keeper, partial(_agree_all, mail, work), work)
            result = _result_of_trainer(mail, work, keeper)
            if failure and result.document is not None:
                result = Result(None, failure)
                keeper.send(result)  # which need not say it too
        except DdrlError as error:
            result = keeper.result or Result(None, str(error))
            if not ordered:
                mail.tell(Orders(), *_with_work(work, *ORDERED))
        status = conclude(result, launcher)
        keeper.end()
        _part(mail, work, result, self._run_id, _with_work(work, slot.RELAY) if ordered else [])
        return status


def _collect(world: MPI.Intracomm) -> list[bytearray]:
    """What every rank says of itself (`slot.record`)."""
    from mpi4py import MPI

    records = [
        bytearray(slot.record(os.getppid())),
        *(bytearray(slot.RECORD_BYTES) for _ in range(1, world.Get_size())),
    ]
    requests = [world.Irecv([record, MPI.BYTE], rank, slot.RECORD) for rank, record in enumerate(records) if rank]
    wait(requests, share=SHARE, longest=MAX_SLEEP)
    slot.leave_meeting_point()
    return records


def _read_records(records: Sequence[bytes | bytearray]) -> list[tuple[str, list[int], str, bool]]:
    """Of every rank: memory, cores, name of the machine, whether ranks may die. VersionError where ranks differ."""
    found: list[tuple[str, list[int], str, bool]] = []
    versions: dict[str, str] = {}
    for rank, record in enumerate(records):
        words = record.decode(errors="replace").split(maxsplit=4)
        if len(words) < 5:
            raise VersionError(f"rank {rank} has an older version of ddrl than rank 0; {SAME_INSTALLATION}")
        version, memory, mask, may_die, name = words
        versions.setdefault(version, f"{version} (rank {rank} on {name.strip()})")
        cores = [core for core, one in enumerate(reversed(f"{int(mask, 16):b}")) if one == "1"]
        found.append((memory, cores, name.strip(), may_die == "1"))
    if len(versions) > 1:
        raise VersionError(
            f"ranks have different versions of ddrl: {', '.join(versions.values())}; {SAME_INSTALLATION}"
        )
    return found


def _machines(said: Sequence[tuple[str, list[int], str, bool]]) -> list[str]:
    """A name for each rank's machine, the same where memory is shared and only there."""
    names: dict[str, str] = {}
    for memory, _, name, _ in said:
        if memory not in names:
            same = sum(other.partition(" (")[0] == name for other in names.values())
            names[memory] = f"{name} (memory {same + 1})" if same else name
    return [names[memory] for memory, *_ in said]


def _answer(world: MPI.Intracomm, work: bytearray) -> None:
    """Tell every rank the work of all."""
    from mpi4py import MPI

    sends = [world.Isend([work, MPI.BYTE], rank, slot.WORK) for rank in range(1, world.Get_size())]
    wait(sends, share=SHARE, longest=MAX_SLEEP)


def _with_work(work: bytes | bytearray, *letters: int) -> list[int]:
    return [rank for rank, letter in enumerate(work[:-1]) if letter in letters and rank]


def _give_orders(
    mail: Mail, work: bytearray, topology: Topology, cores: list[list[int]], records: Records | None
) -> None:
    for rank in _with_work(work, *ORDERED):
        on_host = topology.on_host(topology.ranks[rank].host)
        of_host = [cores[one.rank] for one in on_host if one.rank < len(cores)]
        mail.send(Orders(topology.to_bytes(), of_host, records, protocol()), rank)
    mail.flush(SHARE, MAX_SLEEP)


def _part(mail: Mail, work: bytearray, result: Result, run_id: str, relays: list[int]) -> None:
    """End the slots, and wait for these other relays: gradient nodes may have died meanwhile. Where the job has failed,
    the wait is bounded, and then the job is aborted."""
    from mpi4py import MPI

    ends: list[MPI.Request] = []
    for rank in _with_work(work, slot.SLOT):
        with contextlib.suppress(MPI.Exception):  # it has died
            ends.append(mail.world.Isend([b"e", MPI.BYTE], rank, slot.END))
    deadline = time.monotonic() + END_TIMEOUT
    begun = time.perf_counter()
    while relays or ends:
        received = mail.take()
        ends = [request for request in ends if not _has_left(request)]  # MPICH forgets what has not before it ends
        if received is None:
            rest(begun, SHARE, MAX_SLEEP)
        gone = mail.dead()
        if received is not None and isinstance(received[1], Left):  # of one that has died since, too
            gone.add(received[0])
        relays = [rank for rank in relays if rank not in gone]
        if time.monotonic() > deadline:
            if result.document is None:
                abort(mail.world, run_id)
            if slot.reports_deaths():  # one that looks for survivors finds that this process has ended
                return
            ends.clear()  # Open MPI sends them before it ends


def _has_left(request: MPI.Request) -> bool:
    """Whether a message is on its way, or the rank that it is for has died."""
    from mpi4py import MPI

    try:
        return request.Test()
    except MPI.Exception:
        return True


def _result_of_trainer(mail: Mail, work: bytearray, keeper: HostKeeper) -> Result:
    """How training ended, once it has: the keeper says it, or a trainer that is a rank."""
    trainers = _with_work(work, slot.TRAINER)
    if not trainers:
        return keeper.receive(Result)
    from mpi4py import MPI

    begun = time.perf_counter()
    while True:
        with contextlib.suppress(MPI.Exception):  # a rank that has died: the keeper says so
            received = mail.take(trainers[0])
            if received is not None and isinstance(received[1], Result):
                return received[1]
        result = keeper.result_now()
        if result is not None:
            return result
        rest(begun, SHARE, MAX_SLEEP)


def _agree_all(mail: Mail, work: bytearray, failure: str) -> None:
    """Rank 0's part of `_agree`."""
    others = _with_work(work, *ORDERED)
    try:
        for rank in others:
            failure = failure or mail.wait_for(Ready, rank).failure
    except JobFailed as error:
        failure = str(error)
    mail.tell(Go(not failure), *(rank for rank in others if rank not in mail.dead()))
    if failure:
        raise JobFailed(failure)


# -- the other ranks ---------------------------------------------------------------------------------------------------


def follow(world: MPI.Intracomm, work: bytes, launcher: int) -> int:
    """The part of a rank that is neither rank 0 nor a slot; its exit status."""
    rank = world.Get_rank()
    letter = work[rank]
    die_with(launcher, signal.SIGTERM if letter == slot.TRAINER else signal.SIGKILL)
    report_stacks(2)
    mail = Mail(world)
    if letter == slot.POOL:
        of_slice = mail.wait_for(SliceOrders)
        if not of_slice.module:
            return 1
        module = slice_module(of_slice.module, "this job")
        return module.serve_rank(Meeting(world, of_slice.machines, launcher), of_slice.body)
    orders = mail.wait_for(Orders)
    if not orders.topology:
        return 1  # rank 0 says why
    if orders.protocol != protocol():
        text = f"rank {rank} on {socket.gethostname()} has another copy of ddrl than rank 0; {SAME_INSTALLATION}"
        with contextlib.suppress(JobFailed):
            _agree(mail, text)
        if letter != slot.NODE:
            mail.tell(Result(None, text) if letter == slot.TRAINER else Left(), 0)
        return 1
    topology = Topology.from_bytes(orders.topology)
    mine = topology.ranks[rank]
    name_process(f"ddrl {rank} {mine.role.value}")
    if letter == slot.RELAY:
        return _follow_relay(mail, topology, mine, orders.cores)
    try:
        _agree(mail, "")
        with abort_on_error(world, topology.run_id):
            nodes = _group(world, topology, Role.TRAINER, Role.NODE)
        if letter == slot.NODE:
            return slice_module("balance.nodes", "learner.nodes").node_process(nodes, topology, mine)
        result = _train(topology, orders.records, nodes, launcher)
    except JobFailed as error:
        result = Result(None, str(error))
    if letter == slot.TRAINER:
        mail.tell(result, 0)
    return 0 if result.document is not None else 1


def _follow_relay(mail: Mail, topology: Topology, mine: Assignment, cores: list[list[int]]) -> int:
    """The relay of another host."""
    keeper = HostKeeper(topology.run_id, mine.host, topology.config.run.silence_limit)
    failure = ""
    try:
        keeper.send(KeepHost(topology.to_bytes(), cores))
        failure = _relay(mail.world, topology, mine, keeper, partial(_agree, mail))
    except JobFailed as error:
        failure = str(error)
    finally:
        keeper.end()
        mail.tell(Left(), 0)
    return 1 if failure else 0


def _agree(mail: Mail, failure: str) -> None:
    """Wait until every relay, node and trainer that is a rank is ready. JobFailed where one of them has failed, which
    rank 0 says; `failure`: of this one."""
    mail.tell(Ready(failure), 0)
    if not mail.wait_for(Go).all_started:
        raise JobFailed(failure)


def _relay(
    world: MPI.Intracomm,
    topology: Topology,
    mine: Assignment,
    keeper: HostKeeper,
    agree: Callable[[str], None],
    work: bytearray | None = None,
) -> str:
    """Relay from the moment that the keeper has made the host's channels; the error that ended it, or "". Its failures
    are on the host's board, where the trainer or the root relay finds them. agree: with the other ranks, on how this
    one has started; work: of all ranks, at rank 0."""
    from ddrl.run.relay import relay_process

    where = f"rank {mine.rank} (relay of host {mine.host})"
    channels: HostChannels | None = None
    failure = ""
    try:
        keeper.receive(Made)
        try:
            channels = HostChannels.attach(topology.run_id, mine.host, 0.0)
            if mine.host:
                channels.attach_drained()
        except DdrlError:
            keeper.check()  # they may have gone with it
            raise
    except BaseException as error:
        failure = str(error) if isinstance(error, JobFailed) else describe(error, where)
    try:
        agree(failure)
    except JobFailed as error:
        if channels is not None:
            report_failure(channels.board, topology.run_id, mine.host, str(error) or "another host did not start")
        raise
    assert channels is not None
    try:
        with abort_on_error(world, topology.run_id):  # other relays are inside collective calls that nothing interrupts
            membership = _join_relays(world, topology, where)
        ranks = topology.on_host(mine.host)
        nodes = [channels.counters.row(row) for row, rank in enumerate(ranks) if rank.role is Role.NODE]
        with membership:
            relay_process(
                membership,
                topology,
                mine,
                channels,
                keeper,
                look=partial(_note_dead, nodes),
            )
        if work is not None and membership.silent:
            work[-1] = slot.LEFT_OUT
    except BaseException as error:
        failure = str(error) if isinstance(error, JobFailed) else describe(error, where)
        report_failure(channels.board, topology.run_id, mine.host, failure)
    finally:
        channels.close()
    return failure


def _join_relays(world: MPI.Intracomm, topology: Topology, where: str) -> Membership:
    from ddrl.distribution.membership import Membership

    # Collectors of a round, and gradient nodes, are bound to their hosts.
    shrinks = slot.reports_deaths() and not topology.in_rounds and not topology.config.learner.nodes
    return Membership(_group(world, topology, Role.RELAY), lambda error: describe(error, where), shrinks=shrinks)


def _group(world: MPI.Intracomm, topology: Topology, *roles: Role) -> MPI.Intracomm:
    """The communicator of the ranks of these roles. Collective over them."""
    ranks = [one.rank for one in topology.ranks if one.role in roles]
    return world.Create_group(world.Get_group().Incl(ranks))


def _note_dead(nodes: list[CounterRow]) -> None:
    """Note which gradient nodes have died, where mpirun (with --enable-recovery) has not ended the job: the trainer
    continues without them. All other processes have their keeper."""
    for row in nodes:
        pid = int(np.nan_to_num(row["pid"].value))
        if pid and row["ended"].value != 1.0 and not start_time(pid):
            row["ended"].set(1.0)


def _train(topology: Topology, records: Records | None, nodes: MPI.Intracomm, launcher: int) -> Result:
    """The trainer as a rank, which leads gradient nodes; how the job ended."""
    from ddrl.run.task import assemble
    from ddrl.run.trainer import drive, open_records

    assert records is not None
    channels = HostChannels.attach(topology.run_id, 0, 0.0)
    channels.attach_drained()
    leader: Any = None
    try:
        with Interrupts() as interrupts:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.signals)
            set_torch_threads(topology.config.learner.threads)
            task = assemble(topology, channels, open_records(records, None))
            errors = slot.launcher_errors()
            leader = slice_module("balance.nodes", "learner.nodes").lead_nodes(nodes, task, channels)
            summary = drive(task, interrupts, partial(_save_in_a_copy, errors))
            leader.close()
        return Result(summary, directory=records.directory)
    except BaseException as error:
        text = str(error) if isinstance(error, DdrlError) else describe(error, "the trainer")
        report_failure(channels.board, topology.run_id, 0, text)
        return Result(None, text)
    finally:
        channels.counters_row(topology.trainer)["ended"].set(1.0)
        if is_orphan(launcher):  # the job has no other rank left
            os._exit(1)


def _save_in_a_copy(errors: int, task: Task) -> bool:
    """Save in a copy of this process, for mpirun is about to kill its ranks; whether that went well. errors: as of
    `slot.launcher_errors`."""
    child = leave_process_group()
    if child:
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        task.forget_sockets()
        task.finish(settle=False)
        tell_user(errors, f"saved; go on: python -m ddrl.run --resume {shlex.quote(str(task.directory.path))}")
        status = 0
    finally:
        os._exit(status)


def barrier(comm: MPI.Comm, name: str, meanwhile: Callable[[], object] = nothing) -> None:
    """Wait until all ranks of `comm` are here; `meanwhile` is called between polls. BarrierError where some wait at a
    barrier of another name."""
    from mpi4py import MPI

    code = zlib.crc32(name.encode())
    given = np.array([code, -code], np.int64)
    largest = np.zeros(2, np.int64)
    wait([comm.Iallreduce(given, largest, MPI.MAX)], meanwhile, share=SHARE, longest=MAX_SLEEP)
    if not np.array_equal(largest, given):
        raise BarrierError(
            f"rank {comm.Get_rank()} waits at the barrier '{name}': some ranks came to another one, so they do not do "
            "the same"
        )


def abort(world: MPI.Intracomm, run_id: str = "") -> None:
    """End the whole job, and remove the channels that the run already has on this machine."""
    if run_id:
        unlink_run(run_id)
    slot.abort(world, os.getppid())


@contextlib.contextmanager
def abort_on_error(world: MPI.Intracomm, run_id: str = "") -> Generator[None]:
    """Abort the whole job where this rank fails while no message can reach the others."""
    try:
        yield
    except BaseException as error:
        print(f"ddrl: {describe(error, f'rank {world.Get_rank()}')}", file=sys.stderr, flush=True)
        abort(world, run_id)

"""Who is there and what they speak of: ranks, settings, environment, rows and the algorithm's declaration.

Made on rank 0 before any channel is created; every process gets the same one, as bytes. It holds nothing of torch. And
what the processes of a host say to one another while they start and end.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.acting.policy_file import ActingModel
from ddrl.channels import Doorbell
from ddrl.channels.area import SampleArea
from ddrl.channels.board import PROCESSES, Blob, Board, Command, CounterRow, Counters
from ddrl.channels.lane import Lane, MessageLane
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import Segment, segment_name
from ddrl.channels.wire import SocketEnd, Wire
from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import ChannelError, ConfigError, DdrlError, shortage, user_error, user_frame
from ddrl.core.metrics import columns
from ddrl.core.roles import Assignment, Role
from ddrl.core.rows import RowSchema, row_schema, transition_columns
from ddrl.core.settings import config_from_toml, config_to_toml
from ddrl.core.specs import Column, Declaration, EnvSpec
from ddrl.distribution.membership import RELAYS, Message
from ddrl.run.checkpoint import Records

MAILBOX_SLOTS = 4  # parameter vectors of a host without relays: newest, being written, and pinned ones
START_TIMEOUT = 600.0  # [s] a trainer may import torch beside 300 starting ranks
LANE_ROWS = 512  # of a lane that is drained all the time
# Vector steps that wait in the lanes of all rollouts that are held back; four in each lane where they are few.
HELD_STEPS = 64


def rollouts_of_host(config: Config) -> int:
    """Rollouts of a host that has no rank for each of them: run.processes."""
    return config.run.processes or max(1, len(os.sched_getaffinity(0)) - 1)


def places_of_host(config: Config) -> int:
    """The most rollouts that there can be on such a host: run.max_processes."""
    return rollouts_of_host(config) if config.uses("pool") else max(rollouts_of_host(config), config.run.max_processes)


class _TopologyMessage(msgspec.Struct, frozen=True):
    run_id: str
    config_toml: str
    spec: EnvSpec
    declaration: Declaration
    ranks: tuple[Assignment, ...]
    cells: dict[str, str]  # environment variables: where code of a notebook's cells lies


@dataclass(frozen=True)
class Topology:
    """All ranks of a run, and the channels that follow from them."""

    run_id: str
    config: Config
    spec: EnvSpec
    declaration: Declaration
    ranks: tuple[Assignment, ...]

    @cached_property
    def schema(self) -> RowSchema:
        """The columns of every row of the run."""
        return row_schema(self.spec, self.declaration.columns)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns of every counters table: the library's, then the algorithm's figures."""
        return columns(self.declaration.figures)

    def to_bytes(self) -> bytes:
        """Serialized for blobs and messages."""
        config = config_to_toml(self.config)
        message = _TopologyMessage(
            self.run_id, config, self.spec, self.declaration, self.ranks, plugins.mounted_cells()
        )
        return msgspec.msgpack.encode(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> Topology:
        """Read what `to_bytes` wrote; this process imports code of cells from where the writer does."""
        message = msgspec.msgpack.decode(data, type=_TopologyMessage)
        os.environ.update(message.cells)
        config = config_from_toml(message.config_toml, "the run's topology")
        return cls(message.run_id, config, message.spec, message.declaration, message.ranks)

    @property
    def hosts(self) -> int:
        """Number of hosts, real or grouped."""
        return len({rank.host for rank in self.ranks})

    @property
    def machines(self) -> list[str]:
        """The name of each host's machine."""
        return [self.on_host(host)[0].machine for host in range(self.hosts)]

    @property
    def has_relays(self) -> bool:
        """Whether relays share models and rows."""
        return any(rank.role is Role.RELAY for rank in self.ranks)

    @property
    def in_rounds(self) -> bool:
        """Whether learning goes in rounds, and collectors come and go in the rollouts' places."""
        return self.config.uses("pool")

    @property
    def trainer_can_restart(self) -> bool:
        """Whether another trainer can continue where one dies: what it learns from comes through lanes."""
        return not self.in_rounds and not self.area_columns

    @property
    def rollouts(self) -> int:
        """Number of rollout processes."""
        return sum(rank.role is Role.ROLLOUT for rank in self.ranks)

    def on_host(self, host: int) -> list[Assignment]:
        """Ranks of one host, in rank order; a rank's place here is its row of the host's counters and its reader
        index."""
        return [rank for rank in self.ranks if rank.host == host]

    def row_of(self, assignment: Assignment) -> int:
        """Row of a rank in its host's counters table."""
        return self.on_host(assignment.host).index(assignment)

    @cached_property
    def area_columns(self) -> tuple[Column, ...]:
        """The columns of a sample in the explorers' areas; none where rows go through lanes."""
        return transition_columns(self.schema) if self.config.replay.through_areas else ()

    @property
    def held_back(self) -> bool:
        """Whether rollouts wait for the learner."""
        return self.config.replay.samples_per_insert > 0

    def lane_rows(self) -> int:
        """Rows that one lane holds. Lanes of rollouts that are held back are full: what waits there is learned from
        late, by as many vector steps as all of them hold together."""
        num_envs = self.config.env.num_envs
        # A collector ends before its lane is drained: all of a round's steps and ends must fit.
        least = 2 * self.config.section("pool").collect_steps * num_envs if self.in_rounds else num_envs
        steps = min(4, max(1, HELD_STEPS // max(1, self.rollouts)))
        return max(self.config.channels.lane_rows or (steps * num_envs if self.held_back else LANE_ROWS), least)

    @property
    def lane_streams(self) -> int:
        """Environments of a rollout that is held back, by which lanes are drained group by group; 0 where all lanes
        share fairly: where the job goes on once every rollout has stepped (closed loops, updates that wait for rows of
        recent versions), and where nothing holds rollouts back but the time that draining takes."""
        config = self.config
        awaited = math.isfinite(config.rollout.max_policy_lag) and config.rollout.at_max_lag == "wait"
        return config.env.num_envs if self.held_back and not (config.cluster.closed_loop or awaited) else 0

    @cached_property
    def state_keeper(self) -> Assignment | None:
        """The rollout whose environments' states checkpoints and evaluations take: the first beside the trainer. None
        where environments keep nothing, or no rollout is on that host."""
        here = [rank for rank in self.on_host(0) if rank.role is Role.ROLLOUT]
        return here[0] if here and self.spec.state_nbytes else None

    @cached_property
    def trainer(self) -> Assignment:
        """The trainer's place."""
        return next(rank for rank in self.ranks if rank.role is Role.TRAINER)


# -- messages ----------------------------------------------------------------------------------------------------------
# Between a host's keeper and its trainer, or the parent of a keeper that is a program (`hosts`).


class Note(msgspec.Struct, tag=True):
    """What the user is to know, of a rank."""

    text: str
    rank: int


class Result(msgspec.Struct, tag=True):
    """How a job ended: its summary, or the error's text; no text where an interrupt ended it before it could save.
    directory: of the run, where it was made."""

    document: dict[str, Any] | None
    error: str = ""
    directory: str = ""


class LeadHost(msgspec.Struct, tag=True):
    """To the keeper of the trainer's host under mpirun: the command line, the new run's directory as announced, whether
    the trainer is a program (else it is a rank), the launcher's pid where it survives the end of rank 0, and the
    descriptor of what the launcher writes its errors to (`slot.launcher_errors`)."""

    arguments: list[str]
    path: str | None
    has_trainer: bool
    launcher: int
    errors: int


class Ranks(msgspec.Struct, tag=True):
    """To the same keeper, once MPI has started: all ranks of the job, and the cores of each."""

    ranks: list[Assignment]
    cores: list[list[int]]


class KeepHost(msgspec.Struct, tag=True):
    """To the keeper of another host, or beside a pool's task: the topology, and the cores of the host's ranks in their
    order. has_board: somebody has made the host's board; takes_over: a keeper before this one has made all channels,
    and was killed."""

    topology: bytes
    cores: list[list[int]]
    has_board: bool = False
    takes_over: bool = False


class Made(msgspec.Struct, tag=True):
    """From a keeper: the host's channels are there. records: of the run, for a trainer that is a rank. Where the host
    has collectors that the parent orders, the descriptor of their socket travels beside it."""

    topology: bytes
    records: Records | None


JobMessage = Records | Note | Result | LeadHost | Ranks | KeepHost | Made
Received = TypeVar("Received", bound=JobMessage)


JOB: Wire[JobMessage] = Wire("the keeper of a host", JobMessage)
Link = SocketEnd[JobMessage]  # between keeper and trainer, or keeper and parent


# -- failure -----------------------------------------------------------------------------------------------------------
# The process that fails writes its message as its host's failure blob and sets the board's command to FAIL. Creating
# the blob is exclusive, so the first failure counts. A relay sends the message to the root; the trainer ends the job.


def describe(error: BaseException, where: str) -> str:
    """What the user is shown: one line for an error of ours, and for one that left the user's code, with the place
    there; the traceback for anything else."""
    if isinstance(error, DdrlError):
        return f"{where}: {error}"
    if words := shortage(error):
        return f"{where}: {words}"
    if user_frame(error):
        return f"{where}: {user_error(error)}; --serial --traceback shows all of it"
    return f"{where} failed:\n{''.join(traceback.format_exception(error)).rstrip()}"


def report_failure(board: Board, run_id: str, host: int, text: str) -> None:
    """Tell the host's creator; only the first failure of a host is kept."""
    try:
        blob = Blob.create(segment_name(run_id, host, "failure"), text.encode())
    except ChannelError:
        board.command = Command.FAIL  # another process of this host failed first; it may have died before it said so
        return
    board.command = Command.FAIL
    try:
        Board.attach(board_name(run_id, host))
    except ChannelError:  # the host's channels are removed already: so nothing else would remove this one
        blob.unlink()


def read_failure(run_id: str, host: int) -> str:
    """The first failure of a host."""
    return Blob.attach(segment_name(run_id, host, "failure")).read().decode(errors="replace")


# -- host --------------------------------------------------------------------------------------------------------------
# The channels of one host are made by its keeper, the policy's by the trainer or the host's relay; all other processes
# attach them by name, once the board says that they are there:
#     CHANNELS  board, counters and lanes (the environment's spec was known)
#     POLICY    the acting model and the mailbox (the trainer has built its network)


CHANNELS = 1
POLICY = 2
EVALUATION_SLOTS = 3
STATE_ROOM = 4  # times the size of the states at the start, which may grow
LEAST_STATE_ROOM = 1 << 16  # [B]
LOOK_PERIOD = 1.0  # [s] between looks at the command while waiting for the policy

Channel = TypeVar("Channel", Board, Blob, Lane, SampleArea, Mailbox, MessageLane[Message], Counters, Segment)


class HostChannels:
    """The channels of one host as one process holds them. `create` for the host's creator, `attach` for the others."""

    def __init__(self, topology: Topology, host: int, board: Board, *, owner: bool) -> None:
        self.topology = topology
        self.host = host
        self.board = board
        self._owner = owner
        self._dtype = topology.schema.dtype
        self._closing: list[Board | Blob | Lane | SampleArea | Mailbox | MessageLane[Message] | Counters | Segment] = [
            board
        ]
        self.model: ActingModel | None = None
        self.mailbox: Mailbox | None = None
        self.evaluations: Mailbox | None = None
        self.states: Mailbox | None = None  # what the environments of `state_keeper` keep between episodes
        self.lanes: dict[int, Lane] = {}
        self.areas: list[SampleArea] = []
        self.remote_lanes: list[Lane] = []
        self.mirrors: list[Counters] = []
        self.orders: MessageLane[Message] | None = None  # to the other hosts' starters of collectors
        self.reports: MessageLane[Message] | None = None  # from them
        if owner:
            try:
                self._create()
            except BaseException:
                self.close()
                raise
        else:
            self.counters = self._keep(Counters.attach(self._name("counters")))
            if self._holds_states:
                self.states = self._keep(Mailbox.attach(self._name("states")))

    def _create(self) -> None:
        topology = self.topology
        ranks = topology.on_host(self.host)
        self.counters = self._keep(Counters.create(self._name("counters"), len(ranks), topology.columns))
        self.attach_drained(topology.lane_rows())
        if self._holds_states:
            size = STATE_ROOM * topology.spec.state_nbytes * topology.config.env.num_envs
            nbytes = 8 + max(size, LEAST_STATE_ROOM)
            self.states = self._keep(Mailbox.create(self._name("states"), nbytes, EVALUATION_SLOTS, len(ranks)))
        self._keep(Blob.create(self._name("topology"), topology.to_bytes()))

    @classmethod
    def create(cls, topology: Topology, host: int, board: Board) -> HostChannels:
        """Make counters and lanes, and say so on the board (stage CHANNELS)."""
        channels = cls(topology, host, board, owner=True)
        board.ready = CHANNELS
        return channels

    @classmethod
    def attach(cls, run_id: str, host: int, timeout: float) -> HostChannels:
        """Join a host: wait for its channels. ChannelError if they are not there within `timeout` seconds."""
        board = Board.attach(board_name(run_id, host))
        if not board.wait_ready(CHANNELS, timeout):
            raise ChannelError(
                f"the channels of host {host} were not made within {timeout:.0f} s: its trainer or relay did not "
                "start; see its messages"
            )
        topology = Topology.from_bytes(Blob.attach(segment_name(run_id, host, "topology")).read())
        return cls(topology, host, board, owner=False)

    def attach_drained(self, rows: int = 0) -> None:
        """In the trainer, or another host's relay: attach all that it drains, which the keeper has made. rows: in the
        keeper, of a lane, which is made."""
        for rank in self.topology.on_host(self.host):
            if rank.role is Role.ROLLOUT and self.topology.area_columns:
                self.areas.append(self.attach_area(rank.index, make=rows > 0))
            elif rank.role is Role.ROLLOUT:
                self.lanes[rank.index] = self._lane("lane", rank.index, rows)
        if self.host == 0:
            self.attach_remote(rows)

    def in_fork(self) -> HostChannels:
        """The same channels in a forked process, which removes none of them."""
        self._owner = False
        return self

    def attach_lane(self, index: int) -> Lane:
        """The lane of rollout `index`, whose rows ring the host's drain: the trainer's bell here, the relay's
        elsewhere."""
        lane = self._lane("lane", index)
        lane.bell = self.drain_bell
        return lane

    def _lane(self, kind: str, index: int, rows: int = 0) -> Lane:
        """Made for so many rows; 0: attached."""
        name = self._name(kind, index)
        lane = Lane.create(name, self._dtype, rows) if rows else Lane.attach(name, self._dtype)
        lane.streams = self.topology.lane_streams
        return self._keep(lane)

    @property
    def drain_bell(self) -> Doorbell:
        """The bell of who drains this host's lanes: the trainer, elsewhere the relay."""
        return self.board.trainer_bell if self.host == 0 else self.board.relay_bell

    def attach_area(self, index: int, *, make: bool = False) -> SampleArea:
        """The sample area of rollout `index`."""
        config = self.topology.config
        place = (self._name("area", index), self.topology.area_columns, config.areas.block)
        if not make:
            return self._keep(SampleArea.attach(*place))
        return self._keep(SampleArea.create(*place, config.areas.blocks, config.replay.spare_blocks))

    def attach_remote(self, rows: int = 0) -> None:
        """What the root relay writes: a lane and a mirrored counters table for each other host, by host; `orders` and
        `reports` too, where collectors come and go. rows: as of `attach_drained`."""
        topology = self.topology
        for host in range(1, topology.hosts):
            there = len(topology.on_host(host))
            lane = self._lane("remote", host, max(4, there if topology.in_rounds else 0) * rows)  # a round's data fit
            lane.bell = self.board.trainer_bell
            lane.streams *= sum(rank.role is Role.ROLLOUT for rank in topology.on_host(host))
            self.remote_lanes.append(lane)
            name = self._name("mirror", host)
            mirror = Counters.create(name, there, topology.columns) if rows else Counters.attach(name)
            self.mirrors.append(self._keep(mirror))
        if self.remote_lanes and topology.in_rounds:
            opened = MessageLane.create if rows else MessageLane.attach
            self.orders = self._keep(opened(self._name("orders"), RELAYS))
            self.orders.bell = self.board.relay_bell
            self.reports = self._keep(opened(self._name("reports"), RELAYS))
            self.reports.bell = self.board.trainer_bell

    def create_policy(self, model: ActingModel) -> Mailbox:
        """Make the model's blob and the mailbox, and say so on the board (stage POLICY). Where a trainer has made them
        that has died since, the next one takes them over as they are."""
        config = self.topology.config
        if self.board.ready >= POLICY:
            return self._take_over_policy(model)
        readers = len(self.topology.on_host(self.host))
        slots = MAILBOX_SLOTS
        if self.topology.has_relays:  # which hold versions that are on their way
            from ddrl.distribution.relay import (  # the creator alone needs it, not hundreds of rollouts
                readers_needed,
                slots_needed,
            )

            readers = readers + readers_needed(config.cluster)
            slots = max(slots, slots_needed(config.cluster))
        self.model = model
        self.mailbox = self._keep(Mailbox.create(self._name("mailbox"), model.layout.nbytes, slots, readers))
        if self.host == 0 and config.evaluation.period:
            self.evaluations = self._keep(
                Mailbox.create(self._name("evaluations"), model.layout.nbytes, EVALUATION_SLOTS, 1)
            )
        self._keep(Blob.create(self._name("policy"), model.to_bytes()))
        self.board.ready = POLICY
        return self.mailbox

    def _take_over_policy(self, model: ActingModel) -> Mailbox:
        attached = self.attach_policy(0.0)
        assert attached is not None
        if attached[0].layout != model.layout:
            raise ChannelError(
                "the network differs from the one that this run began with: put its code back, or begin a new run"
            )
        if self.host == 0 and self.topology.config.evaluation.period:
            self.evaluations = self.attach_evaluations()
        return attached[1]

    def create_segment(self, kind: str, nbytes: int) -> Segment:
        """Plain memory, which other processes attach by its name. ChannelError where there is no room."""
        return self._keep(Segment.create(self._name(kind), kind, nbytes))

    def attach_policy(
        self, timeout: float, meanwhile: Callable[[], object] = lambda: None
    ) -> tuple[ActingModel, Mailbox] | None:
        """The model and the mailbox, once they are there; None when the run stops first. ChannelError after `timeout`
        seconds. `meanwhile` is done once in LOOK_PERIOD."""
        deadline = time.monotonic() + timeout
        while not self.board.wait_ready(POLICY, LOOK_PERIOD):
            meanwhile()
            if self.board.command not in (Command.RUN, Command.PAUSE):
                return None
            if time.monotonic() > deadline:
                raise ChannelError(
                    f"host {self.host} got no policy within {timeout:.0f} s: the trainer did not start; see its "
                    "messages"
                )
        self.model = ActingModel.from_bytes(self._keep(Blob.attach(self._name("policy"))).read())
        self.mailbox = self._keep(Mailbox.attach(self._name("mailbox")))
        return self.model, self.mailbox

    @property
    def _holds_states(self) -> bool:
        return self.host == 0 and self.topology.state_keeper is not None

    def keep_states(self, data: bytes) -> None:
        """In the rollout `state_keeper`: what checkpoints and evaluations take from now on."""
        assert self.states is not None
        if len(data) > self.states.nbytes - 8:
            print(
                f"ddrl: env.id = {self.topology.config.env.id}: state() has grown to {len(data):,} B, above "
                f"{STATE_ROOM} times what it had at the start: checkpoints keep what it was before",
                file=sys.stderr,
                flush=True,
            )
            return
        vector = np.zeros(self.states.nbytes, np.uint8)
        vector[:8].view(np.uint64)[0] = len(data)
        vector[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        self.states.publish(vector, self.states.last_version + 1)

    def newest_states(self, assignment: Assignment) -> bytes:
        """What the environments of the rollout `state_keeper` keep between episodes, or what the run began with."""
        data = self.model.states if self.model is not None else b""
        if self.states is None:
            return data
        reader = self.states.reader(self.topology.row_of(assignment))
        pin = reader.pin()
        if pin is not None:
            length = int(pin.data[:8].view(np.uint64)[0])
            found = pin.data[8 : 8 + length].tobytes()
            data = found if pin.valid() else data
        reader.release()
        return data

    def attach_evaluations(self) -> Mailbox:
        """The mailbox that the evaluator writes: a policy it has played, with its result in the values."""
        return self._keep(Mailbox.attach(self._name("evaluations")))

    def name_row(self, assignment: Assignment) -> CounterRow:
        """A rank's row, with who it is written."""
        row = self.counters.row(self.topology.row_of(assignment))
        row["rank"].set(assignment.rank)
        row["role"].set(list(Role).index(assignment.role))
        row["host"].set(assignment.host)
        return row

    def counters_row(self, assignment: Assignment) -> CounterRow:
        """This process's own row."""
        row = self.name_row(assignment)
        row["pid"].set(os.getpid())
        return row

    def tables(self) -> NDArray[np.float64]:
        """In the trainer: the counters of all processes on all hosts [ranks, columns]."""
        return np.concatenate([self.counters.table(), *(mirror.table() for mirror in self.mirrors)])

    def watched(self) -> NDArray[np.float64]:
        """In a keeper: the counters of this host, and on the trainer's host those of the other hosts' relays."""
        tables = [self.counters.table()]
        identity = [self.counters.columns.index(name) for name in ("rank", "role", "host")]
        for host, mirror in enumerate(self.mirrors, start=1):
            for row, rank in enumerate(self.topology.on_host(host)):
                if rank.role is Role.RELAY:
                    values = mirror.table()[row : row + 1]
                    values[0, identity] = rank.rank, list(Role).index(Role.RELAY), host  # it may never come
                    tables.append(values)
        return np.concatenate(tables)

    def absent_rollouts(self) -> NDArray[np.bool_]:
        """In the trainer: which rollouts of the job have no process now [rollouts], by index."""
        ended = self.tables()[:, self.counters.columns.index("ended")] == 1.0
        ranks = [rank for host in range(self.topology.hosts) for rank in self.topology.on_host(host)]
        absent = np.zeros(self.topology.rollouts, np.bool_)
        for row, rank in enumerate(ranks):
            if rank.role is Role.ROLLOUT:
                absent[rank.index] = ended[row]
        return absent

    def ask_rollouts(self, count: int) -> None:
        """In the trainer: want so many rollouts on each host, of which its keeper reads; ConfigError where there are
        fewer places."""
        ranks = self.topology.ranks
        hosts = range(self.topology.hosts)
        most = max(sum(one.host == host and one.role is Role.ROLLOUT for one in ranks) for host in hosts)
        if self.topology.in_rounds:
            raise ConfigError(
                f"run.processes = {count}: a round has as many collectors as the run began with: leave it out"
            )
        if count > most:
            raise ConfigError(
                f"run.processes = {count}: there are places for {most} rollouts on a host; start with a higher "
                "run.max_processes, under mpirun with more ranks"
            )
        self.board.values[PROCESSES] = count

    def drained_lanes(self) -> Sequence[Lane]:
        """The lanes that the creator drains: its own rollouts', and at the trainer those of the other hosts."""
        return [*self.lanes.values(), *self.remote_lanes]

    def close(self) -> None:
        """Let go of every channel; the creator also removes their names. The memory goes when the last process ends."""
        if self._owner:
            with suppress(ChannelError):  # there is none
                Blob.attach(self._name("failure")).unlink()
            for channel in reversed(self._closing):
                channel.unlink()
        self._closing.clear()

    def _keep(self, channel: Channel) -> Channel:
        self._closing.append(channel)
        return channel

    def _name(self, kind: str, index: int = 0) -> str:
        return segment_name(self.topology.run_id, self.host, kind, index)


def board_name(run_id: str, host: int) -> str:
    """Name of a host's board, which is made before everything else."""
    return segment_name(run_id, host, "board")

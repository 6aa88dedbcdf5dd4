"""Gradient nodes as ranks of a job: what `ddrl.run` calls by name where learner.nodes is above 0.

`check_nodes` refuses runs that cannot use nodes, `lead_nodes` makes the trainer use them, `node_process` is the life of
a node's rank. A node computes the gradient of the rows and vectors that it is sent. It never steps an optimizer,
publishes, evaluates or records. Where it fails it sends the leader the reason, which continues without it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ddrl.balance.leader import Leader, make_node_sizer
from ddrl.balance.messages import (
    Compute,
    Computed,
    Connection,
    Failed,
    Finish,
    Joined,
    Mapped,
    Message,
    Rows,
    Share,
    SharedMemory,
)
from ddrl.balance.sizes import Observation
from ddrl.channels.board import Command, CounterRow
from ddrl.core.config import Config
from ddrl.core.errors import ChannelError, ConfigError, DdrlError, JobFailed, MessageError, NetworkError
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Assignment, Role
from ddrl.core.specs import Declaration
from ddrl.run.keeper import report_stacks
from ddrl.run.process import flush_denormals, set_torch_threads, spare_collector
from ddrl.run.topology import START_TIMEOUT, HostChannels, Topology, describe, read_failure

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.balance.exchange import Exchange
    from ddrl.run.task import Task

MAX_SLEEP = 0.02  # [s] between polls for messages and for the end of the job
RANK = COLUMNS.index("rank")
ENDED = COLUMNS.index("ended")


# -- in the trainer's process ------------------------------------------------------------------------------------------


def check_nodes(config: Config, declaration: Declaration, ranks: Sequence[Assignment]) -> None:
    """ConfigError where these ranks, this algorithm or the sizer's settings do not allow gradient nodes."""
    if all(rank.role is not Role.NODE for rank in ranks):
        raise ConfigError(
            f"learner.nodes = {config.learner.nodes} needs ranks for the nodes: start with mpirun -n N python "
            "-m ddrl.run, or set learner.nodes = 0"
        )
    source = declaration.experience.source
    if source != "replay":
        raise ConfigError(
            f"learner.nodes: {declaration.algorithm} learns from {source}, but nodes are given parts of "
            "batches that a replay draws; set learner.nodes = 0"
        )
    cluster, sizer = make_node_sizer(config, list(range(config.learner.nodes)))
    sizer.propose(Observation.blank(cluster))


def lead_nodes(comm: MPI.Intracomm, task: Task, channels: HostChannels) -> Leader:
    """Make the task's training take its gradients from the nodes of `comm`, until the leader's `close`."""
    from ddrl.balance.exchange import Exchange

    ranks = [member.rank for member in task.topology.ranks if member.role is Role.NODE]
    training = task.training

    def check_job() -> None:
        if task.board.command == Command.FAIL:
            raise JobFailed(read_failure(task.topology.run_id, 0))

    def ended_nodes() -> list[int]:
        table = channels.tables()
        return [ranks.index(int(rank)) for rank in table[table[:, ENDED] == 1.0, RANK] if rank in ranks]

    leader = Leader(
        comm,
        Exchange(training.learner),
        task.config,
        counters=training.ends.counters,
        check_job=check_job,
        notify=partial(task.recorder.record_event, "note"),
        make_segment=channels.create_segment,
        ended_nodes=ended_nodes,
    )
    training.gradients = leader
    return leader


# -- in a node's process -----------------------------------------------------------------------------------------------


def node_process(comm: MPI.Comm, topology: Topology, assignment: Assignment) -> int:
    """Compute gradients until the leader ends the work or the job fails; the process's exit status."""
    channels = HostChannels.attach(topology.run_id, assignment.host, START_TIMEOUT)
    counters = channels.counters_row(assignment)
    board = channels.board
    config = topology.config
    place = [rank for rank in topology.on_host(assignment.host) if rank.role is Role.NODE].index(assignment)

    def make_exchange() -> Exchange:
        from ddrl.balance.exchange import Exchange, node_device
        from ddrl.learner.checks import checked_learner
        from ddrl.replay.sources import small_source

        set_torch_threads(config.learner.threads)
        source = small_source(config, topology.schema, topology.declaration.experience)
        device = node_device(config.learner.device, place)
        exchange = Exchange(checked_learner(config, topology.spec, source, lambda text: None, device))
        spare_collector()
        flush_denormals()
        return exchange

    try:
        serve(comm, make_exchange, counters, lambda: board.command != Command.FAIL)
    finally:
        counters["ended"].set(1.0)
    return 1 if board.command == Command.FAIL else 0


def serve(
    comm: MPI.Comm,
    make_exchange: Callable[[], Exchange],
    counters: CounterRow | None,
    job_continues: Callable[[], bool],
) -> None:
    """Answer the leader, rank 0 of `comm`, until it ends the work or `job_continues()` is False. A failure is sent to
    the leader."""
    connection = Connection(comm, counters)
    report_stacks(2)
    try:
        exchange = make_exchange()
        connection.send(Joined(exchange.signature), 0)
        node = Node(connection, comm.Get_rank() - 1, exchange, counters)
        while (request := _await_message(connection, counters, job_continues)) is not None:
            match request:
                case Share():
                    node.map(request)
                case Compute():
                    node.answer(request)
                case Finish():
                    return
                case _:
                    raise MessageError(f"the leader has sent a message of a node's: {type(request).__name__}")
    except DdrlError as error:
        connection.send(Failed(str(error)), 0)
    except Exception as error:
        connection.send(Failed(describe(error, f"node {comm.Get_rank() - 1}")), 0)
    finally:
        connection.flush()


def _await_message(
    connection: Connection, counters: CounterRow | None, job_continues: Callable[[], bool]
) -> Message | None:
    """The leader's next message; None once the job has failed. A node that waits shows that it lives."""
    begun = time.perf_counter()
    while job_continues():
        if counters is not None:
            counters["heartbeat"].set(time.time())
        rings = connection.rings
        received = connection.take()
        if received is not None:
            return received[1]
        connection.sleep(rings, begun, MAX_SLEEP)
    return None


class Node:
    """Computes what requests ask for."""

    def __init__(self, connection: Connection, number: int, exchange: Exchange, counters: CounterRow | None) -> None:
        self._connection = connection
        self._number = number
        self._exchange = exchange
        self._counters = counters
        self._vectors_memory: SharedMemory | None = None  # the shared memory, where it has vectors
        self._gradients = {part: exchange.buffer(part) for part in exchange.learner.parts}

    def answer(self, request: Compute) -> None:
        """Take the vectors that the request names, compute, and send the gradient. NetworkError where the algorithm
        gives none."""
        from ddrl.balance.exchange import norm

        learner = self._exchange.learner
        begin = time.perf_counter()
        self._update_vectors(request)
        learner.seed(request.seed)
        rows = Rows(request.rows, request.place)
        gradient = self._exchange.gradient(rows, request.part, request.statistics or request.observed)
        if gradient is None:
            raise NetworkError(
                f"{learner.algorithm.name} gave evaluations but no loss for part {request.part}: with learner.nodes a "
                "part is passed over by giving no evaluations"
            )
        figures = {name: float(value) for name, value in gradient.figures.items()}
        buffer = self._gradients[request.part]
        vector = self._exchange.flat(gradient, buffer)
        memory = self._vectors_memory
        if memory is not None and vector.ctypes.data != buffer.ctypes.data:
            np.copyto(buffer, vector)
        reply = Computed()
        if request.statistics:
            reply.figures = figures
        if request.observed:
            reply.norm = norm(gradient)
            reply.loss = figures["loss"]
        if gradient.priority is not None:
            reply.priority = gradient.priority.cpu().numpy()
        seconds = time.perf_counter() - begin
        self._connection.send(reply, 0)
        if memory is None:
            self._connection.post(vector, 0)
        self._connection.flush()
        if self._counters is not None:
            self._count(self._counters, request, seconds)

    def map(self, share: Share) -> None:
        """Map the leader's memory if this node is on the leader's host, and say whether it is."""
        ranks = self._connection.comm.Get_size()
        with contextlib.suppress(ChannelError):  # on another host there is none of this name
            memory = SharedMemory.attach(
                share.memory, self._exchange, ranks, self._number, has_vectors=share.has_vectors
            )
            self._connection.memory = memory
            if share.has_vectors:
                self._vectors_memory = memory
                self._gradients = memory.gradients[self._number]
        self._connection.send(Mapped(self._connection.memory is not None), 0)

    def _update_vectors(self, request: Compute) -> None:
        memory = self._vectors_memory
        if memory is not None:
            memory.read(request.vectors)
        else:
            for name in request.vectors:
                vector = self._exchange.vector(name)
                self._connection.receive_vector(0, vector, lambda: True)
                self._exchange.set_vector(name, vector)
        self._exchange.set_updates(request.updates)

    def _count(self, counters: CounterRow, request: Compute, seconds: float) -> None:
        counters["gradients"].add(1)
        counters["gradient_seconds"].add(seconds)
        counters["gradients_late"].set(request.late)
        counters["gradients_dropped"].set(request.dropped)
        if request.part == next(iter(self._exchange.learner.parts)) and request.samples:
            counters["node_size"].set(request.samples)
            counters["node_seconds"].set(request.seconds)

"""A gradient node: gets rows and vectors, gives the gradient of these rows. Pure but for the vectors that it holds.

It never steps an optimizer, publishes, evaluates or records. A node that cannot go on says why to the leader, which
goes on without it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Command, CounterRow
from ddrl.core.errors import ChannelError, DdrlError, NetworkError
from ddrl.core.roles import Assignment, Role
from ddrl.distribution.waits import rest
from ddrl.run.members import START_TIMEOUT
from ddrl.run.nodes.bells import Bells
from ddrl.run.nodes.messages import (
    MESSAGE,
    TO_NODE,
    VECTOR,
    Fields,
    Order,
    Record,
    Reply,
    Rows,
    Task,
    arrays_of,
    pack,
    receive,
    unpack,
)
from ddrl.run.nodes.shared import SharedVectors
from ddrl.run.process import flush_denormals, set_torch_threads, spare_collector
from ddrl.run.topology import HostChannels, Topology, describe

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.learner.exchange import Exchange
    from ddrl.run.nodes.replays import OwnReplay

LONGEST = 0.02  # [s] between two looks for messages


def node_process(comm: MPI.Comm, topology: Topology, mine: Assignment) -> int:
    """Compute gradients until the leader says that it is enough, or the job fails; the process's exit status."""
    channels = HostChannels.attach(topology.run_id, mine.host, START_TIMEOUT)
    counters = channels.counters_row(mine)
    board = channels.board
    config = topology.config
    place = [rank for rank in topology.on_host(mine.host) if rank.role is Role.NODE].index(mine)

    def make_exchange() -> Exchange:
        from ddrl.learner.exchange import Exchange, node_device
        from ddrl.learner.learner import Learner

        set_torch_threads(config.learner.threads)
        exchange = Exchange(Learner.of(config, topology.spec, node_device(config.learner.device, place)))
        spare_collector()
        flush_denormals()
        return exchange

    def make_replay() -> OwnReplay:
        from ddrl.run.nodes.replays import OwnReplay

        return OwnReplay(config, topology.schema, topology.declaration.experience, mine.index)

    own = make_replay if config.learner.node_replay == "own" else None
    try:
        serve(comm, make_exchange, counters, lambda: board.command != Command.FAIL, own)
    finally:
        counters["ended"].set(1.0)
    return 1 if board.command == Command.FAIL else 0


def serve(
    comm: MPI.Comm,
    make_exchange: Callable[[], Exchange],
    counters: CounterRow | None,
    going: Callable[[], bool],
    make_replay: Callable[[], OwnReplay] | None = None,
) -> None:
    """Answer the leader, rank 0 of `comm`, until it says that it is enough or `going` says no. `make_replay`: where
    the node has a replay of its own."""
    try:
        exchange = make_exchange()
        replay = make_replay() if make_replay is not None else None
        _send(comm, Reply(signature=exchange.signature))
        node = Node(comm, exchange, counters, replay)
        while (message := _await_message(comm, going, node.bells)) is not None:
            header, arrays = unpack(message, TO_NODE)
            if not isinstance(header, Task):
                node.keep(header, arrays)
            elif header.part:
                node.answer(header, arrays, message.nbytes)
            else:
                return
    except DdrlError as error:
        _send(comm, Reply(failure=str(error)))
    except Exception as error:
        _send(comm, Reply(failure=describe(error, f"node {comm.Get_rank() - 1}")))


class Node:
    """The computing half of a node; the other half waits."""

    def __init__(
        self, comm: MPI.Comm, exchange: Exchange, counters: CounterRow | None, replay: OwnReplay | None = None
    ) -> None:
        self._comm = comm
        self._exchange = exchange
        self._counters = counters
        self._replay = replay
        self._drawable = False  # the leader knows that there is something to draw
        self._gradients = {part: exchange.buffer(part) for part in exchange.learner.parts}
        self._shared: SharedVectors | None = None
        self.bells: Bells | None = None  # shared with the leader, once it has told their name
        self._count: dict[str, Any] = {}

    def keep(self, message: Record | Order, arrays: Fields) -> None:
        """Something for the node's own replay."""
        assert self._replay is not None
        if isinstance(message, Order):
            reply = self._replay.follow(message)
            self._drawable = self._replay.held[0] > 0
            _send(self._comm, reply)
            return
        self._replay.record(arrays["rows"], message.newest_version)
        if not self._drawable and self._replay.held[0]:
            self._drawable = True
            _send(self._comm, Reply(held=self._replay.held))

    def answer(self, task: Task, arrays: Fields, nbytes: int) -> None:
        """Take the vectors that the task names, compute, and send the gradient."""
        from mpi4py import MPI

        from ddrl.learner.exchange import norm

        exchange = self._exchange
        learner = self._exchange.learner
        begin = time.perf_counter()
        self._map(task)
        if task.mapped and self._shared is not None:
            self._shared.read(task.vectors)
        for name in () if task.mapped else task.vectors:
            vector = exchange.vector(name)
            self._comm.Recv(vector, 0, VECTOR)
            exchange.set_vector(name, vector)
            nbytes += vector.nbytes
        exchange.set_updates(task.updates)
        learner.seed(task.seed)
        rows = Rows(arrays if self._replay is None else arrays_of(self._replay.rows(task)), task.place)
        gradient = learner.gradient(rows, task.part, task.statistics or task.observed)
        if gradient is None:
            raise NetworkError(
                f"{learner.algorithm.name} gave evaluations but no loss for part {task.part}: with learner.nodes a "
                "part is passed over by giving no evaluations"
            )
        figures = {name: float(value) for name, value in gradient.figures.items()}
        priority = None if gradient.priority is None else gradient.priority.cpu().numpy()
        memory = self._gradients[task.part]
        mapped = self._shared is not None and bool(task.mapped or task.segment)
        vector = exchange.flat(gradient, memory)
        if mapped and vector.ctypes.data != memory.ctypes.data:
            np.copyto(memory, vector)
        held = None
        arrays = {} if priority is None else {"priority": priority}
        if self._replay is not None:
            held = self._replay.held
            arrays = arrays | self._replay.learned(priority)
        answer = Reply(held=held, gradient=True, mapped=mapped, figures=figures if task.statistics else {})
        answer.rings = self.bells is not None
        if task.observed:
            answer.norm = norm(gradient)
            answer.loss = figures["loss"]
        reply = pack(answer, arrays)
        seconds = time.perf_counter() - begin
        sent = reply.nbytes
        requests = [self._comm.Isend(reply, 0, MESSAGE)]
        if not mapped:
            requests.append(self._comm.Isend(vector, 0, VECTOR))
            sent += vector.nbytes
        if self.bells is not None:
            self.bells[0].ring()
        MPI.Request.Waitall(requests)
        if self._counters is not None:
            self._count_answer(self._counters, task, seconds, nbytes, sent)

    def _map(self, task: Task) -> None:
        """The shared memories that the task names, where this node can map them: gradients then stand there."""
        size = self._comm.Get_size()
        node = self._comm.Get_rank() - 1
        with contextlib.suppress(ChannelError):  # they are on another host
            if task.bells:
                self.bells = Bells.attach(task.bells, size)
            if task.segment:
                self._shared = SharedVectors.attach(task.segment, self._exchange, size - 1, node)
                self._gradients = self._shared.gradients[node]

    def _count_answer(self, counters: CounterRow, task: Task, seconds: float, received: int, sent: int) -> None:
        counters["gradients"].add(1)
        counters["gradient_seconds"].add(seconds)
        counters["bytes_received"].add(received)
        counters["bytes_sent"].add(sent)
        counters["heartbeat"].set(time.time())
        counters["gradients_late"].set(task.late)
        counters["gradients_dropped"].set(task.dropped)
        if task.part == next(iter(self._exchange.learner.parts)) and task.samples:
            counters["node_size"].set(task.samples)
            counters["node_seconds"].set(task.seconds)


def _send(comm: MPI.Comm, reply: Reply) -> None:
    comm.Send(pack(reply, {}), 0, MESSAGE)


def _await_message(comm: MPI.Comm, going: Callable[[], bool], bells: Bells | None) -> np.ndarray | None:
    """The leader's next message; None once `going` says no."""
    begun = time.perf_counter()
    bell = None if bells is None else bells[comm.Get_rank()]
    rung = 0 if bell is None else bell.value
    while (received := receive(comm, 0)) is None:
        if not going():
            return None
        if bell is None:
            rest(begun, longest=LONGEST)
        else:
            rung = bell.wait(rung, LONGEST)
    return received[1]

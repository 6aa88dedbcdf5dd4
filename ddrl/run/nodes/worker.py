"""A gradient node: gets rows and vectors, gives the gradient of these rows. Pure but for the vectors that it holds.

It never steps an optimizer, publishes, evaluates or records. A node that cannot go on says why to the leader, which
goes on without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Command
from ddrl.channels.counters import CounterRow
from ddrl.core.errors import DdrlError, NetworkError
from ddrl.core.roles import Assignment, Role
from ddrl.distribution.transport.waits import rest
from ddrl.run.failure import describe
from ddrl.run.host import HostChannels
from ddrl.run.members import START_TIMEOUT
from ddrl.run.nodes.messages import MESSAGE, VECTOR, Reply, Rows, Task, pack, unpack
from ddrl.run.process import flush_denormals, set_torch_threads, spare_collector
from ddrl.run.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.learner.exchange import Exchange

LONGEST = 0.02  # [s] between two looks for messages


def node_process(comm: MPI.Comm, topology: Topology, mine: Assignment) -> int:
    """Compute gradients until the leader says that it is enough, or the job fails; the process's exit status."""
    channels = HostChannels.attach(topology.run_id, mine.host, START_TIMEOUT)
    counters, board, config = channels.counters_row(mine), channels.board, topology.config
    place = [rank for rank in topology.on_host(mine.host) if rank.role is Role.NODE].index(mine)

    def make_exchange() -> Exchange:
        from ddrl.learner.exchange import Exchange, node_device
        from ddrl.learner.learner import Learner

        set_torch_threads(config.learner.threads)
        exchange = Exchange(Learner.of(config, topology.spec, node_device(config.learner.device, place)))
        spare_collector()
        flush_denormals()
        return exchange

    try:
        serve(comm, make_exchange, counters, lambda: board.command != Command.FAIL)
    finally:
        counters["ended"].set(1.0)
    return 1 if board.command == Command.FAIL else 0


def serve(
    comm: MPI.Comm, make_exchange: Callable[[], Exchange], counters: CounterRow | None, going: Callable[[], bool]
) -> None:
    """Answer the leader, rank 0 of `comm`, until it says that it is enough or `going` says no."""
    try:
        exchange = make_exchange()
        _send(comm, Reply(signature=exchange.signature))
        node = Node(comm, exchange, counters)
        while (message := _await_message(comm, going)) is not None:
            task, arrays = unpack(message, Task)
            if not task.part:
                return
            node.answer(task, Rows(arrays, task.place), message.nbytes)
    except DdrlError as error:
        _send(comm, Reply(failure=str(error)))
    except Exception as error:
        _send(comm, Reply(failure=describe(error, f"node {comm.Get_rank() - 1}")))


class Node:
    """The computing half of a node; the other half waits."""

    def __init__(self, comm: MPI.Comm, exchange: Exchange, counters: CounterRow | None) -> None:
        self._comm, self._exchange, self._counters = comm, exchange, counters
        self._gradients = {part: exchange.buffer(part) for part in exchange.learner.parts}
        self._count: dict[str, Any] = {}

    def answer(self, task: Task, rows: Rows, nbytes: int) -> None:
        """Take the vectors that the task names, compute, and send the gradient."""
        exchange, learner = self._exchange, self._exchange.learner
        begin = time.perf_counter()
        for name in task.vectors:
            vector = exchange.vector(name)
            self._comm.Recv(vector, 0, VECTOR)
            exchange.set_vector(name, vector)
            nbytes += vector.nbytes
        exchange.set_updates(task.updates)
        learner.seed(task.seed)
        gradient = learner.gradient(rows, task.part, task.statistics)
        if gradient is None:
            raise NetworkError(
                f"{learner.algorithm.name} gave evaluations but no loss for part {task.part}: with learner.nodes a "
                "part is passed over by giving no evaluations"
            )
        figures = {name: float(value) for name, value in gradient.figures.items()}
        arrays = {} if gradient.priority is None else {"priority": gradient.priority.cpu().numpy()}
        vector = exchange.flat(gradient, self._gradients[task.part])
        reply = pack(Reply(figures=figures), arrays)
        seconds = time.perf_counter() - begin
        self._comm.Send(reply, 0, MESSAGE)
        self._comm.Send(vector, 0, VECTOR)
        if self._counters is not None:
            self._count_answer(self._counters, task, seconds, nbytes, reply.nbytes + vector.nbytes)

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


def _await_message(comm: MPI.Comm, going: Callable[[], bool]) -> np.ndarray | None:
    """The leader's next message; None once `going` says no."""
    from mpi4py import MPI

    status, begun = MPI.Status(), time.perf_counter()
    while (message := comm.Improbe(0, MESSAGE, status)) is None:
        if not going():
            return None
        rest(begun, longest=LONGEST)
    data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
    message.Recv(data)
    return data

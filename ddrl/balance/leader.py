"""The leader of data-parallel training: divides each batch among gradient nodes and sums what they return.

It takes the learner's place where training asks for a gradient (`GradientSource`) and computes none itself. Each part
of the algorithm has its own sizer, rules of collection and rows to deal again (`PartBatches`). Nodes are sent the
vectors that have changed since their last request, so they need no optimizer and hold the same bits on any processor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.balance import BalanceConfig
from ddrl.balance.collection import Collection
from ddrl.balance.messages import (
    Compute,
    Computed,
    Connection,
    Failed,
    Finish,
    Joined,
    MakeSegment,
    Mapped,
    Share,
    SharedMemory,
    arrays_of,
    count_rows,
    join_rows,
    take_rows,
)
from ddrl.balance.sizers import PACKAGE, NoiseScale, Sizer
from ddrl.balance.sizes import Cluster, Observation, Sizes, proportional_sizes
from ddrl.channels.board import CounterRow
from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import ChannelError, ConfigError, JobFailed, MessageError
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Floats32
from ddrl.distribution.requests import nothing

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.balance.exchange import Exchange, Vector
    from ddrl.learner.part import Gradient

MAX_SLEEP = 0.01  # [s] between polls for messages and for what ends the job
CHECK_PERIOD = 1.0  # [s] between checks of which nodes live
END_TIMEOUT = 30.0  # [s] for outstanding gradients when the run ends
BOOKKEEPING = ("pick_epi", "pick_pos", "policy_version")  # fields of a batch that no gradient depends on
GRADIENT_COLUMNS = ("norm", "cosine", "loss", "staleness", "dropped")  # of an observation
UNLIMITED = 1 << 40  # [samples] for a node without balance.max_sizes


@dataclass
class NodeStatus:
    """What the leader knows of one node."""

    versions: dict[str, int] = field(default_factory=dict[str, int])  # of the vectors that it has
    shares_memory: bool = False  # it has mapped the doorbells, and the vectors where there are any
    part: str = ""  # that it computes a gradient of now; "": it is free
    rows: Any = None  # that it computes this gradient of
    dealt_at: float = 0.0
    late: int = 0  # gradients so far
    dropped: int = 0
    samples: int = 0  # of its last gradient
    seconds: float = math.nan  # that it took


@dataclass
class Answer:
    """An accepted gradient that the next update uses."""

    rows: Any
    vector: Vector
    priority: Floats32 | None
    figures: Mapping[str, float]
    norm: float
    in_memory: bool


class PartBatches:
    """How the batches of one part of the algorithm are divided among `nodes`. ConfigError where they cannot hold
    one."""

    def __init__(self, config: Config, nodes: list[int]) -> None:
        self._config = config
        self._settings = config.section(BalanceConfig)
        self.collection = Collection(self._settings)
        self.answers: dict[tuple[Hashable, int], Answer] = {}  # by node and version
        self.undealt: list[Any] = []  # rows
        self.buffers: list[Vector] = []  # free memory for gradients
        self.whole_batch: list[tuple[int, int]] = []  # node and version of the answers that make up exactly one batch
        self.set_nodes(nodes)

    def set_nodes(self, nodes: list[int]) -> None:
        """Size for these nodes from here on. ConfigError where they cannot hold a batch."""
        self.nodes = nodes
        self.cluster, self._sizer = make_node_sizer(self._config, nodes)
        self.sizes = self._sizer.propose(Observation.blank(self.cluster))
        self.reads_gradients = bool(getattr(self._sizer, "reads_gradients", False))
        # True: every update of the run awaits all gradients.
        self.awaits_all = not self._settings.first and self._sizer.first() is None
        self._noise_scale = NoiseScale()
        self._clear()
        self.collection.settings = replace(self._settings, first=min(self._settings.first, len(nodes)))

    def _clear(self) -> None:
        """Forget what was measured since the last sizes."""
        self._dealt = np.zeros(len(self.nodes), np.int64)
        self._seconds = np.zeros(len(self.nodes))
        self._gradients = {name: np.zeros(len(self.nodes)) for name in GRADIENT_COLUMNS}

    def record(self, node: int, samples: int, seconds: float, reply: Computed, age: int, dropped: bool) -> None:
        """A gradient of `samples` took `seconds`; its vectors were `age` versions old when it arrived."""
        place = self.nodes.index(node)
        self._dealt[place] = samples
        self._seconds[place] = seconds
        values = (reply.norm, 0.0, reply.loss, age, dropped)
        for name, value in zip(GRADIENT_COLUMNS, values, strict=True):
            self._gradients[name][place] = value if math.isfinite(value) else 0.0

    def record_cosines(self, cosines: Mapping[tuple[Hashable, int], float], mean_norm: float) -> None:
        """Cosines of gradients, by node and version, to the mean that an update used, and the mean's norm. A dropped
        gradient is in no mean: its cosine stays 0."""
        places: dict[Hashable, int] = {node: place for place, node in enumerate(self.nodes)}
        for (node, _), cosine in cosines.items():
            if node in places and math.isfinite(cosine):
                self._gradients["cosine"][places[node]] = cosine
        known = self._dealt > 0
        self._noise_scale.update(self._dealt[known], self._gradients["norm"][known], mean_norm)

    def propose(self) -> None:
        """Set the next sizes from what was measured since the last ones."""
        gradients = {**self._gradients, "noise_scale": self._noise_scale.value}
        observation = Observation.of(self.cluster, self._dealt, self._seconds, self._seconds > 0, **gradients)
        self.sizes = self._sizer.propose(observation)
        first = self._sizer.first()
        if first is not None:
            if self.awaits_all:
                raise ConfigError(f"balance.sizer = {self._settings.sizer} chose K after its first sizes alone")
            self.collection.settings = replace(self.collection.settings, first=int(first))
        self._clear()

    def divide(self, rows: int, free: list[int]) -> Sizes:
        """Sizes of the parts of `rows` for these nodes; they sum to less than `rows` where they cannot hold them."""
        if free == self.nodes and rows == self.cluster.total:
            return self.sizes
        places = [self.nodes.index(node) for node in free]
        upper = self._max_sizes()[places]
        total = min(rows, int(upper.sum()))
        lower = np.minimum(np.ones_like(upper), upper)
        return proportional_sizes(total, self.sizes[places].astype(np.float64), lower, upper)

    def can_deal(self, free: list[int]) -> bool:
        """Whether the free nodes can hold what is undealt, or as much of it as all nodes ever can."""
        limits = self._max_sizes()
        room = int(limits[[self.nodes.index(node) for node in free]].sum())
        return room >= min(sum(map(count_rows, self.undealt)), int(limits.sum()))

    def _max_sizes(self) -> Sizes:
        limits = self._settings.max_sizes
        return np.array([limits[node] if limits else UNLIMITED for node in self.nodes], np.int64)


def make_node_sizer(config: Config, nodes: list[int]) -> tuple[Cluster, Sizer]:
    """The sizer that balance.sizer names, for these of the run's nodes. ConfigError where it cannot be used."""
    settings = config.section(BalanceConfig)
    limits = [settings.max_sizes[node] for node in nodes] if settings.max_sizes else None
    cluster = Cluster.of(config.learner.batch_size, np.ones(len(nodes)), limits)
    kind = plugins.load("balance.sizer", PACKAGE, settings.sizer)
    return cluster, kind(cluster, plugin_settings(config, "balance", kind))


class Leader:
    """Rank 0 of `comm`; all other ranks are nodes.

    check_job: called while waiting; raises what ends the job. notify: reports to the user. make_segment: makes memory
    that the nodes of this host can map; without it everything is sent. ended_nodes: nodes whose processes have ended.
    ConfigError where the nodes cannot hold a batch."""

    def __init__(
        self,
        comm: MPI.Comm,
        exchange: Exchange,
        config: Config,
        *,
        counters: CounterRow | None = None,
        check_job: Callable[[], object] = nothing,
        notify: Callable[[str], object] = lambda text: None,
        make_segment: MakeSegment | None = None,
        ended_nodes: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._connection = Connection(comm, counters)
        self._counters = counters
        self._exchange = exchange
        self._config = config
        self._check_job = check_job
        self._notify = notify
        self._ended_nodes = ended_nodes
        self._next_check = 0.0
        self.nodes = {node: NodeStatus() for node in range(comm.Get_size() - 1)}
        self.parts = {part: PartBatches(config, list(self.nodes)) for part in exchange.learner.parts}
        self._absent = set(self.nodes)  # nodes that have not sent their signature, or not tried to map the memory
        if make_segment is not None:
            has_vectors = all(batches.awaits_all for batches in self.parts.values())
            try:
                memory = SharedMemory.create(make_segment, exchange, comm.Get_size(), has_vectors=has_vectors)
                self._connection.memory = memory
            except ChannelError as error:
                notify(f"gradients are sent as messages, which is slower: {error}")

    # ---- a gradient ------------------------------------------------------------------------------------------------

    def gradient(self, batch: Any, part: str, statistics: bool = True) -> Gradient | None:
        """The gradient of a part's loss over a batch, from the nodes; None where the algorithm passes the part over.

        JobFailed where no node is left."""
        if not self._exchange.learner.takes(batch, part):
            return None
        self._wait(lambda: not self._absent)
        batches = self.parts[part]
        batches.undealt.append(batch)
        collection = batches.collection
        ready = False
        while not ready:  # repeated only if every node that this was dealt to has left
            self._wait(lambda: batches.can_deal(self._free_nodes()))
            self._deal(batch, part, statistics)
            self._wait(
                lambda: collection.ready(time.perf_counter()) or not (collection.targets or collection.holds),
                lambda: collection.deadline - time.perf_counter(),
            )
            ready = collection.ready(time.perf_counter())
        return self._sum(batches, part)

    def _memory_of(self, state: NodeStatus) -> SharedMemory | None:
        """The shared memory, where this node reads its vectors and writes its gradients there."""
        memory = self._connection.memory
        return memory if memory is not None and memory.has_vectors and state.shares_memory else None

    def _free_nodes(self) -> list[int]:
        return [node for node, state in self.nodes.items() if not state.part]

    def _deal(self, batch: Any, part: str, statistics: bool) -> None:
        """Send each free node its rows of what is undealt."""
        batches = self.parts[part]
        free = self._free_nodes()
        learner = self._exchange.learner
        rows = join_rows(batches.undealt)
        total = count_rows(rows)
        sizes = batches.divide(total, free).tolist()
        updates = tuple(one.updates for one in learner.parts.values())
        entropy = np.random.SeedSequence([self._config.run.seed, *updates, *part.encode()])
        request = Compute(
            part,
            updates,
            seed=int(entropy.generate_state(1)[0]),
            statistics=statistics,
            observed=batches.reads_gradients,
        )
        versions = self._exchange.versions()
        sent_vectors: dict[str, Vector] = {}
        batches.collection.begin(time.perf_counter(), dict(zip(free, sizes, strict=True)))
        start = 0
        for node, size in zip(free, sizes, strict=True):
            state = self.nodes[node]
            state.part = part
            state.rows = take_rows(rows, start, start + size)
            state.dealt_at = time.perf_counter()
            request.place = (start, total)
            self._send_request(node, request, versions, sent_vectors, copy=not batches.awaits_all)
            start += size
        batches.undealt = [take_rows(rows, start, total)] if start < total else []
        version = batches.collection.version
        is_whole_batch = rows is batch and start == total
        batches.whole_batch = [(node, version) for node in free] if is_whole_batch else []

    def _send_request(
        self, node: int, request: Compute, versions: dict[str, int], sent_vectors: dict[str, Vector], *, copy: bool
    ) -> None:
        """Complete the request for a node and send it with the vectors that changed. `copy` these: where not every
        gradient is awaited, the learner changes its vectors while they are still being sent."""
        state = self.nodes[node]
        request.vectors = tuple(name for name, version in versions.items() if state.versions.get(name) != version)
        request.late = state.late
        request.dropped = state.dropped
        request.samples = state.samples
        request.seconds = state.seconds
        state.versions = versions
        memory = self._memory_of(state)
        if memory is not None:
            memory.publish({name: versions[name] for name in request.vectors})
        request.rows = {name: array for name, array in arrays_of(state.rows).items() if name not in BOOKKEEPING}
        self._connection.send(request, node + 1)
        if memory is not None:
            return
        for name in request.vectors:
            if name not in sent_vectors:
                vector = self._exchange.vector(name)
                sent_vectors[name] = vector.copy() if copy else vector
            self._connection.post(sent_vectors[name], node + 1)

    def _sum(self, batches: PartBatches, part: str) -> Gradient:
        """The update's gradient from the accepted answers; then the next sizes."""
        update = batches.collection.finish(time.perf_counter())
        keys = sorted(update.weights)
        answers = [batches.answers.pop(key) for key in keys]
        weights = [update.weights[key] for key in keys]
        priorities = [answer.priority for answer in answers if answer.priority is not None]
        vectors = [answer.vector for answer in answers]
        gradient = self._exchange.sum(
            part,
            vectors,
            weights,
            update.samples,
            np.concatenate(priorities) if len(priorities) == len(answers) else None,
            mean_figures([answer.figures for answer in answers], weights),
            None if keys == batches.whole_batch else join_rows([answer.rows for answer in answers]),
        )
        if batches.reads_gradients:
            norms = [answer.norm for answer in answers]
            cosines, mean_norm = self._exchange.cosines(gradient, vectors, weights, norms)
            batches.record_cosines(dict(zip(keys, cosines, strict=True)), mean_norm)
        batches.buffers += [answer.vector for answer in answers if not answer.in_memory]
        batches.propose()
        return gradient

    # ---- messages --------------------------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool], remaining: Callable[[], float] = lambda: MAX_SLEEP) -> None:
        """Receive until `condition` is true; after `remaining` [s] it may become true without a message."""
        begun = time.perf_counter()
        while not condition():
            rings = self._connection.rings
            if self._receive():
                begun = time.perf_counter()
                continue
            self._check_job()
            if self._check_nodes():
                continue
            longest = max(0.0, min(MAX_SLEEP, remaining()))
            all_ring = all(state.shares_memory for state in self.nodes.values())
            self._connection.sleep(rings, begun, longest, all_ring=all_ring)

    def _check_nodes(self) -> bool:
        """Every CHECK_PERIOD: remove nodes whose processes have died; whether there were any. A node that hangs is
        found by the keeper of its host, which ends the job."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_PERIOD
        dead = [node for node in self._ended_nodes() if node in self.nodes]
        for node in dead:
            self._remove(node, "its process has died")
        if self._counters is not None:
            self._counters["heartbeat"].set(time.time())  # a trainer that waits for nodes lives
        return bool(dead)

    def _receive(self) -> bool:
        """Handle one message, if one has arrived."""
        received = self._connection.take()
        if received is None:
            return False
        node = received[0] - 1
        reply = received[1]
        if node not in self.nodes:  # it was removed; its rows are dealt again
            return True
        match reply:
            case Joined():
                self._greet(node, reply)
            case Mapped():
                self.nodes[node].shares_memory = reply.shares_memory
                self._absent.discard(node)
            case Computed():
                self._accept(node, reply)
            case Failed():
                self._remove(node, reply.reason)
            case _:
                raise MessageError(f"node {node} has sent a message of the leader's: {type(reply).__name__}")
        return True

    def _greet(self, node: int, reply: Joined) -> None:
        """A node has started. ConfigError where its networks are not the trainer's."""
        expected = self._exchange.signature
        memory = self._connection.memory
        if memory is None or reply.signature != expected:  # else it is still to map the memory
            self._absent.discard(node)
        for what in sorted(expected.keys() | reply.signature.keys()):
            if expected.get(what) != reply.signature.get(what):
                raise ConfigError(
                    f"node {node} has {what} = {reply.signature.get(what)}, the trainer {expected.get(what)}: nodes "
                    "must hold the same networks; start every rank with the same code and packages"
                )
        if memory is not None:
            self._connection.send(Share(memory.name, memory.has_vectors), node + 1)

    def _accept(self, node: int, reply: Computed) -> None:
        """A node's gradient has arrived: keep it for the next update, or drop it."""
        state = self.nodes[node]
        batches = self.parts[state.part]
        collection = batches.collection
        version = collection.computing(node)
        memory = self._memory_of(state)
        if memory is not None:
            vector = memory.gradients[node][state.part]
        else:
            vector = batches.buffers.pop() if batches.buffers else self._exchange.buffer(state.part)
            if not self._connection.receive_vector(node + 1, vector, lambda: self._is_alive(node)):
                return
        now = time.perf_counter()
        rows = state.rows
        state.samples = count_rows(rows)
        state.seconds = now - state.dealt_at
        state.part = ""
        state.rows = None
        age = collection.version - version
        accepted = collection.arrive(now, node)
        batches.record(node, state.samples, state.seconds, reply, age, not accepted)
        if accepted:
            state.late += version < collection.version
            answer = Answer(rows, vector, reply.priority, reply.figures, reply.norm, memory is not None)
            batches.answers[node, version] = answer
            return
        state.dropped += 1
        if memory is None:
            batches.buffers.append(vector)
        if collection.settings.dropped_samples == "requeue":
            batches.undealt.append(rows)

    def _is_alive(self, node: int) -> bool:
        self._check_job()
        self._check_nodes()
        return node in self.nodes

    def _remove(self, node: int, failure: str) -> None:
        """A node is lost: its rows are dealt again, and the others share every batch. JobFailed for the last one."""
        state = self.nodes.pop(node)
        self._absent.discard(node)
        self._connection.forget(node + 1)
        self._notify(f"node {node} has left: {failure}; {len(self.nodes)} continue")
        if not self.nodes:
            raise JobFailed(f"no gradient node is left; the last one said: {failure}")
        for batches in self.parts.values():
            batches.set_nodes(list(self.nodes))
        if state.part:
            batches = self.parts[state.part]
            batches.collection.leave(time.perf_counter(), node)
            batches.undealt.append(state.rows)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for outstanding gradients, then let the nodes end. JobFailed for one that does not answer."""
        deadline = time.monotonic() + END_TIMEOUT
        check_job = self._check_job

        def check_deadline() -> None:
            check_job()
            if time.monotonic() > deadline:
                late = [node for node, state in self.nodes.items() if state.part] or sorted(self._absent)
                raise JobFailed(f"gradient nodes {late} did not answer within {END_TIMEOUT:g} s of the end")

        self._check_job = check_deadline
        self._wait(lambda: not self._absent and len(self._free_nodes()) == len(self.nodes))
        self._connection.send(Finish(), *(node + 1 for node in self.nodes))


def mean_figures(figures: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """The weighted mean of each figure over the nodes that gave figures."""
    known = [(one, weight) for one, weight in zip(figures, weights, strict=True) if one]
    share = sum(weight for _, weight in known)
    return {name: sum(one[name] * weight for one, weight in known) / share for name in (known[0][0] if known else ())}

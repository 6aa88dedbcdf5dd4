"""The leader: cuts each batch by the current sizes, deals the parts to gradient nodes, and sums what comes back.

Rank 0 of the communicator, in the trainer's process; ranks 1 to N are nodes 0 to N-1. It takes the place of the learner
where training asks for a gradient, and computes none itself. Every part of the algorithm has its own collection (which
gradients count), sizer, and samples to deal again. Nodes are sent the vectors that have changed since they had them
last, so they hold no optimizer, and equal bits wherever they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.balance.collection import Verdict
from ddrl.channels.board import CounterRow
from ddrl.core.config import Config
from ddrl.core.errors import ChannelError, ConfigError, JobFailed
from ddrl.distribution.waits import nothing
from ddrl.run.nodes.bells import Bells, MakeSegment
from ddrl.run.nodes.messages import (
    MESSAGE,
    VECTOR,
    Fields,
    Order,
    Record,
    Reply,
    Task,
    arrays_of,
    cut,
    join,
    pack,
    rows_of,
    unpack,
)
from ddrl.run.nodes.post import Post
from ddrl.run.nodes.shared import SharedVectors
from ddrl.run.nodes.sharing import Answer, NodeState, Sharing, mean_figures

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.learner.exchange import Exchange, Vector
    from ddrl.learner.learner import Gradient
    from ddrl.run.nodes.replays import NodeReplays

LONGEST = 0.01  # [s] between two looks for messages, and at what ends the job
MOST_UNDER_WAY = 64  # messages: rows are not sent faster than nodes take them
LOOK_PERIOD = 1.0  # [s] between two looks at which nodes live
END_TIMEOUT = 30.0  # [s] for gradients under way when the run ends
BOOKKEEPING = ("pick_epi", "pick_pos", "policy_version")  # the leader's own: no node needs them


class Leader:
    """See the module. `look` is called while the leader waits, and raises what ends the job; `note` is told of what the
    user should know; `make_segment` makes the memory that the nodes of this host map: without it all is sent; `ended`
    gives the nodes whose processes have ended, in whatever way."""

    def __init__(
        self,
        comm: MPI.Comm,
        exchange: Exchange,
        config: Config,
        *,
        counters: CounterRow | None = None,
        look: Callable[[], object] = nothing,
        note: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.perf_counter,
        replays: NodeReplays | None = None,
        make_segment: MakeSegment | None = None,
        ended: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._ended = ended
        self._next_look = 0.0
        self._post = Post(comm, counters)
        self._exchange = exchange
        self._config = config
        self._look = look
        self._note = note
        self._clock = clock
        self.nodes = {node: NodeState() for node in range(comm.Get_size() - 1)}
        self.parts = {part: Sharing(config, list(self.nodes)) for part in exchange.learner.parts}
        self._absent = set(self.nodes)  # nodes that have not said who they are
        self._shared: SharedVectors | None = None
        if make_segment is not None:
            try:
                self._post.bells = Bells.create(make_segment, comm.Get_size())
                if all(mine.awaits_all for mine in self.parts.values()):
                    self._shared = SharedVectors.create(make_segment, exchange, len(self.nodes))
            except ChannelError as error:
                note(f"gradients are sent as messages, which is slower: {error}")
        self._replays = replays  # where every node has one
        self._drawn: tuple[Any, list[int]] = (None, [])  # the last batch that nodes drew from these, and their parts
        self._answers: list[Reply] = []  # to orders
        self._lost = ""  # why a node has left with its replay
        if replays is not None:
            self._wait(lambda: not self._absent)
            replays.join(self)

    # ---- a gradient ------------------------------------------------------------------------------------------------

    def gradient(self, batch: Any, part: str, statistics: bool = True) -> Gradient | None:
        """The gradient of a part's loss over a batch, from the nodes; None where the algorithm passes the part over.

        JobFailed where no node is left."""
        if not self._exchange.learner.takes(batch if self._replays is None else self._replays.example, part):
            return None
        self._wait(lambda: not self._absent)
        mine = self.parts[part]
        mine.again.append(batch)
        collection = mine.collection
        ready = False
        while not ready:  # once, unless all nodes leave that this was dealt to
            self._wait(lambda: mine.holds(self._free()) >= min(mine.waiting, mine.holds(list(self.nodes))))
            self._deal(batch, part, statistics)
            self._wait(
                lambda: collection.ready(self._clock()) or not (collection.targets or collection.holds),
                lambda: collection.deadline - self._clock(),
            )
            ready = collection.ready(self._clock())
        return self._finish(mine, part)

    def _free(self) -> list[int]:
        return [node for node, state in self.nodes.items() if not state.part]

    def _deal(self, batch: Any, part: str, statistics: bool) -> None:
        mine = self.parts[part]
        free = self._free()
        learner = self._exchange.learner
        rows = join(mine.again)
        mine.again = []
        whole = rows_of(rows)
        first, sizes = self._drawn
        if first is not rows:
            sizes = mine.cut(whole, free).tolist()
        versions = self._exchange.versions()
        updates = tuple(one.updates for one in learner.parts.values())
        entropy = np.random.SeedSequence([self._config.run.seed, *updates, *part.encode()])
        task = Task(part, updates, seed=int(entropy.generate_state(1)[0]), statistics=statistics)
        task.observed = mine.reads_gradients
        # Where not all gradients are awaited, vectors change while they are still being sent: copies are sent.
        copies = not mine.awaits_all
        vectors: dict[str, Vector] = {}
        mine.collection.begin(self._clock(), dict(zip(free, sizes, strict=True)))
        start = 0
        for node, size in zip(free, sizes, strict=True):
            state = self.nodes[node]
            task.vectors = tuple(name for name, version in versions.items() if state.versions.get(name) != version)
            task.place = (start, whole)
            task.late = state.late
            task.dropped = state.dropped
            task.samples = state.samples
            task.seconds = state.seconds
            task.bells = self._post.bells.name if self._post.bells is not None and not state.asked else ""
            task.segment = self._shared.name if self._shared is not None and not state.asked else ""
            task.mapped = state.mapped
            state.asked = True
            state.versions = versions
            state.part = part
            state.rows = cut(rows, start, start + size)
            state.dealt_at = self._clock()
            arrays = arrays_of(state.rows) if self._replays is None else {}
            if self._replays is not None:
                task.draw = 0 if first is rows else size
                task.progress = self._replays.progress
            sent = {name: array for name, array in arrays.items() if name not in BOOKKEEPING}
            if task.mapped and self._shared is not None:
                self._shared.publish({name: versions[name] for name in task.vectors})
            self._post.send(node, pack(task, sent), MESSAGE)
            for name in () if task.mapped else task.vectors:
                if name not in vectors:
                    vector = self._exchange.vector(name)
                    vectors[name] = vector.copy() if copies else vector
                self._post.send(node, vectors[name], VECTOR)
            start += size
        if self._replays is not None:
            self._drawn = (rows, sizes)
        if start < whole:
            mine.again.append(cut(rows, start, whole))
        version = mine.collection.version
        mine.order = [(node, version) for node in free] if rows is batch and start == whole else []

    def _finish(self, mine: Sharing, part: str) -> Gradient:
        update = mine.collection.finish(self._clock())
        keys = sorted(update.weights)
        answers = [mine.answers.pop(key) for key in keys]
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
            None if keys == mine.order else join([answer.rows for answer in answers]),
        )
        if mine.reads_gradients:
            norms = [answer.norm for answer in answers]
            cosines, size = self._exchange.cosines(gradient, vectors, weights, norms)
            mine.aligned(dict(zip(keys, cosines, strict=True)), size)
        mine.buffers += [answer.vector for answer in answers if not answer.mapped]
        mine.propose()
        return gradient

    # ---- replays of the nodes --------------------------------------------------------------------------------------

    def send(self, node: int, header: Order | Record, arrays: Fields) -> None:
        """See `replays.Carrier`."""
        if node in self.nodes:
            self._post.send(node, pack(header, arrays), MESSAGE)
        if self._post.under_way() > MOST_UNDER_WAY:
            self._wait(lambda: not self._post.under_way())

    def answers(self, count: int) -> Sequence[Reply]:
        """See `replays.Carrier`. JobFailed where a node has left."""
        self._wait(lambda: len(self._answers) >= count or bool(self._lost))
        if self._lost:
            raise JobFailed(self._lost)
        answers = self._answers
        self._answers = []
        return answers

    def look(self) -> None:
        """See `replays.Carrier`."""
        while self._receive():
            pass

    # ---- messages --------------------------------------------------------------------------------------------------

    def _wait(self, holds: Callable[[], bool], left: Callable[[], float] = lambda: LONGEST) -> None:
        """`left` [s]: until `holds` may become true by the clock alone."""
        begun = time.perf_counter()
        while not holds():
            rung = self._post.rung()
            if self._receive():
                begun = time.perf_counter()
                continue
            self._look()
            if self._check_nodes():
                continue
            longest = max(0.0, min(LONGEST, left()))
            self._post.sleep(rung, begun, longest, all(state.rings for state in self.nodes.values()))

    def _check_nodes(self) -> bool:
        """Once in LOOK_PERIOD: take out nodes whose processes have died; whether there were any. JobFailed for a node
        that does not answer."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_PERIOD
        dead = [node for node in self._ended() if node in self.nodes]
        for node in dead:
            self._lose(node, "its process has died")
        limit = self._config.run.silence_limit
        for node, state in self.nodes.items():
            if state.part and self._clock() - state.dealt_at > limit:
                raise JobFailed(
                    f"node {node} has not answered for {limit:g} s (run.silence_limit): does it hang, or its host? "
                    "What was learned is saved"
                )
        return bool(dead)

    def _is_alive(self, node: int) -> bool:
        self._look()
        self._check_nodes()
        return node in self.nodes

    def _receive(self) -> bool:
        """Take one message, if there is one."""
        received = self._post.receive()
        if received is None:
            return False
        node, data = received
        reply, arrays = unpack(data, Reply)
        if node not in self.nodes:  # it has died meanwhile, and what it had is dealt again
            return True
        if reply.failure:
            self._lose(node, reply.failure)
        elif reply.signature:
            self._greet(node, reply.signature)
        if self._replays is not None and reply.held is not None:
            self._replays.holds(node, *reply.held)
        if reply.answered:
            self._answers.append(reply)
        if reply.gradient:
            self._arrive(node, reply, arrays)
        return True

    def _greet(self, node: int, signature: Mapping[str, str]) -> None:
        self._absent.discard(node)
        mine = self._exchange.signature
        for what in sorted(mine.keys() | signature.keys()):
            if mine.get(what) != signature.get(what):
                raise ConfigError(
                    f"node {node} has {what} = {signature.get(what)}, the trainer {mine.get(what)}: nodes must hold "
                    "the same networks; start every rank with the same code and packages"
                )

    def _arrive(self, node: int, reply: Reply, arrays: Fields) -> None:
        state = self.nodes[node]
        priority = arrays.get("priority")
        mine = self.parts[state.part]
        rows = state.rows
        if self._replays is not None:
            for name, array in arrays_of(rows).items():
                np.copyto(array, arrays[name])
        version = mine.collection.computing(node)
        state.rings = reply.rings
        if reply.mapped and self._shared is not None:
            if not state.mapped:
                state.mapped = True  # from now on it reads all of them there
                state.versions = {}
            vector = self._shared.gradients[node][state.part]
        else:
            vector = mine.buffers.pop() if mine.buffers else self._exchange.buffer(state.part)
            if not self._post.take(node, vector, lambda: self._is_alive(node)):
                return
        now = self._clock()
        state.samples = rows_of(rows)
        state.seconds = now - state.dealt_at
        state.part = ""
        state.rows = None
        age = mine.collection.version - version
        requeued = mine.collection.counts.requeued
        verdict = mine.collection.arrive(now, node)
        mine.measured(node, state.samples, state.seconds, reply, age, verdict is Verdict.DROPPED)
        if verdict is Verdict.ACCEPTED:
            state.late += version < mine.collection.version
            mine.answers[node, version] = Answer(rows, vector, priority, reply.figures, reply.norm, reply.mapped)
            return
        state.dropped += 1
        if not reply.mapped:
            mine.buffers.append(vector)
        if mine.collection.counts.requeued > requeued:
            mine.again.append(rows)

    def _lose(self, node: int, failure: str) -> None:
        """A node is gone: what it had is dealt again, and the others share the batch. JobFailed where it had a
        replay."""
        state = self.nodes.pop(node)
        self._absent.discard(node)
        self._post.forget(node)
        if self._replays is not None:
            self._lost = (
                f"node {node} has left with its replay: {failure}; go on from the last checkpoint with --resume"
            )
            raise JobFailed(self._lost)
        self._note(f"node {node} has left: {failure}; {len(self.nodes)} go on")
        if not self.nodes:
            raise JobFailed(f"no gradient node is left; the last one said: {failure}")
        for mine in self.parts.values():
            mine.plan(list(self.nodes))
        if state.part:
            mine = self.parts[state.part]
            mine.collection.leave(self._clock(), node)
            mine.again.append(state.rows)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for gradients under way, and let the nodes go. JobFailed for one that does not answer."""
        deadline = time.monotonic() + END_TIMEOUT
        look = self._look

        def look_at_the_clock() -> None:
            look()
            if time.monotonic() > deadline:
                late = [node for node, state in self.nodes.items() if state.part] or sorted(self._absent)
                raise JobFailed(f"gradient nodes {late} did not answer within {END_TIMEOUT:g} s of the end")

        self._look = look_at_the_clock
        self._wait(lambda: not self._absent and len(self._free()) == len(self.nodes))
        for node in self.nodes:
            self._post.send(node, pack(Task(), {}), MESSAGE)

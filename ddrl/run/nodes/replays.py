"""Lanes dealt to gradient nodes, each with a replay of its own: what the trainer has in place of a replay
(learner.node_replay = own).

The trainer drains all lanes, counts, and sends each row on once, to the node of its lane. A draw is made of as many
rows from each node's replay as the sizes say: no row of a batch passes through the trainer. Messages to a node arrive
in their order, so rows sent before a draw are in the replay when it is drawn. `NodeReplays` is the trainer's end,
`OwnReplay` a node's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.core.algorithm import Experience
from ddrl.core.config import Config
from ddrl.core.errors import CheckpointError, DdrlError
from ddrl.core.rows import RowKind, RowSchema
from ddrl.replay.batches import BatchShapes
from ddrl.replay.sources import ReplaySource, Used, rate_limiter
from ddrl.run.nodes.messages import Fields, Order, Record, Reply, Task, arrays_of


class Drawn(NamedTuple):
    """A draw of B rows that stand in the nodes' replays: what comes back of each, once its gradient has arrived."""

    policy_version: NDArray[np.uint64]  # [B]
    transitions: NDArray[np.uint32]  # [B], that it counts as


class Carrier(Protocol):
    """Who carries messages to the nodes: the leader."""

    def send(self, node: int, header: Order | Record, arrays: Fields) -> None:
        """Send; does not wait for the node."""

    def answers(self, count: int) -> Sequence[Reply]:
        """Wait for so many replies to orders."""
        ...

    def look(self) -> None:
        """Take the messages that have arrived."""


class NodeReplays:
    """A source whose experience stands in the nodes. See the module."""

    through_areas: ClassVar[bool] = False

    def __init__(self, config: Config, schema: RowSchema, experience: Experience) -> None:
        settings = config.replay
        self._nodes = config.learner.nodes
        self._num_envs = config.env.num_envs
        self._size = config.learner.batch_size
        self._pick_len = experience.pick_len
        self.pacing = rate_limiter(config, self._size * self._pick_len, self._drawable)
        self._held = [(0, 0)] * self._nodes  # records and bytes of each node
        self._carrier: Carrier | None = None
        self._load: Path | None = None  # what the nodes go on from, once they are there
        self.progress = 0.0
        n_step = settings.n_step if experience.n_step is None else experience.n_step
        shapes = BatchShapes(schema, pick_len=experience.pick_len, n_step=n_step, burn_in=experience.burn_in)
        self.example, _ = shapes.transitions(1) if experience.pick_len == 1 else shapes.sequences(1)
        for array in arrays_of(self.example).values():
            array.fill(0)

    def join(self, carrier: Carrier) -> None:
        """The nodes are there: give them what the run goes on from."""
        self._carrier = carrier
        if self._load is not None:
            self._order("load", self._load)
            self._order("cut")

    def holds(self, node: int, records: int, nbytes: int) -> None:
        """A node's replay holds so much now."""
        self._held[node] = (records, nbytes)

    # ---- a source --------------------------------------------------------------------------------------------------

    def record(self, rows: NDArray[Any], newest_version: int) -> int:
        """Send each row to the node of its lane; the steps among them."""
        assert self._carrier is not None
        node_of = rows["stream"] // self._num_envs % self._nodes
        for node in range(self._nodes):
            mine = rows[node_of == node]
            if len(mine):
                self._carrier.send(node, Record(newest_version), {"rows": mine.view(np.uint8)})
        steps = int((rows["kind"] == RowKind.STEP).sum())
        self.pacing.inserted(steps)
        return steps

    def arrived(self) -> int:
        """Everything comes through `record`."""
        return 0

    def _drawable(self) -> bool:
        if self._carrier is not None and not all(records for records, _ in self._held):
            self._carrier.look()
        return all(records for records, _ in self._held)

    def sample(self) -> Drawn:
        """A draw of the configured size; the nodes draw when they are given their parts."""
        return Drawn(np.zeros(self._size, np.uint64), np.zeros(self._size, np.uint32))

    def learned(self, batch: Drawn, priority: NDArray[Any] | None) -> Used:
        """Count the batch; the nodes have written its priorities."""
        used = Used(int(batch.transitions.sum()), batch.policy_version)
        self.pacing.sampled(used.transitions)
        return used

    def anneal(self, progress: float) -> None:
        """Each task tells its node."""
        self.progress = progress

    def cut(self) -> None:
        """End all running episodes; before the nodes are there, `join` does."""
        if self._carrier is not None:
            self._order("cut")

    def save(self, folder: Path) -> dict[str, Any]:
        """Each node writes its replay into `folder`, which so must be on a disk that all hosts share; the rate
        limiter's state and the number of nodes."""
        self._order("save", folder)
        return {**self.pacing.state(), "nodes": self._nodes}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Each node goes on from its replay in `folder`."""
        self._load = folder
        self.pacing.load_state(state)

    def figures(self) -> dict[str, float]:
        """Records held by all nodes and their memory [bytes]."""
        records, nbytes = (float(sum(values)) for values in zip(*self._held, strict=True))
        return {"replay_size": records, "replay_bytes": nbytes}

    def _order(self, action: str, folder: Path | None = None) -> None:
        """Let all nodes do something, and wait until they have. CheckpointError with what they say has failed."""
        assert self._carrier is not None
        for node in range(self._nodes):
            self._carrier.send(node, Order(action, "" if folder is None else str(folder.absolute())), {})
        try:
            answers = self._carrier.answers(self._nodes)
        except DdrlError as error:
            raise CheckpointError(f"the replays of the nodes cannot be reached: {error}") from None
        if trouble := [answer.trouble for answer in answers if answer.trouble]:
            raise CheckpointError("; ".join(trouble))


class OwnReplay:
    """A node's replay: a share of replay.capacity, drawn from with random numbers of its own."""

    def __init__(self, config: Config, schema: RowSchema, experience: Experience, node: int) -> None:
        share = max(1, config.replay.capacity // config.learner.nodes)
        file = config.replay.file and f"{config.replay.file}.{node}"
        settings = replace(config.replay, capacity=share, min_size=1, file=file)
        run = replace(config.run, seed=config.run.seed + 1 + node)
        self._source = ReplaySource(replace(config, run=run, replay=settings), schema, experience)
        self._dtype = schema.dtype
        self._node = node
        self._rows: Any = None  # of the last draw: every part of the algorithm learns from them

    def record(self, rows: NDArray[np.uint8], newest_version: int) -> None:
        """Take rows [bytes] of this node's lanes."""
        self._source.record(rows.view(self._dtype), newest_version)

    def rows(self, task: Task) -> Any:
        """The rows of a task: drawn anew, or those of the draw before."""
        if task.draw:
            self._source.anneal(task.progress)
            self._rows = self._source.sample(task.draw)
        return self._rows

    def learned(self, priority: NDArray[np.float32] | None) -> Fields:
        """Write the priorities of the rows; what the leader counts of them."""
        batch = self._rows
        source = self._source
        source.learned(batch, priority)
        size = len(batch.pick_epi)
        length = getattr(batch, "length", np.ones(size, np.uint32))
        return {"policy_version": batch.policy_version, "transitions": length}

    @property
    def held(self) -> tuple[int, int]:
        """Records and bytes; no records before something can be drawn."""
        replay = self._source.replay
        return (len(replay), replay.nbytes) if replay.num_picks else (0, 0)

    def follow(self, order: Order) -> Reply:
        """Do what the leader orders; what to answer."""
        replay = self._source.replay
        trouble = ""
        path = Path(order.folder) / f"replay-{self._node}.snapshot"
        try:
            if order.action == "save":
                replay.save(path)
            elif order.action == "load":
                replay.load(path)
            else:
                replay.cut_streams()
        except CheckpointError as error:
            trouble = f"node {self._node}: {error}"
        return Reply(answered=True, trouble=trouble, held=self.held)

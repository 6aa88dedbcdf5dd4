"""Training as moves: lanes -> experience -> gradient -> parameters -> mailbox, one move at a time, never a wait.

One thread, no locks: it reads shared-memory lanes and writes one shared-memory mailbox. Whoever drives it decides when
the next move is made and on which device; between two moves it can stop for as long as it likes. It imports no torch
itself: the learner is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.board import Board
from ddrl.channels.counters import CounterRow
from ddrl.channels.lane import LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import Config
from ddrl.core.messages import VersionStamp
from ddrl.core.rows import RowKind
from ddrl.rollout.exploration import epsilon_at
from ddrl.run.lag import LagMeter
from ddrl.run.lag_bound import LagBound
from ddrl.run.moves import DeviceLender, GradientSource, Move, RoundCycle, Rows

if TYPE_CHECKING:
    from ddrl.learner.learner import Gradient, Learner
    from ddrl.replay.sources import Experience

DRAIN_BYTES = 1 << 22  # most experience recorded in one move: bounds the time between two updates
MAX_UPDATES = 16  # between two looks at the lanes: bounds how long a lane can stay full
STATISTICS_PERIOD = 32  # [updates] between looks at loss and gradient norm, which would stop an accelerator each time
COUNTERS = (
    *(
        "env_steps",
        "rows_recorded",
        "rows_too_old",
        "updates",
        "samples",
        "publishes",
        "publish_deferred",
        "policy_version",
    ),
    *("loss", "grad_norm"),
    *("learn_seconds", "sample_seconds", "record_seconds", "publish_seconds", "wait_seconds"),
    *("lag_p50", "lag_p99", "arrival_lag_p50", "arrival_lag_p99", "rollout_wait", "epsilon", "heartbeat"),
)


@dataclass
class TrainingState:
    """What a checkpoint keeps of training itself."""

    env_steps: int = 0
    updates: int = 0
    samples: int = 0
    policy_version: int = -1
    wall_seconds: float = 0.0
    cuts: int = 0  # checkpoints taken; each one cuts running episodes and seeds the next ones


@dataclass
class LiveSettings:
    """Settings changed from outside while a run goes on; None: as configured. Checkpoints keep them."""

    lr: float | None = None
    epsilon: float | None = None
    samples_per_insert: float | None = None
    scheme: str | None = None


@dataclass(frozen=True)
class TrainerEnds:
    """The trainer's ends of its host's channels."""

    lanes: LaneSet
    mailbox: Mailbox
    board: Board
    counters: CounterRow
    row_dtype: np.dtype[Any]


class Training:
    """One learner with its source of experience, fed by lanes, publishing to one mailbox."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        source: Experience,
        ends: TrainerEnds,
        state: TrainingState,
        live: LiveSettings,
    ) -> None:
        self.config = config
        self.learner = learner
        self.source = source
        self.ends = ends
        self.state = state
        self.live = live
        self.lag = LagMeter(state.policy_version)
        self.gradient: Gradient | None = None  # computed, not applied yet
        self._rows = np.zeros(max(64, DRAIN_BYTES // ends.row_dtype.itemsize), ends.row_dtype)
        self._began = time.perf_counter() - state.wall_seconds
        self._unpublished = 0
        self.idle = False  # the last cycle, or the look for a worker's data, found nothing
        self.ending = False  # no further draw is begun
        self.lender: DeviceLender | None = None  # None: the device is its own
        self.gradients: GradientSource = learner  # or the leader of nodes
        self.lag_bound: LagBound | None = None
        figures = [figure.name for figure in learner.declaration.figures]
        self._count = {name: ends.counters[name] for name in (*COUNTERS, *figures, *source.figures())}
        self.rounds: RoundCycle | None = None
        self._moves = self._cycle()
        self.next_move = next(self._moves)

    def follow(self, rounds: RoundCycle) -> None:
        """Go in rounds from here on, whose data do not come by `drain`."""
        self.rounds = rounds
        self.ends = replace(self.ends, lanes=LaneSet(()))
        self._moves = rounds.moves()
        self.next_move = next(self._moves)

    # -- moves ---------------------------------------------------------------------------------------------------------

    @property
    def needs_device(self) -> bool:
        """Whether the next move computes with the parameters."""
        return self.next_move in (Move.GRADIENT, Move.APPLY)

    @property
    def at_boundary(self) -> bool:
        """Whether no draw is under way: the moment for checkpoints, pauses and the end."""
        return self.next_move is Move.DRAIN

    def turn(self) -> bool:
        """Make the next move. False at the end of a cycle that found nothing to record and nothing to learn.

        Where a pool lends the device, waits for it before a move that needs it.
        """
        if self.lender is not None and self.needs_device:
            self.lender.take()
        self.next_move = next(self._moves)
        if self.lender is not None:
            self.lender.give_back(self.next_move)
        return not (self.idle and self.next_move in (Move.DRAIN, Move.RECORD))

    def _cycle(self) -> Iterator[Move]:
        """Each move is named, then, when the next turn comes, made."""
        while True:
            yield Move.DRAIN
            moved = self.drain()
            learned = 0
            while learned < MAX_UPDATES and not self.ending and not self._held() and self.source.pacing.ready():
                begin = time.perf_counter()
                for batch in self.learner.prepare(self.source):
                    self._count["sample_seconds"].add(time.perf_counter() - begin)
                    yield from self._learn(batch)
                    learned += 1
                    begin = time.perf_counter()
            self.idle = not moved and not learned

    def _learn(self, batch: Any) -> Iterator[Move]:
        """One update: a gradient and its application for each part of the algorithm; then a publish, if it is due."""
        learner = self.learner
        learn_seconds = self._count["learn_seconds"]
        with_statistics = self.state.updates % STATISTICS_PERIOD == 0
        steps: list[tuple[Gradient, Any]] = []
        for part in learner.parts:
            yield Move.GRADIENT
            begin = time.perf_counter()
            self.gradient = self.gradients.gradient(batch, part, with_statistics)
            learn_seconds.add(time.perf_counter() - begin)
            if self.gradient is None:  # this part is not updated now
                continue
            yield Move.APPLY
            begin = time.perf_counter()
            steps.append((self.gradient, learner.apply(self.gradient)))
            self.gradient = None
            learn_seconds.add(time.perf_counter() - begin)
        begin = time.perf_counter()
        update = learner.outcome(steps)
        learn_seconds.add(time.perf_counter() - begin)
        self.show(update.figures)
        self.account(batch if update.batch is None else update.batch, update.priority)
        self.updated()
        if self._unpublished >= self.config.learner.publish_period and self._lag_allows():
            yield Move.PUBLISH
            self.publish()

    def _lag_allows(self) -> bool:
        """Whether rollout.max_policy_lag allows the next version."""
        return self.lag_bound is None or self.lag_bound.allows(self.state.policy_version + 1)

    def _held(self) -> bool:
        """Whether to make no update until experience has caught up. Never where rows could not come either."""
        due = self._unpublished >= self.config.learner.publish_period
        return due and not self._lag_allows() and self.source.pacing.insertable() > 0

    def count(self, name: str, value: float) -> None:
        """Add to a counter."""
        self._count[name].add(value)

    def show(self, figures: Mapping[str, float]) -> None:
        """Store an update's figures."""
        for name, value in figures.items():
            if name in self._count:
                self._count[name].set(value)

    def account(self, batch: Any, priority: Any) -> None:
        """Count a batch that was learned from, and write its priorities [B] back."""
        begin = time.perf_counter()
        used = self.source.learned(batch, priority)
        self._count["sample_seconds"].add(time.perf_counter() - begin)  # what experience takes, and nothing else
        self.state.samples += used.transitions
        self.lag.consumed(used.versions, self.state.policy_version, self._unpublished + 1)
        self._count["samples"].add(used.transitions)

    def updated(self) -> None:
        """Count an update of the parameters."""
        self.state.updates += 1
        self._unpublished += 1
        self._count["updates"].add(1)

    # -- experience ----------------------------------------------------------------------------------------------------

    def drain(self, *, everything: bool = False) -> int:
        """Record what the lanes hold, as far as the source takes it; rows moved. Nothing beyond run.max_env_steps.

        `everything` (a checkpoint, the end): empty the lanes whatever the source says.
        """
        arrived = self.source.arrived()
        if arrived:
            self._count_recorded(arrived)
        if not everything:
            return arrived + self._drain(min(len(self._rows), self.source.pacing.insertable()))
        moved = 0
        while self.ends.lanes.pending:
            moved += self._drain(len(self._rows))
        return moved

    def _drain(self, room: int) -> int:
        lanes = self.ends.lanes
        if room == 0:
            self._count["rollout_wait"].set(1.0)
            return 0
        left = self.config.run.max_env_steps - self.state.env_steps
        if left <= 0:
            return lanes.drain(self._rows)  # the run is over; what still comes is dropped
        room = min(room, left)
        begin = time.perf_counter()
        rows = self._rows[: lanes.drain(self._rows[:room])]
        self._count["rollout_wait"].set(float(room < len(self._rows) and lanes.pending > 0))  # the rest has to wait
        moved = len(rows)
        if self.lag_bound is not None and moved:
            rows = self.lag_bound.admit(rows, self.state.policy_version)
            self._count["rows_too_old"].add(moved - len(rows))
        if len(rows):
            self._record(rows)
            self._count["record_seconds"].add(time.perf_counter() - begin)
        return moved

    def empty(self, lane: Rows, *, record: bool = True) -> None:
        """Take everything out of a lane that nobody writes to now, and record it, up to run.max_env_steps."""
        begin = time.perf_counter()
        while count := lane.pop(self._rows):
            left = self.config.run.max_env_steps - self.state.env_steps
            if record and left > 0:
                self._record(self._rows[: min(count, left)])
        self._count["record_seconds"].add(time.perf_counter() - begin)

    def _record(self, rows: NDArray[Any]) -> None:
        recorded = self.source.record(rows, self.state.policy_version)
        self.lag.arrived(rows["policy_version"][rows["kind"] == RowKind.STEP], self.state.policy_version)
        self._count_recorded(recorded)

    def _count_recorded(self, steps: int) -> None:
        self.state.env_steps += steps
        self._count["env_steps"].add(steps)
        self._count["rows_recorded"].add(steps)

    def wait(self, timeout: float) -> None:
        """Sleep until a rollout or the evaluator rings, at most `timeout` seconds."""
        begin = time.perf_counter()
        bell = self.ends.board.trainer_bell
        seen = bell.value
        if self.rounds is not None:
            self.rounds.wait(timeout)
        elif not self.ends.lanes.pending or not self.source.pacing.insertable():
            bell.wait(seen, timeout)
        self._count["wait_seconds"].add(time.perf_counter() - begin)

    # -- publishing ----------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Write the acting parameters as the next policy version; never waits for a reader."""
        self._anneal()
        begin = time.perf_counter()
        state = self.state
        board = self.ends.board
        version = state.policy_version + 1
        if self.rounds is not None:
            self.rounds.begin(version)
        epsilon = epsilon_at(self.config.rollout, state.env_steps) if self.live.epsilon is None else self.live.epsilon
        stamp = VersionStamp(float(state.env_steps), epsilon, float(state.updates))
        sealed = self.ends.mailbox.publish(self.learner.parameters.host_view(), version, stamp)
        self._count["publish_seconds"].add(time.perf_counter() - begin)
        if not sealed:  # every slot is on its way to other hosts; the next update tries again, with newer parameters
            self._count["publish_deferred"].add(1)
            return
        board.rollout_bell.ring()
        board.relay_bell.ring()
        state.policy_version = version
        self.lag.published(version)
        self._unpublished = 0
        self._count["epsilon"].set(epsilon)
        self._count["policy_version"].set(version)
        self._count["publishes"].add(1)

    def _anneal(self) -> None:
        progress = min(1.0, self.state.env_steps / self.config.run.max_env_steps)
        self.learner.anneal(progress)
        if self.live.lr is not None:
            self.learner.lr = self.live.lr
        self.source.anneal(progress)

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Wall seconds of the run, earlier parts of a resumed run included."""
        return time.perf_counter() - self._began

    def report(self) -> None:
        """Store the slow figures: called a few times a second, not in the hot loop."""
        self._count["heartbeat"].set(time.time())
        for percentile in (50, 99):
            self._count[f"lag_p{percentile}"].set(self.lag.recent(percentile))
            self._count[f"arrival_lag_p{percentile}"].set(self.lag.arrival.percentile(percentile))
        for name, value in self.source.figures().items():
            self._count[name].set(value)

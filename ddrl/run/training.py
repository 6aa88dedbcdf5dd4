"""Training as moves: lanes -> experience -> gradient -> parameters -> mailbox, one move at a time, never a wait.

One thread, no locks: it reads shared-memory lanes and writes one shared-memory mailbox. Whoever drives it decides when
the next move is made and on which device; between two moves it can stop for as long as it likes. It imports no torch
itself: the learner is handed in.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.choosers import epsilon_at
from ddrl.channels.board import Board, CounterRow
from ddrl.channels.lane import LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import Config
from ddrl.core.metrics import SUPPORT_ENDS, Phase
from ddrl.core.roles import VersionStamp
from ddrl.core.rows import RowKind
from ddrl.learner.algorithm import Regressions
from ddrl.run.checkpoint import LiveSettings, TrainingState
from ddrl.run.lag import LagBound, LagMeter

if TYPE_CHECKING:
    from ddrl.learner.learner import Learner
    from ddrl.learner.part import Gradient
    from ddrl.replay.sources import Experience


# -- moves -------------------------------------------------------------------------------------------------------------
class Move(StrEnum):
    """What training does next."""

    DRAIN = "drain"  # record what waits in the lanes, and draw
    GRADIENT = "gradient"  # needs the device
    APPLY = "apply"  # needs the device
    RECORD = "record"  # in a round: record another worker's data, once they are there
    PUBLISH = "publish"


class DeviceLender(Protocol):
    """Where training gets its device from, in a pool."""

    def take(self) -> None:
        """Called before each move that needs the device; returns once the learner has one."""

    def give_back(self, move: Move) -> None:
        """Called after each move with the next one, before which the device may go."""

    def pause(self) -> None:
        """Called in a round that waits for what may take long: the device goes, and is taken anew."""


class Rows(Protocol):
    """Where rows of one worker are taken: its lane, or what has come of it from another host."""

    def pop(self, out: NDArray[Any]) -> int:
        """Move the oldest rows into `out` [n]; returns how many. Never waits."""
        ...


class RoundCycle(Protocol):
    """The moves of a training whose collectors come and go (ddrl.pool.rounds)."""

    number: int  # of the round: the version that it acts with

    def moves(self) -> Iterator[Move]:
        """In place of the endless cycle of draws."""
        ...

    def begin(self, version: int) -> None:
        """Called before a version is published."""
        ...

    def wait(self, timeout: float) -> None:
        """Sleep until there may be something to do, at most `timeout` [s]."""
        ...


class CollectorStarter(Protocol):
    """What starts and ends the collectors of one host, as the trainer or the host's relay sees it."""

    clock: str  # names this host's clock

    def write(self, line: bytes) -> None:
        """Send a message; JobFailed where the starter has ended."""
        ...

    def read(self) -> list[bytes]:
        """Messages received since the last call, without waiting. JobFailed where it ended without `end`."""
        ...

    @property
    def ended(self) -> bool:
        """Whether all collectors have ended and everything about them was read."""
        ...

    def end(self) -> None:
        """Ask for the end of all collectors."""
        ...

    def stop(self, timeout: float) -> object:
        """`end`, then wait for at most `timeout` [s]."""
        ...


class GradientSource(Protocol):
    """Who computes gradients: the learner itself, or gradient nodes (`balance.leader`)."""

    def gradient(self, batch: Any, part: str, statistics: bool = True) -> Gradient | None:
        """The gradient of a part's loss over a batch; None where the algorithm passes the part over."""
        ...


# -- training ----------------------------------------------------------------------------------------------------------

DRAIN_BYTES = 1 << 22  # most experience recorded in one move: bounds the time between two updates
MAX_UPDATES = 16  # between two looks at the lanes: bounds how long a lane can stay full
MAX_SHARE_BEYOND = 0.2  # of the targets' probability beyond the support, above which returns lie outside it
UPDATES_BEYOND = 3  # with statistics, in a row, before that is said
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
    *("learn_seconds", "sample_seconds", "record_seconds", "publish_seconds", "wait_seconds", "lag_wait_seconds"),
    *("lag_p50", "lag_p99", "arrival_lag_p50", "arrival_lag_p99", "rollout_wait", "epsilon", "heartbeat"),
)


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
        lag_bound: LagBound | None = None,
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
        self._beyond = 0  # updates in a row whose targets lie beyond the support
        self._warned = False
        self.idle = False  # the last cycle, or the look for a worker's data, found nothing
        self.ending = False  # no further draw is begun
        self.lender: DeviceLender | None = None  # None: the device is its own
        self.gradients: GradientSource = learner  # or the leader of nodes
        self.lag_bound = lag_bound
        figures = [figure.name for figure in learner.declaration.figures]
        self._count = {name: ends.counters[name] for name in (*COUNTERS, *figures, *source.figures())}
        self._phase = ends.counters["phase"]
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
            self._phase.set(Phase.WAITING)
            self.lender.take()
            self._phase.set(Phase.RUNNING)
        self.next_move = next(self._moves)
        if self.lender is not None:
            self.lender.give_back(self.next_move)
        return not (self.idle and self.next_move in (Move.DRAIN, Move.RECORD))

    def _cycle(self) -> Iterator[Move]:
        """Each move is named, then made by the next turn."""
        while True:
            yield Move.DRAIN
            moved = self.drain()
            begun = self.state.updates
            while self.state.updates - begun < MAX_UPDATES and self._may_draw():
                begin = time.perf_counter()
                # The leader of nodes and a pool's lender look between updates: then each is of one batch.
                alone = self.gradients is self.learner and self.lender is None
                for batch in self.learner.prepare(self.source, self._until_publish if alone else None):
                    self._count["sample_seconds"].add(time.perf_counter() - begin)
                    yield from self._regress(batch) if isinstance(batch, Regressions) else self._learn(batch)
                    begin = time.perf_counter()
            if self._unpublished and not self.ending and self._held():  # rollouts act with what there is
                yield Move.PUBLISH
                self.publish()
            self.idle = not moved and self.state.updates == begun

    def _may_draw(self) -> bool:
        return not self.ending and not self._held() and self.source.pacing.ready()

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
        yield from self._publish_where_due()

    def _regress(self, batch: Regressions) -> Iterator[Move]:
        """Several updates at once; then a publish, if it is due."""
        yield Move.APPLY
        begin = time.perf_counter()
        update = self.learner.regress(batch)
        self._count["learn_seconds"].add(time.perf_counter() - begin)
        self.show(update.figures)
        count = len(batch.order)
        self.account(update.batch, None, count)
        self.updated(count)
        yield from self._publish_where_due()

    def _until_publish(self) -> int:
        """Updates until the next publish is due."""
        return self.config.learner.publish_period - self._unpublished

    def _publish_where_due(self) -> Iterator[Move]:
        if self._until_publish() <= 0:
            yield Move.PUBLISH
            self.publish()

    def _held(self) -> bool:
        """Whether rollout.max_policy_lag allows no update until newer rows have come. Never where none could come."""
        bound = self.lag_bound
        late = bound is not None and not bound.allows(self.state.updates + 1)
        return late and self.source.pacing.insertable() > 0

    def count(self, name: str, value: float) -> None:
        """Add to a counter."""
        self._count[name].add(value)

    def show(self, figures: Mapping[str, float]) -> None:
        """Store an update's figures."""
        for name, value in figures.items():
            if name in self._count:
                self._count[name].set(value)
        if SUPPORT_ENDS.name in figures:
            beyond = figures[SUPPORT_ENDS.name] > MAX_SHARE_BEYOND
            self._beyond = self._beyond + 1 if beyond else 0
            if self._beyond == UPDATES_BEYOND and not self._warned:
                self._warned = True
                print(f"ddrl: {self._beyond_words(figures[SUPPORT_ENDS.name])}", file=sys.stderr, flush=True)

    def _beyond_words(self, share: float) -> str:
        table = f"learner.{self.config.learner.algorithm}"
        return (
            f"returns lie outside the support: {share:.0%} of the targets' probability is beyond {table}.v_min or "
            "v_max and counts as lying there; set them to the least and the largest discounted return"
        )

    def account(self, batch: Any, priority: Any, updates: int = 1) -> None:
        """Count a batch that was learned from, or those of several `updates` of one size, and write its priorities [B]
        back."""
        begin = time.perf_counter()
        used = self.source.learned(batch, priority)
        self._count["sample_seconds"].add(time.perf_counter() - begin)  # what experience takes, and nothing else
        self.state.samples += used.transitions
        self.lag.consumed(used.versions, self.state.policy_version, self._unpublished + (updates + 1) / 2)
        self._count["samples"].add(used.transitions)

    def updated(self, updates: int = 1) -> None:
        """Count updates of the parameters."""
        self.state.updates += updates
        self._unpublished += updates
        self._count["updates"].add(updates)

    # -- experience ----------------------------------------------------------------------------------------------------

    def drain(self, *, everything: bool = False) -> int:
        """Record what the lanes hold, as far as the source takes it; rows moved. Nothing beyond run.max_env_steps.

        `everything` (a checkpoint, the end): empty the lanes whatever the source says.
        """
        arrived = self.source.arrived()
        if arrived:
            kept = max(0, min(arrived, self.config.run.max_env_steps - self.state.env_steps))
            self.state.rows_taken += arrived
            self.state.rows_beyond += arrived - kept  # areas are written in whole blocks; the run ends before a draw
            self._count_recorded(kept)
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
            dropped = lanes.drain(self._rows)  # the run is over
            self.state.rows_taken += dropped
            self.state.rows_beyond += dropped
            return dropped
        room = min(room, left)
        begin = time.perf_counter()
        rows = self._rows[: lanes.drain(self._rows[:room])]
        self._count["rollout_wait"].set(float(room < len(self._rows) and lanes.pending > 0))  # the rest has to wait
        moved = len(rows)
        self.state.rows_taken += moved
        if self.lag_bound is not None and moved:
            rows = self.lag_bound.admit(rows, self.state.updates)
            self.state.rows_too_old += moved - len(rows)
            self._count["rows_too_old"].add(moved - len(rows))
        if len(rows):
            self._record(rows)
            self._count["record_seconds"].add(time.perf_counter() - begin)
        return moved

    def empty(self, lane: Rows, *, record: bool = True) -> None:
        """Take everything out of a lane that no process writes to now, and record it, up to run.max_env_steps."""
        begin = time.perf_counter()
        while count := lane.pop(self._rows):
            left = max(0, self.config.run.max_env_steps - self.state.env_steps)
            self.state.rows_taken += count
            if record and left:
                self._record(self._rows[: min(count, left)])
            if record:
                self.state.rows_beyond += max(0, count - left)
            else:
                self.state.rows_dropped += count
        self._count["record_seconds"].add(time.perf_counter() - begin)

    def _record(self, rows: NDArray[Any]) -> None:
        recorded = self.source.record(rows, self.state.policy_version)
        versions = rows["policy_version"][rows["kind"] == RowKind.STEP]
        self.state.rows_ended += len(rows) - len(versions)
        self.lag.arrived(versions, self.state.policy_version)
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
        waited = time.perf_counter() - begin
        self._count["wait_seconds"].add(waited)
        if self.rounds is None and self._held():
            self._count["lag_wait_seconds"].add(waited)

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
        if self.lag_bound is not None:
            self.lag_bound.published(version, state.updates)
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

    def beat(self) -> bool:
        """Show that this process lives, where no move is made for long. False: an answer to whether to stop."""
        self._count["heartbeat"].set(time.time())
        return False

    def report(self) -> None:
        """Store the slow figures: called a few times a second, not in the hot loop."""
        self.beat()
        for percentile in (50, 99):
            self._count[f"lag_p{percentile}"].set(self.lag.recent(percentile))
            self._count[f"arrival_lag_p{percentile}"].set(self.lag.recent(percentile, "arrived"))
        for name, value in self.source.figures().items():
            self._count[name].set(value)

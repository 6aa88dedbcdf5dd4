"""Training as moves: lanes -> experience -> gradient -> parameters -> mailbox, one move at a time, never a wait.

One thread, no locks: it reads shared-memory lanes and writes one shared-memory mailbox. Whoever drives it decides when
the next move is made and on which device; between two moves it can stop for as long as it likes. It imports no torch
itself: the learner is handed in.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
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
from ddrl.core.messages import VersionStamp
from ddrl.core.metrics import SUPPORT_ENDS, Phase
from ddrl.core.rows import RowKind

if TYPE_CHECKING:
    from ddrl.learner.gradient import Gradient
    from ddrl.learner.learner import Learner
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


# -- lag ---------------------------------------------------------------------------------------------------------------
# Policy lag of a sample: the learner's version when it is consumed less the version that acted. Its parts, counted for
# each sample by the version that acted: in flight (versions published between choosing the action and the row's arrival
# at the trainer, the lane included; rows of one version that arrived at different times count their mean) and in queue
# (versions published while the row was in replay). Unpublished: updates done but not yet published when the sample was
# consumed. Lag in seconds is measured from the publish time of the version that acted.


RECENT = 1 << 15  # [samples] window of the live percentiles
PENDING = 1 << 13  # [samples] kept before they are counted


class Recent:
    """The newest values of a series that never ends, for percentiles of the moment."""

    def __init__(self) -> None:
        self._values = np.full(RECENT, -1, np.int64)
        self._next = 0

    def add(self, values: NDArray[np.int64]) -> None:
        """Append values [n], at least 0."""
        newest = values[-RECENT:]
        self._values[(self._next + np.arange(len(newest))) % RECENT] = newest
        self._next = (self._next + len(newest)) % RECENT

    def percentile(self, percentile: float) -> float:
        """NaN before the first value."""
        present = self._values[self._values >= 0]
        if not len(present):
            return float("nan")
        place = percentile / 100.0 * (len(present) - 1)
        below = math.floor(place)
        above = math.ceil(place)
        # Not np.percentile, whose first call imports numpy.ma: as long as a hundred updates of a small network.
        ordered = np.partition(present, (below, above))
        return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


class Pending:
    """Versions that acted beside the newest version then, kept until they are counted: many at once cost a tenth."""

    def __init__(self) -> None:
        self._acted = np.zeros(PENDING, np.int64)
        self._newest = np.zeros(PENDING, np.int64)
        self._count = 0

    def fits(self, count: int) -> bool:
        """Whether so many more are kept. After `take` any number is."""
        return self._count + count <= len(self._acted)

    def add(self, acted: NDArray[np.uint64], newest: int) -> None:
        """Keep versions [n]."""
        end = self._count + len(acted)
        if end > len(self._acted):
            self._acted = np.zeros(end, np.int64)
            self._newest = np.zeros(end, np.int64)
        self._acted[self._count : end] = acted
        self._newest[self._count : end] = newest
        self._count = end

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Versions that acted [n], and their lags [n]; nothing is kept any more. Valid until the next `add`."""
        acted = self._acted[: self._count]
        lag = np.maximum(self._newest[: self._count] - acted, 0)
        self._count = 0
        return acted, lag


class LagMeter:
    """Counts every consumed sample's lag; exact over the whole run."""

    def __init__(self, newest: int = -1) -> None:
        """`newest`: the last version of the run this one resumes; such versions count as published now."""
        self._recent = {"arrived": Recent(), "consumed": Recent()}  # [versions], of rows and of samples
        self._pending = {"arrived": Pending(), "consumed": Pending()}
        self._histogram = np.zeros(1024, np.int64)  # lag in versions -> samples
        self._consumed = 0
        self._debt_sum = 0.0  # [updates]
        self._in_flight_sum = 0.0
        self._seconds_sum = 0.0
        versions = max(1024, newest + 1)
        self._publish_time = np.full(versions, time.monotonic())
        self._arrived = np.zeros((2, versions))  # by version that acted: rows, and their lags together

    def published(self, version: int) -> None:
        """A version is published now."""
        if version >= len(self._publish_time):
            more = max(len(self._publish_time), version)
            self._publish_time = np.concatenate([self._publish_time, np.zeros(more)])
            self._arrived = np.concatenate([self._arrived, np.zeros((2, more))], axis=1)
        self._publish_time[version] = time.monotonic()

    def arrived(self, acted: NDArray[np.uint64], newest: int) -> None:
        """Rows reached the trainer: [n] versions that acted."""
        self._add("arrived", acted, newest)

    def consumed(self, acted: NDArray[np.uint64], newest: int, unpublished: int = 0) -> None:
        """Samples were learned from: [B] versions that acted, `unpublished` updates after version `newest`."""
        self._add("consumed", acted, newest)
        self._seconds_sum += len(acted) * time.monotonic()
        self._debt_sum += len(acted) * unpublished

    def _add(self, what: str, acted: NDArray[np.uint64], newest: int) -> None:
        pending = self._pending[what]
        if not pending.fits(len(acted)):
            self._settle()
        pending.add(acted, newest)

    def _settle(self) -> None:
        """Count what is pending; what arrived first, for it may be consumed by now."""
        arrived, lag = self._pending["arrived"].take()
        if len(arrived):
            self._recent["arrived"].add(lag)
            versions = np.minimum(arrived, len(self._publish_time) - 1)
            first = int(versions.min())
            rows = np.bincount(versions - first)
            self._arrived[:, first : first + len(rows)] += (rows, np.bincount(versions - first, lag))
        versions, lag = self._pending["consumed"].take()
        counts = np.bincount(lag)
        if len(counts) > len(self._histogram):
            self._histogram = np.concatenate([self._histogram, np.zeros(len(counts), np.int64)])
        self._histogram[: len(counts)] += counts
        self._recent["consumed"].add(lag)
        self._consumed += len(versions)
        known = np.clip(versions, 0, len(self._publish_time) - 1)
        self._seconds_sum -= float(self._publish_time[known].sum())
        rows, lags = self._arrived[:, known]
        self._in_flight_sum += float(np.minimum(lags / np.maximum(rows, 1), lag).sum())

    def recent(self, percentile: float, what: str = "consumed") -> float:
        """Percentile of the lag [versions] of the newest samples, or of the rows that "arrived"; NaN before the
        first."""
        self._settle()
        return self._recent[what].percentile(percentile)

    def summary(self) -> dict[str, Any]:
        """Percentiles over the whole run [versions], and mean parts."""
        self._settle()
        if not self._consumed:
            return {"p50": None, "p99": None}
        cumulated = np.cumsum(self._histogram)
        in_flight = self._in_flight_sum / self._consumed
        mean = float((self._histogram * np.arange(len(self._histogram))).sum() / self._consumed)
        return {
            "p50": int(np.searchsorted(cumulated, 0.50 * self._consumed)),
            "p99": int(np.searchsorted(cumulated, 0.99 * self._consumed)),
            "mean": mean,
            "mean_in_flight": in_flight,
            "mean_in_queue": mean - in_flight,
            "mean_unpublished": self._debt_sum / self._consumed,
            "mean_seconds": self._seconds_sum / self._consumed,
        }


class LagBound:
    """rollout.max_policy_lag: bounds the lag on arrival, newest version published less the version that acted.

    `wait`: the trainer puts off its next version, and with it further updates, until the rows of every rollout show a
    version recent enough: rows of one rollout arrive in order, so no later one is older. `drop`: rows that are older
    are left out and counted; replay closes the gap in `step`. `weight` is done where samples are drawn
    (`ddrl.replay.sources`). `newest`: the version that a resumed run begins after; `absent`: which rollouts have no
    process now [rollouts], for which nothing waits."""

    def __init__(
        self, config: Config, rollouts: int, newest: int, absent: Callable[[], NDArray[np.bool_]] | None = None
    ) -> None:
        self._absent = absent or (lambda: np.zeros(rollouts, np.bool_))
        rollout = config.rollout
        self._most = rollout.max_policy_lag
        self._drops = rollout.at_max_lag == "drop" and math.isfinite(self._most)
        self._waits = rollout.at_max_lag == "wait" and math.isfinite(self._most)
        self._num_envs = config.env.num_envs
        self._acted = np.full(rollouts, newest + 1, np.int64)  # the newest version seen in each rollout's rows

    @classmethod
    def of(
        cls, config: Config, rollouts: int, newest: int, absent: Callable[[], NDArray[np.bool_]] | None = None
    ) -> LagBound | None:
        """None where the lag is not bounded."""
        return cls(config, rollouts, newest, absent) if math.isfinite(config.rollout.max_policy_lag) else None

    def admit(self, rows: NDArray[Any], newest: int) -> NDArray[Any]:
        """The rows that may be recorded, of those that arrived while version `newest` was the newest. O(rows)."""
        if self._waits:
            np.maximum.at(self._acted, rows["stream"] // self._num_envs, rows["policy_version"].astype(np.int64))
        if not self._drops:
            return rows
        late = (newest - rows["policy_version"].astype(np.int64) > self._most) & (rows["kind"] == RowKind.STEP)
        return rows[~late] if late.any() else rows

    def allows(self, version: int) -> bool:
        """Whether this version may be published now."""
        if not self._waits:
            return True
        late = version - self._acted > self._most
        return not late.any() or not (late & ~self._absent()).any()


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


@dataclass
class TrainingState:
    """What a checkpoint keeps of training itself."""

    env_steps: int = 0
    updates: int = 0
    samples: int = 0
    policy_version: int = -1
    wall_seconds: float = 0.0
    cuts: int = 0  # checkpoints taken; each one cuts running episodes and seeds the next ones
    # What became of rows, over all jobs of the run (ddrl.telemetry.ledger); env_steps counts the steps recorded.
    rows_taken: int = 0  # out of lanes
    rows_ended: int = 0  # of these: recorded ends of episodes
    rows_too_old: int = 0  # left out for rollout.max_policy_lag
    rows_beyond: int = 0  # after run.max_env_steps
    rows_lost: int = 0  # taken after the last checkpoint of a trainer or collector that has died
    rows_left: int = 0  # written to a lane, but never taken: under way when a job ended


@dataclass
class LiveSettings:
    """Settings changed from outside during a run; None: as configured. Checkpoints keep them."""

    lr: float | None = None
    epsilon: float | None = None
    samples_per_insert: float | None = None
    scheme: str | None = None
    processes: int | None = None


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
            self.state.rows_taken += arrived
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
            rows = self.lag_bound.admit(rows, self.state.policy_version)
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
                self.state.rows_lost += count
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

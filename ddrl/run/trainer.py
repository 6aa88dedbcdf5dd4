"""The trainer: lanes -> replay -> learner -> mailbox, and nothing else.

One thread, no locks, never a wait for the network: it reads shared-memory lanes and writes one shared-memory mailbox.
The same object runs in every mode; only who steps the rollouts differs. It imports no torch itself: the learner is
handed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Board
from ddrl.channels.counters import CounterRow
from ddrl.channels.lane import LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import Config
from ddrl.core.layouts import RowKind
from ddrl.replay import ExperienceReplay, RateLimiter
from ddrl.rollout.exploration import epsilon_at
from ddrl.run.lag import LagMeter

if TYPE_CHECKING:
    from ddrl.learner import Learner

DRAIN_BYTES = 1 << 22  # most experience moved to replay at once; bounds the time between two updates
MAX_UPDATES_PER_STEP = 16  # updates between two looks at the lanes; bounds how long a lane can stay full


STATISTICS_PERIOD = 32  # [updates] between looks at loss and gradient norm, which would stop an accelerator each time


@dataclass
class TrainerState:
    """What a checkpoint keeps of the trainer itself."""

    env_steps: int = 0
    updates: int = 0
    samples: int = 0
    policy_version: int = -1
    wall_seconds: float = 0.0
    cuts: int = 0  # checkpoints taken; each one cuts running episodes and seeds the next ones


@dataclass
class Trainer:
    """One learner with its replay, fed by lanes, publishing to one mailbox."""

    config: Config
    learner: Learner
    replay: ExperienceReplay
    selector: int
    limiter: RateLimiter
    lanes: LaneSet
    mailbox: Mailbox
    board: Board
    counters: CounterRow
    row_dtype: np.dtype[Any]
    state: TrainerState = field(default_factory=TrainerState)
    clock: Callable[[], float] = time.perf_counter
    lr_override: float | None = None  # set from outside while the run goes on, like epsilon_override
    epsilon_override: float | None = None

    def __post_init__(self) -> None:
        self.lag = LagMeter(self.state.policy_version)
        self._rows = np.zeros(max(64, DRAIN_BYTES // self.row_dtype.itemsize), self.row_dtype)
        self._began = self.clock() - self.state.wall_seconds
        self._unpublished = 0
        self._count = {
            name: self.counters[name]
            for name in (
                "env_steps",
                "rows_recorded",
                "updates",
                "samples",
                "publishes",
                "publish_deferred",
                "loss",
                "td_error",
                "q_mean",
                "grad_norm",
                "learn_seconds",
                "sample_seconds",
                "record_seconds",
                "publish_seconds",
                "wait_seconds",
                "replay_size",
                "replay_bytes",
                "lag_p50",
                "lag_p99",
                "policy_version",
                "rollout_wait",
                "epsilon",
                "heartbeat",
            )
        }

    # ---- one turn -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Move what waits in the lanes to replay, learn while samples_per_insert allows; False if there was nothing to
        do."""
        moved = self.drain()
        learned = 0
        while learned < MAX_UPDATES_PER_STEP and self.learn():
            learned += 1
        return moved > 0 or learned > 0

    def wait(self, timeout: float) -> None:
        """Sleep until a rollout or the evaluator rings, at most `timeout` seconds."""
        begin = self.clock()
        bell = self.board.trainer_bell
        seen = bell.value
        if not self.lanes.pending or not self.limiter.insertable():
            bell.wait(seen, timeout)
        self._count["wait_seconds"].add(self.clock() - begin)

    # ---- experience -----------------------------------------------------------------------------------------------

    def drain(self, *, everything: bool = False) -> int:
        """Record what the lanes hold, as far as samples_per_insert allows; rows moved. Nothing is recorded beyond
        run.max_env_steps.

        `everything` (a checkpoint, the end): empty the lanes whatever samples_per_insert says.
        """
        moved = 0
        while everything and self.lanes.pending:
            moved += self._drain(len(self._rows))
        return moved if everything else self._drain(min(len(self._rows), self.limiter.insertable()))

    def _drain(self, room: int) -> int:
        if room == 0:
            self._count["rollout_wait"].set(1.0)
            return 0
        left = self.config.run.max_env_steps - self.state.env_steps
        if left <= 0:
            return self.lanes.drain(self._rows)  # the run is over; what still comes is let go
        room = min(room, left)
        begin = self.clock()
        rows = self._rows[: self.lanes.drain(self._rows[:room])]
        self._count["rollout_wait"].set(
            float(room < len(self._rows) and self.lanes.pending > 0)
        )  # what is left may not be recorded yet
        if len(rows):
            recorded = self.replay.record_rows(rows)
            self.limiter.inserted(recorded)
            self.lag.arrived(rows["policy_version"][rows["kind"] == RowKind.STEP], self.state.policy_version)
            self.state.env_steps += recorded
            self._count["env_steps"].add(recorded)
            self._count["rows_recorded"].add(recorded)
            self._count["record_seconds"].add(self.clock() - begin)
        return len(rows)

    # ---- learning -------------------------------------------------------------------------------------------------

    def learn(self) -> bool:
        """One update, if samples_per_insert allows; publishes when it is due."""
        batch_size = self.config.learner.batch_size
        if not self.limiter.can_sample(batch_size) or not len(self.replay):
            return False
        begin = self.clock()
        batch = self.replay.sample(batch_size, self.selector, self.config.learner.discount)
        sampled = self.clock()
        told = self.state.updates % STATISTICS_PERIOD == 0
        result = self.learner.update(batch, statistics=told)
        learned = self.clock()
        if self.config.replay.selector == "prioritized" and result.priority is not None:
            self.replay.set_priority(self.selector, batch.pick_epi, batch.pick_pos, result.priority)
        told_replay = self.clock()
        self.limiter.sampled(batch_size)
        self.state.updates += 1
        self.state.samples += batch_size
        self.lag.consumed(batch.policy_version, self.state.policy_version)
        self._count["samples"].add(batch_size)
        self._count["updates"].add(1)
        self._count["learn_seconds"].add(learned - sampled)
        self._count["sample_seconds"].add(
            sampled - begin + told_replay - learned
        )  # what replay takes, and nothing else
        if told:
            for name, value in result.figures.items():
                if name in self._count:
                    self._count[name].set(value)
        self._unpublished += 1
        if self._unpublished >= self.config.learner.publish_period:
            self.publish()
        return True

    def publish(self) -> None:
        """Write the acting parameters as the next policy version; never waits for a reader."""
        self._anneal()
        begin = self.clock()
        version = self.state.policy_version + 1
        epsilon = (
            epsilon_at(self.config.rollout, self.state.env_steps)
            if self.epsilon_override is None
            else self.epsilon_override
        )
        sealed = self.mailbox.publish(
            self.learner.parameters.host_view(),
            version,
            (float(self.state.env_steps), epsilon, float(self.state.updates)),
        )
        self._count["publish_seconds"].add(self.clock() - begin)
        if not sealed:  # every slot is on its way to other hosts; the next update tries again, with newer parameters
            self._count["publish_deferred"].add(1)
            return
        self.board.rollout_bell.ring()
        self.board.relay_bell.ring()
        self.state.policy_version = version
        self.lag.published(version)
        self._unpublished = 0
        self._count["epsilon"].set(epsilon)
        self._count["policy_version"].set(version)
        self._count["publishes"].add(1)

    def _anneal(self) -> None:
        fraction = min(1.0, self.state.env_steps / self.config.run.max_env_steps)
        self.learner.anneal(fraction)
        if self.lr_override is not None:
            self.learner.lr = self.lr_override
        if self.config.replay.selector == "prioritized":
            start = self.config.replay.importance_exponent
            self.replay.set_importance_exponent(self.selector, start + fraction * (1.0 - start))

    # ---- figures --------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Wall seconds of the run, earlier parts of a resumed run included."""
        return self.clock() - self._began

    def report(self) -> None:
        """Store the slow figures: called a few times a second, not in the hot loop."""
        self._count["heartbeat"].set(time.time())
        self._count["replay_size"].set(len(self.replay))
        self._count["replay_bytes"].set(self.replay.nbytes)
        p50, p99 = self.lag.recent(50), self.lag.recent(99)
        self._count["lag_p50"].set(p50)
        self._count["lag_p99"].set(p99)
